"""Kill tests of a server over two hosts:

    python -m tools.kill_hosts [--times=20] [--replicas] kill | stop | cut | actor | node

One replica spans the hosts, with a small random model, or with --replicas each has one, with stand-ins for
engines unless the hosts are Ray's. Streams are asked for without pause, and at
random moments the engine on the second host gets SIGKILL or SIGSTOP, or the network between the hosts is cut
for 10 s (it is made of namespaces, which needs root); or, where the hosts are nodes of a Ray cluster, the
actor on the second is killed, or that node. Every stream must have one end, and the server must come back by
itself, with the tokens that it gave before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

from tools.hosts import (
    ENVIRONMENT,
    FLAGS,
    SERVE,
    SERVE_FAKES,
    Hosts,
    cut,
    free_port,
    greedy,
    hosts,
    two_networks,
)
from tools.kill_replicas import Load, check

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CUT_S = 10.0
COMPILED_S = 120.0  # a request that comes first waits until its programs are compiled
BACK_S = 600.0  # the engines of both hosts are loaded again, on whatever cores there are
ENDS = {"done", "error told", "refused 500", "refused 503"}


def tokens_of(address: str) -> list[int]:
    reply = httpx.post(f"{address}/v1/completions", json=greedy(8), timeout=COMPILED_S)
    ids: list[int] = reply.raise_for_status().json()["choices"][0]["token_ids"]
    return ids


async def back(address: str, num_engines: int, expected: list[int] | None = None) -> list[int]:
    """When all engines serve; the tokens are those of before."""
    until = time.monotonic() + BACK_S
    while True:
        assert time.monotonic() < until, "it does not come back"
        await asyncio.sleep(0.25)
        try:
            reply = await asyncio.to_thread(httpx.get, f"{address}/stats", timeout=30)
            engines = reply.raise_for_status().json()["engines"]  # 503: none serves yet
            if [one["state"] for one in engines] == ["serving"] * num_engines:
                tokens = await asyncio.to_thread(tokens_of, address)
                assert expected in (None, tokens), (expected, tokens)
                return tokens
        except (httpx.HTTPError, ValueError):
            pass


async def hit_again_and_again(
    address: str, num_engines: int, hit: Callable[[], None], times: int, name: str, echoes: bool = False
) -> None:
    expected = await back(address, num_engines)
    load = Load(address, num_clients=6, echoes=echoes, num_tokens=(5, 30, 200), hung_s=COMPILED_S)
    running, draw, slowest = asyncio.create_task(load.run()), random.Random(1), 0.0
    for _ in range(times):
        await asyncio.sleep(draw.uniform(0.2, 4))
        began = time.monotonic()
        await asyncio.to_thread(hit)
        await asyncio.sleep(1)
        await back(address, num_engines, expected)
        slowest = max(slowest, time.monotonic() - began)
        print(f"{name}: {dict(load.ends)}; back after {time.monotonic() - began:.1f} s", flush=True)
    load.is_over = True
    await running
    print(f"{name} x {times}: {dict(load.ends)}; back after at most {slowest:.1f} s, slowest stream "
          f"{load.slowest_s:.1f} s, load {os.getloadavg()[0]:.0f}", flush=True)  # fmt: skip
    check(load, [], ENDS)


def in_networks(given: argparse.Namespace, folder: Path, flags: list[str]) -> None:
    """This program runs beside host 0."""
    network = os.environ.get("HEX_LLM_NETWORKS", "")
    if given.kind == "cut" and not network:
        with two_networks() as networks:
            assert networks, "no networks can be made here"
            command = [
                "ip",
                "netns",
                "exec",
                networks[0],
                sys.executable,
                "-m",
                "tools.kill_hosts",
                *sys.argv[1:],
            ]
            told = {**os.environ, "HEX_LLM_NETWORKS": ",".join(networks)}
            sys.exit(subprocess.run(command, env=told).returncode)
    networks, serve = network.split(",") if network else [], SERVE_FAKES if given.replicas else SERVE
    with hosts(folder, networks, *flags, serve=serve) as running:
        num_engines = 2 if given.replicas else 1

        def hit() -> None:
            hit_host(running, given.kind)

        job = hit_again_and_again(running.address, num_engines, hit, given.times, given.kind, given.replicas)
        asyncio.run(job)
        family = [child for one in running.processes for child in psutil.Process(one.pid).children(True)]
        running.processes[0].send_signal(signal.SIGTERM)
        assert [one.wait(120) for one in running.processes] == [0, 0], running.logs()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, f"left: {alive}"


def hit_host(running: Hosts, kind: str) -> None:
    if kind == "cut":
        cut(running.networks[1], is_cut=True)
        time.sleep(CUT_S)
        cut(running.networks[1], is_cut=False)
        return
    engine = running.engine_of(1)
    engine.send_signal(signal.Signals[f"SIG{kind.upper()}"])
    engine.wait(60)  # one that is stopped is killed for it


def on_ray(given: argparse.Namespace, folder: Path, flags: list[str]) -> None:
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")
    head = {"num_cpus": 2, "include_dashboard": False}
    # Nodes that are added by another thread than the main one cannot have handlers of signals.
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    nodes = [cluster.add_node(num_cpus=2)]
    port = free_port()
    command = [sys.executable, "-c", SERVE, "serve", f"--model={folder}", *FLAGS, *flags, "--host=127.0.0.1"]
    command += ["--num_hosts=2", "--worker_distributed_method=ray", f"--ray_address={cluster.address}"]
    log = (folder / "log").open("a")
    with subprocess.Popen(
        [*command, f"--port={port}"], env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log
    ) as server:

        def hit() -> None:
            before = helper()
            if given.kind == "actor":
                actor = before.parent()
                assert actor is not None
                actor.kill()
            else:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
                nodes.append(cluster.add_node(num_cpus=2))
            before.wait(60)

        try:
            job = hit_again_and_again(
                f"http://127.0.0.1:{port}", 2 if given.replicas else 1, hit, given.times, given.kind
            )
            asyncio.run(job)
            server.send_signal(signal.SIGTERM)
            assert server.wait(120) == 0
        except BaseException:
            print((folder / "log").read_text()[-4000:])
            raise
        finally:
            server.kill()
            cluster.shutdown()


def helper() -> psutil.Process:
    """What an actor has started."""
    found: list[psutil.Process] = [
        one for one in psutil.process_iter(["cmdline"]) if "hex_llm.launch.ray" in (one.info["cmdline"] or [])
    ]
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--replicas", action="store_true")
    parser.add_argument("kind", choices=("kill", "stop", "cut", "actor", "node"))
    given = parser.parse_args()
    shared = ["--data_parallel_size=2", "--cluster_key=a key that hosts share"]
    flags: list[str] = shared if given.replicas else ["--tensor_parallel_size=2"]
    flags += ["--load_format=dummy", "--stuck_timeout=5", "--log_level=WARNING"]
    run: Any = on_ray if given.kind in ("actor", "node") else in_networks
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kill_hosts-")))
        (folder / "config.json").write_text(json.dumps(CONFIG))
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
        run(given, folder, flags)


if __name__ == "__main__":
    main()
