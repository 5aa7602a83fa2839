"""A real server with the default model as a process of its own, light clients before it, and judgements.

Clients share the machine with the server, so they do little: one task and one plain socket for each request.
All times are of the monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import uvloop

from tests.server.fakes import seconds_until_gone

ROOT = Path(__file__).parent.parent.parent
HOST = "127.0.0.1"
# What a laptop would use: prompts never hold up the others' tokens for long.
FLAGS = "--max_decode_seqs=16 --max_model_len=2048 --enable_chunked_prefill --max_num_batched_tokens=64"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
ANSWER = "The capital of France is Paris."  # in float32: bfloat16 may take "L'Étoile" for as likely
START_S = 300  # for a first start, which compiles, on a busy machine
METRICS_S = 30  # for a server that answers anything at all
GONE_S = 10  # what the processes of a server get to end after it

Json = dict[str, Any]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


# ---- the server


class Server:
    """`hex-llm serve` while the block runs; its log is `log`. It can be started again on the same port."""

    def __init__(self, flags: str, folder: Path, env: Mapping[str, str | None] | None = None) -> None:
        """`env` is set for its processes; None takes a variable away."""
        self.flags, self.log, self.port = shlex.split(flags), folder / "server.log", free_port()
        # The tests' virtual devices would only slow it down.
        changed = {"XLA_FLAGS": None, **(env or {})}
        self._env = {k: v for k, v in {**os.environ, **changed}.items() if v is not None}

    def __enter__(self) -> Server:
        # Whoever ends a long run ends its server too.
        self._handler = signal.signal(signal.SIGTERM, exit_once)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        signal.signal(signal.SIGTERM, self._handler)

    def start(self) -> None:
        """Returns when it is ready."""
        command = [sys.executable, "-m", "hex_llm.cli", "serve", f"--host={HOST}", f"--port={self.port}"]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*command, *self.flags], cwd=ROOT, env=self._env, stdout=log, stderr=log
            )
        try:
            self.await_health(START_S)
        except BaseException:
            self.process.kill()
            raise

    def await_health(self, limit_s: float) -> float:
        """The seconds until it was ready."""
        begun = time.monotonic()
        while not self.is_healthy():
            assert self.process.poll() is None, self.log_tail()
            assert time.monotonic() - begun < limit_s, f"not ready after {limit_s} s\n{self.log_tail()}"
            time.sleep(0.1)
        return time.monotonic() - begun

    def is_healthy(self) -> bool:
        asked = http.client.HTTPConnection(HOST, self.port, timeout=10)
        try:
            asked.request("GET", "/health")
            return asked.getresponse().status == 200
        except OSError:
            return False
        finally:
            asked.close()

    def restart(self) -> None:
        """Whatever state it is in."""
        self._kill()
        self.start()

    def _kill(self) -> None:
        family = self.family()
        self.process.kill()
        self.process.wait()
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def family(self) -> list[psutil.Process]:
        """All processes but the server's own."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def engine_pid(self) -> int:
        engine = self.engine()
        return engine.pid if engine else 0

    def engine(self) -> psutil.Process | None:
        for one in self.family():
            with suppress(psutil.Error):
                if "hex_llm.engine.worker" in one.cmdline():
                    return one
        return None


def exit_once(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would end the clearing up
    sys.exit(128 + number)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as found:
        return found.getsockname()[1]


def left_of(processes: Collection[psutil.Process], limit_s: float = GONE_S) -> list[str]:
    """Those that do not end within the limit, by name; they are killed then."""
    try:
        seconds_until_gone(processes, limit_s)
    except AssertionError:
        left = [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        names = [f"{one.pid} {one.name()} {one.status()}" for one in left]
        for one in left:
            one.kill()
        return names
    return []


# ---- one request


@dataclass
class Reply:
    """What came, and when."""

    asked: float = field(default_factory=time.monotonic)
    ended: float = 0.0  # 0: it is still under way
    status: int = 0  # 0: nothing came
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""  # of a reply that is no stream; its beginning
    whole: bool = False  # the connection was not closed before its end
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each token
    text: str = ""
    finishes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_done: int = 0
    num_choices: int = 1

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def completed(self) -> bool:
        return self.has_one_end and self.status == 200 and not self.errors

    @property
    def has_one_end(self) -> bool:
        """An answer or an error, told once and to its end."""
        if not self.is_stream:
            return self.whole
        ends = len(self.finishes) == self.num_choices if not self.errors else len(self.errors) == 1
        return self.whole and self.num_done == 1 and ends

    def gaps(self) -> list[float]:
        """Between tokens; what was waited for the first does not count."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    def longest_silence(self, since: float) -> float:
        """After `since`, until the end or until now."""
        end = self.ended or time.monotonic()
        heard = [since, *(one for one in self.times if one > since), max(end, since)]
        return max(later - earlier for earlier, later in pairwise(heard))

    def shown(self) -> str:
        ends = f"finishes={self.finishes} errors={self.errors} done={self.num_done} whole={self.whole}"
        return f"status={self.status} tokens={len(self.times)} {ends} body={self.body[:200]!r}"


async def ask(
    port: int,
    path: str,
    body: Json | bytes,
    *,
    reply: Reply | None = None,
    headers: str = "",
    parse: bool = True,
) -> Reply:
    """The whole reply; a connection that breaks is no error, but the reply is not whole. `reply` is filled
    while it comes; without `parse`, the events of a stream are only read."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    data = posted(path, content, f"connection: close\r\n{headers}")
    return await exchange(port, data, reply or Reply(), parse=parse)


def posted(path: str, content: bytes, headers: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n{headers}\r\n"
    )
    return head.encode() + content


async def ask_again(
    port: int, path: str, body: Json, reply: Reply, connection: Connection | None
) -> tuple[Reply, Connection | None]:
    """On a connection that was used before, if there is one; and one that can be used again."""
    try:
        reader, writer = connection or await asyncio.open_connection(HOST, port, limit=1 << 20)
        writer.write(posted(path, json.dumps(body).encode()))
        await _read(reader, reply, parse=True)
        return reply, (reader, writer)
    except (OSError, EOFError, asyncio.LimitOverrunError):
        return reply, None
    finally:
        reply.ended = time.monotonic()


async def get(port: int, path: str) -> Reply:
    head = f"GET {path} HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n\r\n"
    return await exchange(port, head.encode(), Reply())


async def exchange(port: int, data: bytes, reply: Reply, *, parse: bool = True) -> Reply:
    writer = None
    try:
        reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
        writer.write(data)
        with suppress(ConnectionError):  # it may be refused before it is read
            await writer.drain()
        await _read(reader, reply, parse)
    except (OSError, EOFError, asyncio.LimitOverrunError):
        pass
    finally:
        reply.ended = time.monotonic()
        if writer is not None:
            writer.transport.abort()
    return reply


async def _read(reader: asyncio.StreamReader, reply: Reply, parse: bool) -> None:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    reply.status = int(first.split()[1])
    reply.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
    if "transfer-encoding" in reply.headers:
        rest = b""
        while size := int(await reader.readline(), 16):
            data = (await reader.readexactly(size + 2))[:-2]
            if not reply.is_stream:
                reply.body = (reply.body + data)[:10_000]
            elif parse:
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    if not event.startswith(b":"):  # a comment: the stream was silent for a while
                        _note(event.removeprefix(b"data: "), reply)
        await reader.readexactly(2)
    else:
        left = int(reply.headers.get("content-length", 0))
        while left:
            data = await reader.readexactly(min(left, 1 << 16))
            left -= len(data)
            reply.body = (reply.body + data)[: 1 << 20]
    reply.whole = True


def _note(data: bytes, reply: Reply) -> None:
    if data == b"[DONE]":
        reply.num_done += 1
        return
    told = json.loads(data)
    if "error" in told:
        reply.errors.append(str(told["error"].get("message")))
    for choice in told.get("choices", ()):
        ids = choice.get("token_ids") or ()
        reply.token_ids += ids
        reply.times += [time.monotonic()] * max(len(ids), 1)
        reply.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if choice.get("finish_reason"):
            reply.finishes.append(choice["finish_reason"])


async def answers_right(port: int, limit_s: float) -> float | None:
    """The seconds until a plain question was answered as it must be; None: it never was."""
    begun = time.monotonic()
    while time.monotonic() - begun < limit_s:
        with suppress(TimeoutError):
            reply = await asyncio.wait_for(ask(port, CHAT, QUESTION), limit_s)
            if reply.status == 200:
                said = json.loads(reply.body)["choices"][0]["message"]["content"]
                if said == ANSWER:
                    return time.monotonic() - begun
                print("a wrong answer:", repr(said), flush=True)
                return None
        await asyncio.sleep(0.2)
    return None


# ---- what the server tells of itself


async def metrics(port: int) -> dict[str, float]:
    """By name and labels, as they are written; TimeoutError: the server does not answer."""
    text = (await asyncio.wait_for(get(port, "/metrics"), METRICS_S)).body.decode()
    found = re.findall(r"^([^#\s]\S*) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def total(numbers: Mapping[str, float], name: str, label: str = "") -> float:
    """Of all series of a metric whose labels match `label`."""
    return sum(v for k, v in numbers.items() if k.partition("{")[0] == name and re.search(label, k))


def held(numbers: dict[str, float]) -> tuple[float, ...]:
    """Blocks, running and waiting sequences."""
    running, waiting = (total(numbers, f"vllm:num_requests_{name}") for name in ("running", "waiting"))
    return total(numbers, "hex_llm:kv_blocks") - total(numbers, "hex_llm:kv_blocks_free"), running, waiting


def quantile(before: Mapping[str, float], after: Mapping[str, float], name: str, q: float) -> float | None:
    """An upper bound, from a histogram's buckets, of what came between; None: there is none."""
    counts = sorted(
        (float(found[1]), value - before.get(key, 0))
        for key, value in after.items()
        if key.startswith(f"{name}_bucket") and (found := re.search(r'le="([^"]+)"', key))
    )
    if not counts or not counts[-1][1]:
        return None
    return next(bound for bound, count in counts if count >= q * counts[-1][1])


@dataclass
class Sample:
    """Of both processes at one time."""

    at: float
    rss: tuple[int, int]  # bytes; the server's, the engine's
    fds: tuple[int, int]
    threads: tuple[int, int]
    engine_pid: int


async def sampled(server: Server, every_s: float, into: list[Sample]) -> None:
    """For ever; moments without an engine are left out."""
    own = psutil.Process(server.process.pid)
    while True:
        with suppress(psutil.Error):
            if engine := server.engine():
                both = (own, engine)
                into.append(
                    Sample(
                        time.monotonic(),
                        tuple(one.memory_info().rss for one in both),  # type: ignore[arg-type]
                        tuple(one.num_fds() for one in both),  # type: ignore[arg-type]
                        tuple(one.num_threads() for one in both),  # type: ignore[arg-type]
                        engine.pid,
                    )
                )
        await asyncio.sleep(every_s)


# ---- judgements


def percentile(values: Sequence[float], q: float) -> float:
    """Not a number where there is nothing."""
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else math.nan


class Verdicts:
    """One line for each criterion as it is judged, and all that was seen as JSON in the end."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.seen: Json = {}

    def judge(self, criterion: str, holds: bool, seen: Any) -> None:
        self.seen[criterion] = seen
        print(f"{'holds' if holds else 'FAILS'}: {criterion}: {json.dumps(seen)}", flush=True)
        if not holds:
            self.failed.append(criterion)

    def note(self, **seen: Any) -> None:
        """What is not judged."""
        self.seen |= seen

    def conclude(self) -> int:
        """The exit code."""
        print(json.dumps({"failed": self.failed, **self.seen}), flush=True)
        return 1 if self.failed else 0


def judged(
    run: Callable[[Server, argparse.Namespace, Verdicts], Coroutine[Any, Any, None]],
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    flags: str = FLAGS,
) -> int:
    """Runs it with a server and the program's arguments; the exit code. The loop is a light one."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", default=flags, help="of the server")
    given, verdicts = parser.parse_args(argv), Verdicts()
    with tempfile.TemporaryDirectory() as folder, Server(given.flags, Path(folder)) as server:
        uvloop.run(run(server, given, verdicts))
    return verdicts.conclude()


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """All of them, once they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
