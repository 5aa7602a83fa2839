"""Kill tests of a server with several replicas and front ends, whose engines are stand-ins in real processes:

    python -m tools.kill_replicas [--times=20] [--fronts=1] [kill] [stop] [term]

Streams are asked for without pause; at random moments an engine gets SIGKILL or SIGSTOP, or the server
SIGTERM. Every stream must have one end: all of its tokens, an error that the reply tells, or a refusal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parent.parent
SERVER = """
from hex_llm.config import *; from hex_llm.launch import local; from tools.fake_engine import fake_worker
from hex_llm.frontend import process
process.STEADY_S = 0  # else one that is killed again and again is given up, as it should be
Client = local.EngineClient
local.EngineClient = lambda config, name: Client(config, name, fake_worker("FakeEngine(step_s=0.005)"))
config = ServerConfig(host="127.0.0.1", port=0, stuck_timeout=3, drain_timeout=10, log_level="WARNING",
                      api_server_count={fronts})
local.serve(EngineConfig(skip_tokenizer_init=True, data_parallel_size=2), config)
"""
NUM_CLIENTS = 24
PAUSE_S = 0.2  # after a refusal
HUNG_S = 30  # longer than the time to notice a stopped engine and to end its requests


def start(num_fronts: int) -> tuple[subprocess.Popen[str], str, list[psutil.Process]]:
    script = SERVER.format(fronts=num_fronts)
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = ""
    for line in process.stdout:
        if found := re.search(r"ready on (\S+)", line):
            address = found[1]
        if "try:" in line:
            break
    return process, address, psutil.Process(process.pid).children(recursive=True)


class Load:
    """Clients that stream one reply after another, and what became of each."""

    def __init__(
        self,
        address: str,
        num_clients: int = NUM_CLIENTS,
        echoes: bool = True,  # the engine's tokens are those of the prompt
        num_tokens: tuple[int, ...] = (5, 50, 400),
        hung_s: float = HUNG_S,
    ) -> None:
        self.address, self._hung_s = address, hung_s
        self._num_clients, self._echoes, self._num_tokens = num_clients, echoes, num_tokens
        self.ends: Counter[str] = Counter()
        self.is_over = False
        self.slowest_s = 0.0

    async def run(self) -> None:
        async with httpx.AsyncClient(
            timeout=self._hung_s, limits=httpx.Limits(max_connections=None)
        ) as client:
            await asyncio.gather(*(self._ask(client, 5 + i) for i in range(self._num_clients)))

    async def _ask(self, client: httpx.AsyncClient, token: int) -> None:
        draw = random.Random(token)
        while not self.is_over:
            num_tokens, began = draw.choice(self._num_tokens), time.monotonic()
            end = await self._stream(client, token, num_tokens)
            self.ends[end] += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            if end.startswith("refused"):
                await asyncio.sleep(PAUSE_S)

    async def _stream(self, client: httpx.AsyncClient, token: int, num_tokens: int) -> str:
        body = {"prompt": [token], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        body["return_token_ids"] = True
        got, ends = 0, 0
        try:
            async with client.stream("POST", f"{self.address}/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    return f"refused {reply.status_code}"
                async for line in reply.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    data = json.loads(line.removeprefix("data: "))
                    if "error" in data:
                        return "error told" if not ends else "TWO ENDS"
                    for choice in data["choices"]:
                        ids = choice.get("token_ids") or []
                        if self._echoes and set(ids) - {token}:
                            return "WRONG TOKENS"
                        got += len(ids)
                        ends += choice["finish_reason"] is not None
        except httpx.TimeoutException:
            return "HUNG"
        except httpx.HTTPError:
            return "CUT OFF" if got else "nobody there"
        return (
            "done" if (ends, got) == (1, num_tokens) else f"WRONG END: {ends}, {got} of {num_tokens} tokens"
        )


def states(address: str) -> list[str]:
    return [one["state"] for one in httpx.get(f"{address}/stats", timeout=30).json()["engines"]]


async def engines(sign: signal.Signals, times: int, num_fronts: int) -> None:
    """The other replica serves all the while, and the one that was hit comes back."""
    process, address, children = start(num_fronts)
    load = Load(address)
    running, draw, slowest = asyncio.create_task(load.run()), random.Random(1), 0.0
    for _ in range(times):
        await asyncio.sleep(draw.uniform(0.1, 1.5))
        found = psutil.Process(process.pid).children()
        workers = [one for one in found if "hex_llm.launch.child" not in one.cmdline()]
        hit, began = draw.choice(workers), time.monotonic()
        hit.send_signal(sign)
        while hit.is_running():
            assert (await asyncio.to_thread(httpx.get, f"{address}/health", timeout=30)).status_code == 200
            await asyncio.sleep(0.1)
        while await asyncio.to_thread(states, address) != ["serving"] * 2:
            await asyncio.sleep(0.1)
        slowest = max(slowest, time.monotonic() - began)
        children += psutil.Process(process.pid).children(recursive=True)
    load.is_over = True
    await running
    process.terminate()
    print(f"{sign.name} × {times}: {dict(load.ends)}; back after at most {slowest:.1f} s, slowest stream "
          f"{load.slowest_s:.1f} s, exit {process.wait(30)}")  # fmt: skip
    check(load, children, {"done", "error told", "refused 503"})


async def server(times: int, num_fronts: int) -> None:
    ends: Counter[str] = Counter()
    draw = random.Random(2)
    for _ in range(times):
        process, address, children = start(num_fronts)
        load = Load(address)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(draw.uniform(0.2, 2))
        process.terminate()
        await asyncio.sleep(0.5)
        load.is_over = True
        await running
        assert await asyncio.to_thread(process.wait, 30) == 0
        check(load, children, {"done", "refused 503", "nobody there"})
        ends += load.ends
    print(f"SIGTERM × {times}: {dict(ends)}")


def check(load: Load, children: list[psutil.Process], allowed: set[str]) -> None:
    assert set(load.ends) <= allowed, load.ends
    _, alive = psutil.wait_procs(set(children), timeout=10)
    assert not alive, f"left: {alive}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--fronts", type=int, default=1)
    parser.add_argument("kinds", nargs="*", default=["kill", "stop", "term"])
    given = parser.parse_args()
    for kind in given.kinds:
        if kind == "term":
            asyncio.run(server(given.times, given.fronts))
        else:
            asyncio.run(engines(signal.Signals[f"SIG{kind.upper()}"], given.times, given.fronts))
