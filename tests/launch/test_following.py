"""One replica over several hosts, as real servers: here, processes with devices of their own, each host in a
network of its own where the system lets the test make one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.parallel.test_hosts import free_port
from tests.tiny import FAMILIES, greedy_tokens

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
TINY = FAMILIES[0]
FLAGS = (
    "--no-warmup",
    "--skip_tokenizer_init",
    "--num_blocks=64",
    "--max_decode_seqs=8",
    "--max_model_len=256",
)
PROMPT = [3, 4, 5, 6, 7]


class Hosts:
    """The hosts of one replica; the first answers at `address`."""

    def __init__(self, folder: Path, networks: list[str]) -> None:
        self.networks = networks
        self.folder = folder
        names = ["10.99.0.1", "10.99.0.2"] if networks else ["127.0.0.1"] * 2
        self.port, self.coordinator = free_port(), f"{names[0]}:{free_port()}"
        self.address = f"http://{names[0]}:{self.port}"
        self.processes = [self.start(index) for index in (0, 1)]

    def start(self, index: int) -> subprocess.Popen[str]:
        place = ["--num_hosts=2", f"--host_index={index}", f"--coordinator_address={self.coordinator}"]
        command = [
            sys.executable,
            "-m",
            "hex_llm.cli",
            "serve",
            "--host=0.0.0.0",
            f"--port={self.port}",
            *FLAGS,
        ]
        command += [f"--model={self.folder}", "--tensor_parallel_size=2", *place]
        inside = ["ip", "netns", "exec", self.networks[index]] if self.networks else []
        fast = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
        log = (self.folder / f"log.{index}").open("a")
        return subprocess.Popen(
            [*inside, *command],
            cwd=ROOT,
            env={**os.environ, "XLA_FLAGS": fast},
            stdout=log,
            stderr=log,
            text=True,
        )

    def ask(self, num_tokens: int = 16) -> httpx.Response:
        body = {
            "prompt": PROMPT,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        url = f"{self.address}/v1/completions"
        if not self.networks:
            return httpx.post(url, json=body, timeout=120)
        script = (
            f"import httpx; r = httpx.post({url!r}, json={body!r}, timeout=120); print(r.status_code, r.text)"
        )
        inside = ["ip", "netns", "exec", self.networks[0], sys.executable, "-c", script]
        said = subprocess.run(inside, capture_output=True, text=True, timeout=150)
        code, _, text = (said.stdout.strip() or "503 ").partition(" ")
        return httpx.Response(int(code), text=text)

    def await_answer(self, timeout_s: float = 300) -> list[int]:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            try:
                if (reply := self.ask()).status_code == 200:
                    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
                    return tokens
            except httpx.HTTPError:
                pass
            assert all(one.poll() is None for one in self.processes), self.logs()
            time.sleep(0.5)
        raise AssertionError(self.logs())

    def engine_of(self, index: int) -> psutil.Process:
        children = psutil.Process(self.processes[index].pid).children(recursive=True)
        return next(one for one in children if "hex_llm.engine.worker" in one.cmdline())

    def logs(self) -> str:
        return "\n".join((self.folder / f"log.{i}").read_text()[-2000:] for i in (0, 1))

    def end(self) -> None:
        family = [
            child
            for one in self.processes
            if one.poll() is None
            for child in psutil.Process(one.pid).children(recursive=True)
        ]
        for one in [*self.processes, *family]:
            one.kill()
        for one in self.processes:
            one.wait()


@contextmanager
def two_networks() -> Iterator[list[str]]:
    """Empty: none can be made here."""
    names = [f"hex{os.getpid()}{i}" for i in (0, 1)]
    commands = [
        f"netns add {names[0]}",
        f"netns add {names[1]}",
        f"link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}",
        *(f"-n {name} addr add 10.99.0.{i}/24 dev veth0" for i, name in enumerate(names, 1)),
        *(f"-n {name} link set {device} up" for name in names for device in ("lo", "veth0")),
    ]
    can = shutil.which("ip") is not None and os.geteuid() == 0
    if can:
        can = all(
            subprocess.run(["ip", *one.split()], stderr=subprocess.DEVNULL).returncode == 0
            for one in commands
        )
    own = [Path("/etc/netns", name) for name in names if can]
    try:
        for i, folder in enumerate(own, 1):  # which a process there sees as /etc/hosts
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n10.99.0.{i} {socket.gethostname()}\n")
        yield names if can else []
    finally:
        for name, folder in zip(names, own, strict=False):
            shutil.rmtree(folder)
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: Any) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("model")
    model = TINY.save(folder)
    return folder, greedy_tokens(model, PROMPT, 16)


@contextmanager
def hosts(folder: Path, networks: list[str]) -> Iterator[Hosts]:
    running = Hosts(folder, networks)
    try:
        yield running
    finally:
        running.end()


def test_two_networks_serve_one_model_and_end_together(expected: Any) -> None:
    folder, tokens = expected
    with two_networks() as networks, hosts(folder, networks) as running:
        assert running.await_answer() == tokens
        running.processes[0].send_signal(signal.SIGTERM)
        assert [one.wait(60) for one in running.processes] == [0, 0], running.logs()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_loses_a_host_comes_back(expected: Any, victim: int, how: signal.Signals) -> None:
    folder, tokens = expected
    with hosts(folder, []) as running:
        url = f"{running.address}/v1/completions"
        assert running.await_answer() == tokens
        for _ in range(int(os.environ.get("KILLS", "1"))):
            body = {"prompt": PROMPT, "max_tokens": 250, "ignore_eos": True}
            script = (
                f"import httpx; r = httpx.post({url!r}, json={body!r}, timeout=100); print(r.status_code)"
            )
            command = [sys.executable, "-c", script]
            asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # is under way
            time.sleep(random.uniform(1, 3))
            running.engine_of(victim).send_signal(how)
            assert asking.communicate(timeout=90)[0].strip() in ("200", "500", "503")
            assert running.await_answer() == tokens


def test_a_cut_between_two_hosts_heals(expected: Any) -> None:
    folder, tokens = expected
    with two_networks() as networks:
        if not networks:
            pytest.skip("no networks can be made here")
        with hosts(folder, networks) as running:
            assert running.await_answer() == tokens
            cut = ["ip", "-n", networks[1], "link", "set", "veth0"]
            subprocess.run([*cut, "down"], check=True)
            time.sleep(10)
            subprocess.run([*cut, "up"], check=True)
            assert running.await_answer() == tokens
