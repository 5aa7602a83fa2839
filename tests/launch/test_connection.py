"""Clients that are slow, idle or do not read, at a real socket."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Response

from hex_llm.config import ServerConfig
from hex_llm.launch.connection import connection
from hex_llm.launch.local import bind
from hex_llm.server.app import create_app
from hex_llm.server.gate import MAX_HEAD
from hex_llm.types import FinishReason, Update
from tests.server.asking import COMPLETIONS
from tests.server.fakes import EOS, FIRST_BYTE, FakeBackend, byte_tokenizer

HEAD = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" % COMPLETIONS.encode()
LATE_S = 4  # after which a limit of one second has surely passed


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """The port of a server whose limits are one second each."""
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        app,
        http=connection(1, 1),
        h11_max_incomplete_event_size=MAX_HEAD,
        timeout_keep_alive=1,
        log_config=None,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def around(backend: FakeBackend) -> FastAPI:
    return create_app(backend, ServerConfig(receive_timeout=1))


@pytest.fixture
def port() -> Iterator[int]:
    with serving(around(FakeBackend(byte_tokenizer()))) as found:
        yield found


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def read_all(client: socket.socket) -> bytes:
    found = b""
    try:
        while part := client.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


def status(reply: bytes) -> int:
    return int(reply.split()[1])


@pytest.mark.parametrize("sent", [b"", HEAD, b"GET /hea", HEAD + b"x-slow: "])
def test_a_head_must_come_in_time(port: int, sent: bytes) -> None:
    with connected(port) as client:
        client.sendall(sent)
        started = time.monotonic()
        while time.monotonic() - started < LATE_S:
            try:
                client.sendall(b"a" if sent else b"")  # a trickle does not help
            except OSError:
                break
            if not sent:
                break
            time.sleep(0.1)
        assert read_all(client) == b""
        assert 0.5 < time.monotonic() - started < LATE_S


def test_a_second_head_must_come_in_time_too(port: int) -> None:
    with connected(port) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert status(client.recv(1 << 16)) == 200
        client.sendall(b"GET /hea")
        started = time.monotonic()
        assert read_all(client) == b""
        assert 0.5 < time.monotonic() - started < LATE_S


def test_an_idle_connection_is_closed(port: int) -> None:
    with connected(port) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        started = time.monotonic()
        assert status(read_all(client)) == 200
        assert time.monotonic() - started < LATE_S


@pytest.mark.parametrize("rest", [b"content-length: 100\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"])
def test_a_body_must_come_in_time(port: int, rest: bytes) -> None:
    with connected(port) as client:
        client.sendall(HEAD + rest)
        started = time.monotonic()
        assert status(read_all(client)) == 408
        assert time.monotonic() - started < LATE_S


def test_a_body_that_nobody_reads_does_not_keep_the_connection(port: int) -> None:
    with connected(port) as client:
        client.sendall(b"POST /none HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        started = time.monotonic()
        assert status(read_all(client)) == 404
        assert time.monotonic() - started < LATE_S + 2


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 100_000,
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: 1\r\n" % i for i in range(10_000)),
        b"GET /" + b"a" * 100_000,
        b"\x16\x03\x01" * 100,
    ],
    ids=["long header", "many headers", "long path", "not HTTP"],
)
def test_heads_that_are_too_large_or_none(port: int, head: bytes) -> None:
    with connected(port) as client:
        try:
            client.sendall(head + b"\r\n\r\n")
        except (ConnectionResetError, BrokenPipeError):
            return
        reply = read_all(client)
        assert not reply or status(reply) in (400, 431)


class Endless(FakeBackend):
    """Answers with more text than any buffer holds, as fast as it is read."""

    async def _feed(self, generation: Any) -> None:
        request_id = generation.collector.request.request_id
        while True:
            generation.add(Update(request_id, 0, [FIRST_BYTE + 97] * 1000))
            await asyncio.sleep(0.001)


def test_a_client_that_does_not_read_is_cut_off() -> None:
    backend = Endless(byte_tokenizer())
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 4000}).encode()
    with serving(around(backend)) as port, connected(port) as client:
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        started = time.monotonic()
        while not backend.num_cancelled:
            assert time.monotonic() - started < 20, "it is still being served"
            time.sleep(0.05)
        held = len(read_all(client))
        assert held < 8 << 20  # what the client's own system took in, and ours


class Counting(FakeBackend):
    """Counts, far ahead of who reads it slowly; then it ends."""

    text = " ".join(map(str, range(20_000)))

    async def _feed(self, generation: Any) -> None:
        request_id = generation.collector.request.request_id
        for i, char in enumerate(self.text):
            generation.add(Update(request_id, 0, [FIRST_BYTE + ord(char)]))
            if i % 100 == 0:
                await asyncio.sleep(0)
        generation.add(Update(request_id, 0, [EOS], finish_reason=FinishReason.STOP))


def test_a_slow_reader_of_a_stream_gets_all_of_it_in_order() -> None:
    """What is sent at once and what waits for him must not pass each other."""
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 4000}).encode()
    with serving(around(Counting(byte_tokenizer()))) as port, connected(port) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        head = HEAD.replace(b"host:", b"connection: close\r\nhost:")
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        reply = b""
        while part := client.recv(1 << 16):
            reply += part
            time.sleep(0.002)
    events = [json.loads(data) for data in re.findall(rb"data: (\{.*?\})\n\n", reply)]
    texts = [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == Counting.text
    lengths = [len(text) for text in texts]
    assert lengths.count(1) > 100  # sent at once
    assert max(lengths) > 100  # waited for him


def test_a_slow_reader_of_a_large_reply_gets_it_all() -> None:
    """It takes several times the limit, but never stops to read."""

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await Response(bytes(3_000_000))(scope, receive, send)

    with serving(large) as port, connected(port) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        found, started = 0, time.monotonic()
        while part := client.recv(100_000):
            found += len(part)
            time.sleep(0.05)
        assert found > 3_000_000
        assert time.monotonic() - started > 1.5
