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


# ---- HTTP

STREAM = json.dumps({"prompt": "hello", "stream": True, "max_tokens": 50}).encode()
LENGTH = b"content-length: %d\r\n\r\n" % len(STREAM)
CLOSE = b"connection: close\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"


def exchanged(port: int, *sent: bytes) -> bytes:
    """All that comes back for what is sent, with a pause after each."""
    with connected(port) as client:
        for one in sent:
            client.sendall(one)
            time.sleep(0.05)
        return read_all(client)


def statuses(reply: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+) ", reply)]


def test_a_stream_for_an_old_client_has_no_chunks(port: int) -> None:
    head, _, body = exchanged(port, HEAD.replace(b"/1.1", b"/1.0") + LENGTH + STREAM).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_whole_reply_for_an_old_client_has_its_length(port: int) -> None:
    head, _, body = exchanged(port, b"GET /v1/models HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head
    assert json.loads(body)["object"] == "list"


def test_a_body_of_tiny_chunks_with_trailers(port: int) -> None:
    chunks = [b"1;a=b\r\n%c\r\n" % byte for byte in STREAM] + [b"0\r\nhost: y\r\nx-b: c\r\n\r\n"]
    reply = exchanged(port, HEAD + CLOSE + b"transfer-encoding: chunked\r\n\r\n", *[b"".join(chunks)])
    assert statuses(reply) == [200]
    assert reply.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("trailers", [b"x: " + b"a" * 1_000_000, b"x: a\r\n" * 100_000])
def test_trailers_are_limited(port: int, trailers: bytes) -> None:
    with connected(port) as client:
        try:
            client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + trailers)
        except OSError:
            return
        assert statuses(read_all(client)) in ([], [400])


def test_trailers_are_no_headers() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])
        await Response()(scope, receive, send)

    with serving(app) as port:
        request = b"POST / HTTP/1.1\r\nhost: x\r\nx-empty:\r\nconnection: close\r\n"
        chunked = b"transfer-encoding: chunked\r\n\r\n0\r\nauthorization: Bearer k\r\n\r\n"
        assert statuses(exchanged(port, request + chunked)) == [200]
    expected = {"host": "x", "x-empty": "", "connection": "close", "transfer-encoding": "chunked"}
    assert seen == [(name.encode(), value.encode()) for name, value in expected.items()]


def test_a_client_is_told_to_go_on(port: int) -> None:
    reply = exchanged(port, HEAD + CLOSE + b"expect: 100-continue\r\n" + LENGTH, STREAM)
    assert statuses(reply) == [100, 200]


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_upgrades_are_ignored(port: int, upgrade: bytes) -> None:
    """Java's clients ask for HTTP/2 so, with the first request of each connection."""
    asks = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: %b\r\nhttp2-settings: AAA\r\n" % upgrade
    first = HEAD + asks + LENGTH + STREAM
    assert statuses(exchanged(port, first, GET + CLOSE + b"\r\n")) == [200, 200]
    assert statuses(exchanged(port, first + GET + asks + b"\r\n" + GET + CLOSE + b"\r\n")) == [200, 200, 200]


def test_requests_behind_a_stream_wait_for_its_end(port: int) -> None:
    request = HEAD + LENGTH + STREAM
    last = HEAD + CLOSE + LENGTH + STREAM
    for sent in ([request + GET + b"\r\n" + last], [request, GET + b"\r\n", last[:20], last[20:]]):
        reply = exchanged(port, *sent)
        assert statuses(reply) == [200, 200, 200]
        assert reply.count(b"data: [DONE]") == 2


@pytest.mark.parametrize("pause_s", [0, 0.3])
def test_what_is_no_http_breaks_no_reply(pause_s: float) -> None:
    """Behind a request that is being answered: a 400 of its own, or none, but not within the reply."""
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 4000}).encode()
    with serving(around(Counting(byte_tokenizer()))) as port, connected(port) as client:
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert client.recv(1)
        time.sleep(pause_s)
        client.sendall(b"\xff\xff\r\n\r\n")
        reply = read_all(client)
    assert statuses(reply) == [400]
    assert reply.partition(b"HTTP/1.1 400 ")[0].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("behind", [b"", GET + b"\r\n", b"GET /hea"])
def test_a_client_that_leaves_is_noticed(behind: bytes) -> None:
    """Also with requests behind the one that is answered."""
    backend = Endless(byte_tokenizer())
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 4000}).encode()
    with serving(around(backend)) as port:
        with connected(port) as client:
            client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body + behind)
            assert client.recv(1)
        started = time.monotonic()
        while not backend.num_cancelled:
            assert time.monotonic() - started < 20, "it is still being served"
            time.sleep(0.05)


@pytest.mark.parametrize(
    "target", [b"http://x/health", b"/health?a=b", b"/%68ealth", b"/health#a"], ids=bytes.decode
)
def test_forms_of_a_path(port: int, target: bytes) -> None:
    assert statuses(exchanged(port, b"GET %b HTTP/1.1\r\nhost: x\r\n" % target + CLOSE + b"\r\n")) == [200]


@pytest.mark.parametrize(
    "request_line",
    [b"CONNECT x:80 HTTP/1.1", b"OPTIONS * HTTP/1.1", b"GET http://x HTTP/1.1", b"GET /\xff HTTP/1.1"],
    ids=str,
)
def test_targets_that_are_none_here(port: int, request_line: bytes) -> None:
    (status,) = statuses(exchanged(port, request_line + b"\r\nhost: x\r\n" + CLOSE + b"\r\n"))
    assert 400 <= status < 500


def test_old_clients_send_no_chunks(port: int) -> None:
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(STREAM), STREAM)
    assert statuses(exchanged(port, HEAD.replace(b"/1.1", b"/1.0") + chunked)) == [400]
