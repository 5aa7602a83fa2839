from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from hex_llm.config import ServerConfig
from hex_llm.errors import HexError, ModelError
from hex_llm.server.app import MAX_BODY, OPEN_PATHS, create_app
from hex_llm.server.schemas import INERT
from tests.server.asking import CHAT, COMPLETIONS, GENERATE, HELLO, JSON, POSTS, ask, post, refusal
from tests.server.fakes import BOS, EOS, ByteCodec, FakeBackend, byte_tokenizer

# ---- readiness, models


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_a_ready_server_is_healthy(backend: FakeBackend, path: str) -> None:
    reply = ask(backend, "GET", path)
    assert (reply.status_code, reply.content) == (200, b"")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/ping"), ("GET", "/health"), ("GET", "/v1/models"), ("POST", CHAT)]
)
def test_a_server_that_loads_says_so(method: str, path: str) -> None:
    reply = ask(FakeBackend(ready=False), method, path)
    assert "loaded" in refusal(reply, 503)["message"]
    assert int(reply.headers["retry-after"]) > 0


def test_models(backend: FakeBackend) -> None:
    reply = ask(backend, "GET", "/v1/models").json()
    assert reply["object"] == "list"
    (card,) = reply["data"]
    assert card.pop("created") > 0
    assert card == {
        "id": "fake",
        "object": "model",
        "owned_by": "hex_llm",
        "root": "fake",
        "parent": None,
        "max_model_len": 4096,
        "permission": [],
    }


# ---- fields, on every route

EXTREMES = [True, "1", [], {}, -1, 0.5, 2**31, 2**63, 2**64, 10**400, float("nan"), float("inf"), -0.1]


@pytest.mark.parametrize("path", POSTS)
def test_fields_that_change_nothing_are_taken(backend: FakeBackend, path: str) -> None:
    for name, values in INERT.items():
        for value in (*values, None):
            post(backend, path, {**HELLO[path], name: value})
    same = {
        "temperature": 0,
        "top_k": -1,
        "top_p": 1.0,
        "n": 1.0,
        "seed": 7,
        "user": "me",
        "max_tokens": None,
    }
    assert post(backend, path, {**HELLO[path], **same})


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in [0.7, *EXTREMES]),
        *(("max_tokens", value) for value in [0, *EXTREMES]),
        *(("top_k", value) for value in [40, -2, *(v for v in EXTREMES if v != -1)]),
        *(("top_p", value) for value in EXTREMES if value is True or value != 1),
        *(("n", value) for value in [0, 2, *EXTREMES]),
        *(("seed", value) for value in EXTREMES if value not in (-1, 2**31) or value is True),
        *(("stop_token_ids", value) for value in ["1", 1, [-1], [True], [2**31], ["1"], [1] * 2000]),
        *(("stop", value) for value in ["a", ["a"]]),
        *(("ignore_eos", value) for value in [1, "true"]),
        ("stream", True),
        ("logprobs", 0),
        ("tools", [{}]),
        ("response_format", {"type": "json_object"}),
        ("no_such_field", None),
        ("\n" * 100, 1),
    ],
)
def test_other_fields_are_refused_by_name(backend: FakeBackend, path: str, name: str, value: Any) -> None:
    reply = ask(backend, "POST", path, content=json.dumps({**HELLO[path], name: value}), headers=JSON)
    error = refusal(reply)
    assert error["param"].startswith(ascii(name)[:80] if "\n" in name else name)
    assert error["param"] in error["message"]
    assert len(error["message"]) < 300
    assert not backend.asked


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"a"',
        b"null",
        b"{'prompt': 1}",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"\\ud800": 1}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"instances": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
    ids=range(14),
)
def test_bodies_that_are_none(backend: FakeBackend, path: str, content: bytes) -> None:
    refusal(ask(backend, "POST", path, content=content, headers=JSON))


def test_only_json_is_taken(backend: FakeBackend) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        content = json.dumps(HELLO[COMPLETIONS])
        refusal(ask(backend, "POST", COMPLETIONS, content=content, headers={"content-type": kind}))


@pytest.mark.parametrize("path", POSTS)
def test_the_size_of_a_body_is_limited(backend: FakeBackend, path: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY // 1000 + 1):
            yield b"x" * 1000

    refusal(ask(backend, "POST", path, content=b"x" * (MAX_BODY + 1), headers=JSON), 413)
    refusal(ask(backend, "POST", path, content=pieces(), headers=JSON), 413)


# ---- the key


def test_every_route_wants_the_key(backend: FakeBackend) -> None:
    app = create_app(backend, ServerConfig(api_key="secret"))
    paths = {route.path for route in app.routes if isinstance(route, APIRoute)} | {"/openapi.json", "/none"}
    for path in paths - set(OPEN_PATHS):
        for method in ("GET", "POST", "OPTIONS"):
            reply = ask(backend, method, path, config={"api_key": "secret"})
            assert refusal(reply, 401)["type"] == "authentication_error"
    for path in OPEN_PATHS:
        assert ask(backend, "GET", path, config={"api_key": "secret"}).status_code == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Bearer sch\xc3\xb6n", 200),
        (b"bearer sch\xc3\xb6n", 200),
        (b"Bearer sch\xf6n", 401),
        (b"Bearer sch", 401),
        (b"Bearer ", 401),
        (b"Basic sch\xc3\xb6n", 401),
        (b"sch\xc3\xb6n", 401),
        (b"Bearer sch\xc3\xb6n x", 401),
    ],
)
def test_keys(backend: FakeBackend, header: bytes, status: int) -> None:
    headers = [(b"authorization", header)]
    reply = ask(backend, "GET", "/v1/models", headers=headers, config={"api_key": "schön"})
    assert reply.status_code == status


@pytest.mark.parametrize("host", ["a/ping?x=", "test/health#", "/ping"])
def test_no_header_opens_a_route(backend: FakeBackend, host: str) -> None:
    headers = {"host": host, "x-forwarded-prefix": "/ping"}
    assert ask(backend, "GET", "/v1/models", headers=headers, config={"api_key": "k"}).status_code == 401


# ---- errors, clients that leave, threads


def test_unknown_paths_and_methods(backend: FakeBackend) -> None:
    refusal(ask(backend, "GET", "/none"), 404)
    refusal(ask(backend, "GET", CHAT), 405)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("problem", "alive", "status"),
    [
        (ModelError("the template is broken"), True, 500),
        (HexError("the engine stopped"), False, 503),
        (RuntimeError("at 0x7fffdeadbeef"), True, 500),
    ],
)
def test_errors_of_the_engine(path: str, problem: Exception, alive: bool, status: int) -> None:
    class Dying(FakeBackend):
        async def generate(self, *_: Any) -> Any:
            self.ready = alive
            raise problem

    error = refusal(ask(Dying(byte_tokenizer()), "POST", path, json=HELLO[path]), status)
    assert error["type"] == "server_error"
    assert (str(problem) == error["message"]) == isinstance(problem, HexError)


@pytest.mark.parametrize("path", POSTS)
def test_a_client_that_leaves_cancels_its_request(backend: FakeBackend, path: str) -> None:
    backend.hold = asyncio.Event()
    app = create_app(backend, ServerConfig())
    body = {"type": "http.request", "body": json.dumps(HELLO[path]).encode(), "more_body": False}
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "http_version": "1.1",
             "headers": [(b"content-type", b"application/json")], "scheme": "http"}  # fmt: skip

    async def run() -> None:
        messages = [body]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            while not backend.asked:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            pass

        await app(scope, receive, send)
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert backend.num_cancelled == 1


@pytest.mark.parametrize("path", POSTS)
def test_text_is_made_off_the_event_loop(path: str) -> None:
    codec = ByteCodec()
    post(FakeBackend(byte_tokenizer(codec=codec)), path, HELLO[path])
    assert codec.threads
    assert threading.get_ident() not in codec.threads


def test_a_server_without_a_tokenizer() -> None:
    backend = FakeBackend(None)
    choice = post(backend, COMPLETIONS, {"prompt": [5, 6], "max_tokens": 3})["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", [6, 5, EOS])
    assert post(backend, GENERATE, {"prompt": [BOS, 6.0]}) == {"predictions": [[6, BOS, EOS]]}
    for path in POSTS:
        assert "tokenizer" in refusal(ask(backend, "POST", path, json=HELLO[path]))["message"]


def test_the_server_needs_no_jax() -> None:
    script = (
        "import sys, hex_llm.server.app, hex_llm.launch.local; "
        "assert not {'jax', 'hex_llm.engine.engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
