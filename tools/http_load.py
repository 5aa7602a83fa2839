"""Many clients at once before a real server, whose engine is a stand-in in a real worker process.

The engine gives each stream one token a step, at a steady pace; which token, its prompt tells, so a client
knows every byte that it must get. Times are of one clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx

from hex_llm.types import Request, Update
from tools.fake_engine import FakeEngine

ROOT = Path(__file__).parent.parent
SERVER = """
import cProfile, sys, time
from hex_llm.config import EngineConfig, ServerConfig
from hex_llm.frontend import client
from hex_llm.launch import fronts, local
from tools.fake_engine import byte_tokenizer, fake_worker

client.tokenizer_of = lambda config: byte_tokenizer()
fronts.FRONT = (sys.executable, "-c", {front!r})
load = "__import__('tools.http_load', fromlist='x').PacedEngine({pace_s!r}, Path({journal!r}))"
local.EngineClient = lambda config, name: client.EngineClient(config, name, fake_worker(load))
config = ServerConfig(host="127.0.0.1", port=0, api_server_count={num_fronts})
serve = lambda: local.serve(EngineConfig(data_parallel_size={num_replicas}), config)
if profile := {profile!r}:
    measured = cProfile.Profile(time.thread_time)  # others share the machine
    measured.runcall(serve)
    measured.dump_stats(profile)
else:
    serve()
"""
FRONT = """
from hex_llm.frontend import client
from hex_llm.launch.child import main
from tools.fake_engine import byte_tokenizer

client.tokenizer_of = lambda config: byte_tokenizer()
main()
"""
BEHIND_S = 0.1  # what an engine that was held up makes good


class PacedEngine(FakeEngine):
    """A step each `pace_s`. When it falls idle it tells in `journal` when the tokens of each prompt came."""

    def __init__(self, pace_s: float, journal: Path) -> None:
        super().__init__()
        self._pace_s, self._told = pace_s, journal
        self._due = 0.0
        self._times: list[float] = []  # of the steps
        self._first: dict[str, int] = {}  # by prompt: the number of its first step

    def add(self, request: Request) -> None:
        super().add(request)
        self._first[_key(request.prompt_ids)] = len(self._times)

    def step(self) -> list[Update]:
        now = time.monotonic()
        self._due = max(self._due, now - BEHIND_S) + self._pace_s
        time.sleep(max(self._due - now, 0))
        updates = super().step()
        self._times.append(time.monotonic())
        if not self.has_work:
            self._told.write_text(json.dumps({"times": self._times, "first": self._first}))
        return updates


def _key(prompt_ids: list[int]) -> str:
    return bytes(i - 3 for i in prompt_ids[1:]).decode()


@contextmanager
def loaded_server(
    journal: Path,
    *,
    tokens_per_s: float,
    num_streams: int,
    profile: str = "",
    num_replicas: int = 1,
    num_fronts: int = 1,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a server and its process, which logs beside `journal`. Its engines give `num_streams`
    streams so many tokens in all."""
    values = {"pace_s": num_streams / tokens_per_s, "journal": str(journal), "profile": profile}
    script = SERVER.format(**values, front=FRONT, num_replicas=num_replicas, num_fronts=num_fronts)
    log = journal.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=file, stdout=file)
    try:
        while not (found := re.search(r"listening on (\S+),.*ready on", log.read_text(), re.DOTALL)):
            time.sleep(0.05)
            assert process.poll() is None, log.read_text()
        yield found[1], process
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@dataclass
class Stream:
    """One reply, as it came."""

    prompt: str
    num_tokens: int
    reads: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def expected(self) -> str:
        """The prompt backwards, again and again; its first token, which has no text, counts."""
        return "".join(islice(cycle([*reversed(self.prompt), ""]), self.num_tokens))

    def body(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "max_tokens": self.num_tokens, "ignore_eos": True, "stream": True}

    def head_and_events(self) -> tuple[bytes, list[tuple[float, bytes]]]:
        """The head; and each event's data, with the time when the last byte of its HTTP chunk was read."""
        data = b"".join(read for _, read in self.reads)
        head, _, _ = data.partition(b"\r\n\r\n")
        at, ends, read_ends = len(head) + 4, iter(self.reads), 0
        events, now = [], 0.0
        while at < len(data):
            line_end = data.index(b"\r\n", at)
            start, end = line_end + 2, line_end + 2 + int(data[at:line_end], 16)
            assert data[end : end + 2] == b"\r\n", "a chunk has another length than it says"
            while read_ends < end + 2:
                now, read = next(ends)
                read_ends += len(read)
            events += [(now, one.removeprefix(b"data: ")) for one in data[start:end].split(b"\n\n") if one]
            at = end + 2
        return head, events

    def check(self) -> list[float]:
        """That nothing is lost, moved, or said twice. The times when each letter of the text was read."""
        head, events = self.head_and_events()
        assert head.startswith(b"HTTP/1.1 200 "), head
        assert events.pop()[1] == b"[DONE]"
        times, text, reason = [], [], None
        for now, data in events:
            assert reason is None, "a chunk after the end"
            (choice,) = json.loads(data)["choices"]
            text.append(choice["text"])
            times += [now] * len(choice["text"])
            reason = choice["finish_reason"]
        assert "".join(text) == self.expected
        assert reason == "length"
        return times

    @property
    def num_events(self) -> int:
        return sum(read.count(b"data: ") for _, read in self.reads)


def make_streams(count: int, num_tokens: int) -> list[Stream]:
    return [Stream(f"{i:05d} bottles of beer on the wall", num_tokens) for i in range(count)]


def read_all(address: str, streams: list[Stream]) -> None:
    """All of the streams at once. Their bytes are looked at later, and nothing stands between a socket and
    the clock, so that clients, which share the machine, hold up neither the server nor what is measured."""
    with selectors.DefaultSelector() as waiting:
        for stream in streams:
            waiting.register(_asked(address, stream), selectors.EVENT_READ, stream.reads)
        while waiting.get_map():
            for key, _ in waiting.select():
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                if data:
                    key.data.append((time.monotonic(), data))
                else:
                    waiting.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]


def _asked(address: str, stream: Stream) -> socket.socket:
    url, body = httpx.URL(address), json.dumps(stream.body()).encode()
    client = socket.create_connection((url.host, url.port or 80), timeout=60)
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    return client


@contextmanager
def idle_connections(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Connections of clients that have sent half a request's head, and are in no hurry."""
    url = httpx.URL(address)
    found: list[socket.socket] = []
    try:
        for _ in range(count):
            found.append(socket.create_connection((url.host, url.port), timeout=30))
            found[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nhost: te")
        yield found
    finally:
        for one in found:
            one.close()
