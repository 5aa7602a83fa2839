"""No body, however hostile, gets anything but its refusal, soon; and nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from hex_llm.config import ServerConfig
from hex_llm.server.app import create_app
from tests.launch.test_connection import around, connected, read_all, serving
from tests.server.asking import COMPLETIONS, events
from tests.server.fakes import FakeBackend, byte_tokenizer
from tests.server.hostile import (
    DOORS,
    Case,
    Door,
    of_halves,
    of_huge_json,
    of_json,
    of_long_texts,
    of_numbers,
    of_templates,
    of_texts,
)

MEDIAN_S = 0.1
BYSTANDER = {"prompt": "bystander", "temperature": 0, "stream": True, "logprobs": 2}


async def bystand(client: httpx.AsyncClient) -> list[Any]:
    """What each of a stream's chunks has new."""
    reply = await client.post(COMPLETIONS, json=BYSTANDER)
    return [chunk["choices"] for chunk in events(reply.text)]


def check_refusal(reply: httpx.Response) -> None:
    assert len(reply.content) < 2000
    assert "Traceback" not in reply.text
    error = reply.json()["error"]
    if isinstance(error, str):
        assert list(reply.json()) == ["error", "error_type"]  # TGI's
    elif "type" in reply.json():
        assert list(error) == ["type", "message"]  # Anthropic's
    else:
        assert list(error) == ["message", "type", "param", "code"]
        assert error["code"] == reply.status_code


def attack(cases: Iterator[Case], max_s: float = 5.0) -> list[float]:
    """The processor time that each reply took. With each of them, a bystander asks for a stream."""
    backend = FakeBackend(byte_tokenizer())
    app = create_app(backend, ServerConfig(disable_log_requests=True))
    times: list[float] = []

    async def send(client: httpx.AsyncClient, case: Case) -> None:
        headers = {} if case.content_type is None else {"content-type": case.content_type}
        num_asked, started = len(backend.asked), time.process_time()
        reply = await client.post(case.path, content=case.content, headers=headers)
        times.append(time.process_time() - started)
        assert reply.status_code in case.statuses, (case.name, case.path, reply.status_code, reply.text[:300])
        assert times[-1] < max_s, (case.name, case.path, times[-1])
        if reply.status_code != 200:
            check_refusal(reply)
            own = [one for one in backend.asked[num_asked:] if one.params.logprobs != BYSTANDER["logprobs"]]
            assert not own, (case.name, "reached the engine")

    async def run() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            golden = await bystand(client)
            for case in cases:
                seen, _ = await asyncio.gather(bystand(client), send(client, case))
                assert seen == golden, (case.name, case.path)

    gc.freeze()  # as the server does: what other tests left in this process is none of its garbage
    try:
        asyncio.run(run())
    finally:
        gc.unfreeze()
    assert gc.isenabled()  # it pauses for large bodies
    return times


def named(doors: list[Door]) -> Any:
    return pytest.mark.parametrize("door", doors, ids=lambda door: door.name)


FIRST_OF_KIND = {door.kind: door for door in reversed(DOORS)}.values()


@pytest.mark.parametrize(
    "door",
    [pytest.param(door, marks=[] if door in FIRST_OF_KIND else pytest.mark.slow) for door in DOORS],
    ids=lambda door: door.name,
)
@pytest.mark.parametrize(
    "table", [of_numbers, of_texts, of_halves, of_json], ids=lambda table: table.__name__
)
def test_bodies(table: Callable[[Door], Iterator[Case]], door: Door) -> None:
    assert statistics.median(attack(table(door)) or [0]) < MEDIAN_S  # not all take numbers or texts


@named([door for door in DOORS if door.is_chat])
def test_templates(door: Door) -> None:
    assert statistics.median(attack(of_templates(door))) < MEDIAN_S


@named([door for door in DOORS if door.generates])
def test_long_texts(door: Door) -> None:
    attack(of_long_texts(door))


@pytest.mark.slow
@named([door for door in DOORS if not door.generates])
def test_long_texts_to_tokenize(door: Door) -> None:
    attack(of_long_texts(door))


@pytest.mark.slow
@named(DOORS)
def test_huge_bodies(door: Door) -> None:
    attack(of_huge_json(door), max_s=0.5)


# ---- the key

KEY = "the-key"
HEADER_TRICKS: dict[str, list[tuple[bytes, bytes]]] = {
    "none": [],
    "empty": [(b"authorization", b"")],
    "only the scheme": [(b"authorization", b"Bearer")],
    "no key": [(b"authorization", b"Bearer ")],
    "another key": [(b"authorization", b"Bearer the-kez")],
    "the beginning": [(b"authorization", b"Bearer the-ke")],
    "too much": [(b"authorization", b"Bearer the-key1")],
    "twice": [(b"authorization", b"Bearer the-key the-key")],
    "a list": [(b"authorization", b"Bearer x, Bearer the-key")],
    "upper case": [(b"authorization", b"Bearer THE-KEY")],
    "no scheme": [(b"authorization", b"the-key")],
    "another scheme": [(b"authorization", b"Basic the-key")],
    "basic": [(b"authorization", b"Basic OnRoZS1rZXk=")],
    "a tab": [(b"authorization", b"Bearer\tthe-key")],
    "NUL": [(b"authorization", b"Bearer the-key\0")],
    "not ASCII": [(b"authorization", b"Bearer \xff\xfe")],
    "null": [(b"authorization", b"Bearer null")],
    "the second": [(b"authorization", b"Bearer x"), (b"authorization", b"Bearer the-key")],
    "of a proxy": [(b"proxy-authorization", b"Bearer the-key"), (b"x-api-keys", b"the-key")],
    "the second of the other name": [(b"x-api-key", b"x"), (b"x-api-key", b"the-key")],
    "a cookie": [(b"cookie", b"authorization=Bearer the-key; api_key=the-key")],
    "another path": [(b"x-original-url", b"/health"), (b"x-rewrite-url", b"/health")],
    "a prefix": [(b"x-forwarded-prefix", b"/health"), (b"x-forwarded-for", b"127.0.0.1")],
    "another method": [(b"x-http-method-override", b"GET")],
    "another host": [(b"host", b"x/health?")],
}
PATH_TRICKS = [
    *("/{}", "{}/", "/health/..{}", "/health/../{}", "/.{}", "{};/health", "{}?/health", "{}#/health"),
    *(
        "/health{}",
        "/ping/..;{}",
        "{}/../health",
        "{}%00",
        "{}/%2e%2e/health",
        "{}\\..\\health",
        "http://x{}",
    ),
]


def scope_of(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """As a socket's server would make it: nobody has tidied up the path."""
    target, _, query = path.partition("?")
    kinds = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
    where = {"path": target, "raw_path": target.encode(), "query_string": query.encode(), "root_path": ""}
    return {**kinds, **where, "method": method, "headers": headers, "server": ("test", 80), "client": None}


def test_no_trick_replaces_the_key() -> None:
    app = create_app(FakeBackend(byte_tokenizer()), ServerConfig(api_key=KEY, disable_log_requests=True))
    paths = [*app.openapi()["paths"], "/openapi.json", "/docs"]
    closed = [path for path in paths if path not in ("/", "/ping", "/health")]

    async def status(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> int:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}"}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope_of(method, path, headers), receive, send)
        found: int = sent[0]["status"]
        return found

    async def run() -> None:
        for path in closed:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "get", "TRACE", "X"):
                for name, headers in HEADER_TRICKS.items():
                    assert await status(method, path, headers) == 401, (method, path, name)
            for trick in PATH_TRICKS:
                assert await status("GET", trick.format(path), []) == 401, trick.format(path)
            assert await status("X", path, [(b"authorization", b"Bearer the-key")]) == 405

    asyncio.run(run())


# ---- HTTP

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt":"hello"}'
HIDDEN = POST + b'content-length: 19\r\n\r\n{"prompt":"hidden"}'
CHUNKED = POST + b"transfer-encoding: chunked\r\n"
BAD_REQUESTS = {
    "a large header": GET + b"x-a: " + b"a" * (100 << 20) + b"\r\n\r\n",
    "many headers": GET + b"".join(b"x-%d: 1\r\n" % i for i in range(100_000)) + b"\r\n",
    "a long path": b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "a length below zero": POST + b"content-length: -1\r\n\r\n" + HIDDEN,
    "a length that is none": POST + b"content-length: 0x12\r\n\r\n" + BODY,
    "a length with a sign": POST + b"content-length: +18\r\n\r\n" + BODY,
    "a huge length": POST + b"content-length: 99999999999999999999\r\n\r\n" + BODY,
    "two lengths": POST + b"content-length: 18\r\ncontent-length: 0\r\n\r\n" + HIDDEN,
    "a list of lengths": POST + b"content-length: 18, 0\r\n\r\n" + BODY,
    "a length too short": POST + b"content-length: 5\r\n\r\n" + BODY,
    "unknown coding": POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two codings": POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "no chunk": CHUNKED + b"\r\nxyz\r\n" + HIDDEN,
    "a chunk below zero": CHUNKED + b"\r\n-1\r\n" + HIDDEN,
    "a huge chunk": CHUNKED + b"\r\nffffffffffffffffffffff\r\na\r\n",
    "a chunk too long": CHUNKED + b"\r\n5\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a long extension": CHUNKED + b"\r\n1;" + b"a" * 1_000_000 + b"\r\n",
    "packed": POST + b"content-encoding: gzip\r\ncontent-length: 18\r\n\r\n\x1f\x8b\x08" + bytes(15),
    "a space before the colon": POST + b"content-length : 0\r\n\r\n" + HIDDEN,
    "NUL": GET + b"x-a: a\0b\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"host: y\r\n\r\n",
    "version 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "version 0.9": b"GET /health\r\n\r\n",
    "no method": b"\xff\xfe /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01" * 100 + b"\r\n\r\n",
}


def exchanged(port: int, sent: bytes) -> bytes:
    with connected(port) as client:
        try:
            client.sendall(sent)
        except OSError:
            return b""  # cut off while it was sending
        return read_all(client)


def statuses(reply: bytes) -> list[int]:
    return [int(part.split(b" ", 1)[0]) for part in reply.split(b"HTTP/1.1 ")[1:]]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[int, FakeBackend]]:
    backend = FakeBackend(byte_tokenizer())
    with serving(around(backend)) as port:
        yield port, backend


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_requests_that_are_no_http(served: tuple[int, FakeBackend], name: str) -> None:
    port, backend = served
    num_asked = len(backend.asked)
    found = statuses(exchanged(port, BAD_REQUESTS[name]))
    assert all(400 <= status < 500 for status in found), found
    assert len(backend.asked) == num_asked, "it was answered, or what it hid"
    assert statuses(exchanged(port, GET + b"connection: close\r\n\r\n")) == [200]


@pytest.mark.parametrize("obfuscated", [b"chunked", b"Chunked", b"\tchunked", b"chunked "])
def test_a_request_of_two_lengths_hides_no_other(served: tuple[int, FakeBackend], obfuscated: bytes) -> None:
    """The one that a proxy takes for the body of the first, by its content-length."""
    port, backend = served
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) + HIDDEN
    lengths = b"content-length: %d\r\ntransfer-encoding: %b\r\n\r\n" % (len(body), obfuscated)
    assert statuses(exchanged(port, POST + lengths + body)) == [400]
    hidden = byte_tokenizer().encode("hidden")
    assert hidden not in [list(request.prompt_ids) for request in backend.asked]


def test_old_and_hasty_clients(served: tuple[int, FakeBackend]) -> None:
    port, _ = served
    assert statuses(exchanged(port, b"GET /health HTTP/1.0\r\n\r\n")) == [200]
    many = GET + b"\r\n"
    assert statuses(exchanged(port, many * 100 + GET + b"connection: close\r\n\r\n")) == [200] * 101
