"""Servers over two hosts on this machine: processes with devices of their own, each host in a network of its
own where the system lets us make one. For tests and for tools/kill_hosts.py."""

from __future__ import annotations

import os
import shutil
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

ROOT = Path(__file__).parent.parent
# Else one that is killed again and again is given up, as it should be.
SERVE = """
import sys; from hex_llm.frontend import process; process.STEADY_S = 0
from hex_llm.cli import main; sys.exit(main())
"""
# The same, with engines that have no model (tools/fake_engine.py).
SERVE_FAKES = """
import sys; from hex_llm.frontend import client, process; process.STEADY_S = 0
from tools.fake_engine import fake_worker
client.WORKER = fake_worker("FakeEngine(step_s=0.005)")
from hex_llm.launch import local
Client = local.EngineClient
local.EngineClient = lambda config, name: Client(config, name, client.WORKER)
from hex_llm.cli import main; sys.exit(main())
"""
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
FLAGS = (
    "--no-warmup",
    "--skip_tokenizer_init",
    "--num_blocks=64",
    "--max_decode_seqs=8",
    "--max_model_len=256",
)
PROMPT = [3, 4, 5, 6, 7]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


def greedy(num_tokens: int) -> dict[str, Any]:
    """The body of a request whose tokens can be compared."""
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": PROMPT, "max_tokens": num_tokens, **fixed}


class Hosts:
    """The first of the two answers at `address`. `flags` say what they share: one replica, or replicas."""

    def __init__(self, folder: Path, networks: list[str], *flags: str, serve: str = SERVE) -> None:
        self.networks = networks
        self.folder = folder
        names = ["10.99.0.1", "10.99.0.2"] if networks else ["127.0.0.1"] * 2
        self.port, self.coordinator = free_port(), f"{names[0]}:{free_port()}"
        self.address = f"http://{names[0]}:{self.port}"
        self._flags, self._serve = flags, serve
        self.processes = [self.start(index) for index in (0, 1)]

    def start(self, index: int) -> subprocess.Popen[str]:
        place = ["--num_hosts=2", f"--host_index={index}", f"--coordinator_address={self.coordinator}"]
        command = [sys.executable, "-c", self._serve, "serve", f"--model={self.folder}", *FLAGS]
        command += ["--host=0.0.0.0", f"--port={self.port}", *place, *self._flags]
        log = (self.folder / f"log.{index}").open("a")
        return subprocess.Popen(
            [*self.inside(index), *command],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            stdout=log,
            stderr=log,
            text=True,
        )

    def inside(self, index: int) -> list[str]:
        """What a command begins with that is to run on a host."""
        return ["ip", "netns", "exec", self.networks[index]] if self.networks else []

    def ask(self, num_tokens: int = 16) -> httpx.Response:
        body = greedy(num_tokens)
        url = f"{self.address}/v1/completions"
        if not self.networks:
            return httpx.post(url, json=body, timeout=120)
        script = (
            f"import httpx; r = httpx.post({url!r}, json={body!r}, timeout=120); print(r.status_code, r.text)"
        )
        command = [*self.inside(0), sys.executable, "-c", script]
        said = subprocess.run(command, capture_output=True, text=True, timeout=150)
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
        kinds = ("hex_llm.engine.worker", "hex_llm.engine.group_worker", "FakeEngine")
        return next(one for one in children if any(kind in " ".join(one.cmdline()) for kind in kinds))

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
def hosts(folder: Path, networks: list[str], *flags: str, serve: str = SERVE) -> Iterator[Hosts]:
    running = Hosts(folder, networks, *flags, serve=serve)
    try:
        yield running
    finally:
        running.end()


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


def cut(network: str, *, is_cut: bool) -> None:
    """Between the two, or mended."""
    state = "down" if is_cut else "up"
    subprocess.run(["ip", "-n", network, "link", "set", "veth0", state], check=True)
