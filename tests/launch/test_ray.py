"""A replica over two nodes of a real Ray cluster, both on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError
from tests.launch.test_following import TINY
from tests.tiny import greedy_tokens
from tools.hosts import ENVIRONMENT, FLAGS, PROMPT, free_port

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    running = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    running.add_node(num_cpus=2)
    try:
        yield running
    finally:
        running.shutdown()


def start(cluster: Any, folder: Path, port: int, *flags: str) -> subprocess.Popen[str]:
    given = [f"--model={folder}", "--num_hosts=2", "--host=127.0.0.1", f"--port={port}", *FLAGS, *flags]
    given += ["--worker_distributed_method=ray", f"--ray_address={cluster.address}"]
    log = (folder / "log").open("a")
    command = [sys.executable, "-m", "hex_llm.cli", "serve", *given]
    return subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log, text=True)


def await_tokens(server: subprocess.Popen[str], port: int, folder: Path) -> list[int]:
    body = {
        "prompt": PROMPT,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    for _ in range(600):
        assert server.poll() is None, (folder / "log").read_text()[-3000:]
        try:
            reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=100)
            if reply.status_code == 200:
                tokens: list[int] = reply.json()["choices"][0]["token_ids"]
                return tokens
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError((folder / "log").read_text()[-3000:])


def await_all_engines(port: int) -> None:
    for _ in range(200):
        stats = httpx.get(f"http://127.0.0.1:{port}/stats").json()
        if all(one["state"] == "serving" for one in stats["engines"]):
            return
        time.sleep(0.5)
    raise AssertionError(stats)


def followers() -> list[psutil.Process]:
    return [
        one for one in psutil.process_iter(["cmdline"]) if "hex_llm.launch.ray" in (one.info["cmdline"] or [])
    ]


@pytest.mark.parametrize("flag", ["--tensor_parallel_size=2", "--data_parallel_size=2", "--disagg_topo=1,1"])
def test_two_nodes_serve_and_a_lost_actor_comes_back(cluster: Any, tmp_path: Path, flag: str) -> None:
    """One replica over both, one on each, or one of which the one prefills and the other decodes."""
    expected = greedy_tokens(TINY.save(tmp_path), PROMPT, 16)
    port = free_port()
    server = start(cluster, tmp_path, port, flag)
    try:
        for _ in range(4):
            assert await_tokens(server, port, tmp_path) == expected
        await_all_engines(port)  # one that has never been there is no loss, but an error
        (follower,) = followers()
        actor = follower.parent()
        assert actor is not None
        actor.kill()  # with which what it started ends
        follower.wait(30)
        for _ in range(100):
            if len(followers()) == 1:
                break
            time.sleep(0.5)
        assert await_tokens(server, port, tmp_path) == expected
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, (tmp_path / "log").read_text()[-3000:]
        for one in followers():
            one.wait(30)
    finally:
        server.kill()


def test_what_a_cluster_lacks_is_told_in_one_line(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hex_llm.launch import ray as launch

    monkeypatch.setattr(launch, "PLACE_S", 2.0)
    config = EngineConfig(num_hosts=3, tensor_parallel_size=3, ray_address=cluster.address)
    message = "--num_hosts=3: within 2 s the Ray cluster had no such nodes"
    with pytest.raises(ConfigError, match=message), launch.ray_hosts(config):
        pass


def test_no_cluster_is_told_in_one_line() -> None:
    from hex_llm.launch import ray as launch

    address = f"127.0.0.1:{free_port()}"
    config = EngineConfig(num_hosts=2, tensor_parallel_size=2, ray_address=address)
    message = f"--ray_address={address}: no Ray cluster answers"
    with pytest.raises(ConfigError, match=message), launch.ray_hosts(config):
        pass
