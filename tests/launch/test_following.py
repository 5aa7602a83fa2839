"""One replica over several hosts, or one on each, or groups of one, as real servers (tools/hosts.py)."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny import FAMILIES, greedy_tokens
from tools.hosts import PROMPT, cut, hosts, two_networks

pytestmark = pytest.mark.slow

TINY = FAMILIES[0]
ONE = ("--tensor_parallel_size=2",)  # replica over both


@pytest.fixture(scope="module")
def expected(tmp_path_factory: Any) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("model")
    model = TINY.save(folder)
    return folder, greedy_tokens(model, PROMPT, 16)


def test_two_networks_serve_one_model_and_end_together(expected: Any) -> None:
    folder, tokens = expected
    with two_networks() as networks, hosts(folder, networks, *ONE) as running:
        assert running.await_answer() == tokens
        running.processes[0].send_signal(signal.SIGTERM)
        assert [one.wait(60) for one in running.processes] == [0, 0], running.logs()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_loses_a_host_comes_back(expected: Any, victim: int, how: signal.Signals) -> None:
    folder, tokens = expected
    with hosts(folder, [], *ONE) as running:
        url = f"{running.address}/v1/completions"
        assert running.await_answer() == tokens
        body = {"prompt": PROMPT, "max_tokens": 250, "ignore_eos": True}
        script = f"import httpx; r = httpx.post({url!r}, json={body!r}, timeout=100); print(r.status_code)"
        asking = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        time.sleep(random.uniform(1, 3))
        running.engine_of(victim).send_signal(how)
        assert asking.communicate(timeout=90)[0].strip() in ("200", "500", "503")
        assert running.await_answer() == tokens


def test_a_cut_between_two_hosts_heals(expected: Any) -> None:
    folder, tokens = expected
    with two_networks() as networks:
        if not networks:
            pytest.skip("no networks can be made here")
        with hosts(folder, networks, *ONE) as running:
            assert running.await_answer() == tokens
            cut(networks[1], is_cut=True)
            time.sleep(10)
            cut(networks[1], is_cut=False)
            assert running.await_answer() == tokens


SECRET = "a key that hosts share"
EACH = ("--data_parallel_size=2", f"--cluster_key={SECRET}")  # has a replica


def test_replicas_in_two_networks_serve_are_cut_off_and_end_together(expected: Any) -> None:
    folder, tokens = expected
    with two_networks() as networks, hosts(folder, networks, *EACH) as running:
        for _ in range(4):  # which go to the one and to the other
            assert running.await_answer() == tokens
        if networks:
            cut(networks[1], is_cut=True)
            for _ in range(4):
                assert running.ask().status_code in (200, 503)
                time.sleep(5)
            cut(networks[1], is_cut=False)
        assert running.await_answer() == tokens
        running.processes[0].send_signal(signal.SIGTERM)
        assert [one.wait(90) for one in running.processes] == [0, 0], running.logs()


GROUPS = ("--disagg_topo=1,1", f"--cluster_key={SECRET}")  # host 0 prefills, host 1 decodes


def test_groups_in_two_networks_serve_lose_either_process_and_end_together(expected: Any) -> None:
    folder, tokens = expected
    with two_networks() as networks, hosts(folder, networks, *GROUPS) as running:
        assert running.await_answer() == tokens
        for victim in (1, 0):
            engine = running.engine_of(victim)
            engine.kill()
            psutil.wait_procs([engine], 10)
            assert running.await_answer() == tokens
        running.processes[0].send_signal(signal.SIGTERM)
        assert [one.wait(90) for one in running.processes] == [0, 0], running.logs()


def test_groups_that_hosts_have_no_devices_for_are_refused(expected: Any) -> None:
    folder, _ = expected
    with hosts(folder, [], "--disagg_topo=2,2", f"--cluster_key={SECRET}") as running:
        assert [one.wait(60) for one in running.processes] == [2, 2]
        assert running.logs().count("error: --disagg_topo=2,2: 2 devices are needed, 1 for each group") == 2
