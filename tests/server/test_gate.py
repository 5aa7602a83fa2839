"""Health, limits, ids and the log's lines: what every request passes, whatever its route does."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI

from hex_llm.config import ServerConfig
from hex_llm.errors import QueueFull, TimedOut
from hex_llm.frontend.outputs import for_engine
from hex_llm.frontend.requests import Timeline
from hex_llm.ipc.stats import EngineState, EngineStatus
from hex_llm.logs import JsonLines, TextLines
from hex_llm.server.app import create_app
from hex_llm.server.gate import MAX_VALUES, VALUES_PER_KEY
from hex_llm.server.metrics import Metrics
from tests.server.apps import asked
from tests.server.asking import CHAT, COMPLETIONS, GENERATE, HELLO, JSON, ask, refusal
from tests.server.fakes import FakeBackend, byte_tokenizer

SLOW = {"prompt": "hello", "max_tokens": 5}


def make(backend: FakeBackend, **config: Any) -> tuple[FastAPI, Metrics]:
    metrics = Metrics("fake", EngineStatus())
    return create_app(backend, ServerConfig(**config), metrics), metrics


# ---- health


@pytest.mark.parametrize("path", ["/ping", "/health", "/vertex/health"])
def test_health_is_judged_by_progress(backend: FakeBackend, path: str) -> None:
    app, metrics = make(backend, health_timeout=10, health_route="/vertex/health")
    metrics.engines[0].state = EngineState.SERVING
    metrics.engines[0].progressed = time.monotonic() - 11
    assert asked(app, "GET", path).status_code == 200  # nothing is pending
    metrics.engines[0].num_pending = 1
    metrics.engines[0].progressed = time.monotonic() - 11  # the first request may take seconds
    assert "no step for 11 s" in refusal(asked(app, "GET", path), 503)["message"]
    assert asked(app, "POST", COMPLETIONS, json=HELLO[COMPLETIONS]).status_code == 200
    metrics.engines[0].progressed = time.monotonic() - 9
    assert asked(app, "GET", path).status_code == 200


def test_who_asks_while_the_model_loads_is_told_how_far_it_is() -> None:
    app, metrics = make(FakeBackend(ready=False))
    metrics.engines[0].progress = "Compiling 3/80"
    for path in ("/health", "/stats", "/v1/models"):
        reply = asked(app, "GET", path)
        assert "Compiling 3/80" in refusal(reply, 503)["message"]
        assert reply.headers["retry-after"]
    for path in ("/metrics", "/load", "/docs", "/openapi.json"):
        assert asked(app, "GET", path).status_code == 200


def test_a_server_that_drains_turns_everyone_away(backend: FakeBackend) -> None:
    app, metrics = make(backend)
    metrics.draining = True
    for method, path in (("GET", "/health"), ("POST", COMPLETIONS)):
        reply = asked(app, method, path, json=HELLO[COMPLETIONS])
        assert "shutting down" in refusal(reply, 503)["message"]
        assert reply.headers["retry-after"]


# ---- limits


def test_a_declared_size_is_refused_before_the_body(backend: FakeBackend) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    headers = {**JSON, "content-length": "101"}
    reply = ask(
        backend, "POST", COMPLETIONS, content=nothing(), headers=headers, config={"max_request_bytes": 100}
    )
    assert "100 bytes" in refusal(reply, 413)["message"]
    assert reply.headers["connection"] == "close"


def test_a_body_must_come_in_time(backend: FakeBackend) -> None:
    async def slow() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" "
            await asyncio.sleep(0.05)

    started = time.monotonic()
    reply = ask(backend, "POST", COMPLETIONS, content=slow(), headers=JSON, config={"receive_timeout": 1})
    refusal(reply, 408)
    assert 0.9 < time.monotonic() - started < 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(backend: FakeBackend, stream: bool) -> None:
    backend.hold = asyncio.Event()
    started = time.monotonic()
    body = {**SLOW, "stream": stream}
    error = refusal(ask(backend, "POST", COMPLETIONS, json=body, config={"request_timeout": 1}), 504)
    assert error["type"] == "server_error"
    assert 0.9 < time.monotonic() - started < 20
    assert backend.num_cancelled == 1


def test_the_time_is_up_only_before_the_reply_begins() -> None:
    class Slow(FakeBackend):
        async def _feed(self, generation: Any) -> None:
            for update in self.updates(generation.collector.request):
                generation.add(update)
                await asyncio.sleep(0.6)

    reply = ask(
        Slow(byte_tokenizer()),
        "POST",
        COMPLETIONS,
        json={**SLOW, "stream": True},
        config={"request_timeout": 2},
    )
    assert reply.status_code == 200
    assert reply.text.endswith("data: [DONE]\n\n")
    assert "error" not in reply.text


class TooSlow(FakeBackend):
    """Its time is up after a token, as the engine's client tells it."""

    async def _feed(self, generation: Any) -> None:
        generation.add(next(iter(self.updates(for_engine(generation.collector.request)))))
        for _ in range(20):
            await asyncio.sleep(0)
        generation.fail(TimedOut("the request has taken longer than 1 s"))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE, "/generate_stream"])
def test_a_stream_whose_time_is_up_says_so(path: str) -> None:
    body = HELLO.get(path, {"inputs": "hello"})
    reply = ask(TooSlow(byte_tokenizer()), "POST", path, json={**body, "stream": True})
    assert reply.status_code == 200
    ends = "\0" if path == GENERATE else "\n\n"
    *_, last = reply.text.removesuffix("data: [DONE]\n\n").removesuffix(ends).split(ends)
    told = json.loads(last.removeprefix("data: "))
    if path == "/generate_stream":
        assert told == {"error": "the request has taken longer than 1 s", "error_type": "timeout"}
    else:
        assert (told["error"]["code"], told["error"]["type"]) == (504, "server_error")
        assert "longer than 1 s" in told["error"]["message"]


def test_tgi_tells_that_the_time_is_up(backend: FakeBackend) -> None:
    backend.error = TimedOut("too long")
    reply = ask(backend, "POST", GENERATE, json={"inputs": "hello"})
    assert (reply.status_code, reply.json()) == (504, {"error": "too long", "error_type": "timeout"})


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 5_000_000, 400),
        (b'{"a":' * 1_500_000, 413),
        (b'{"prompt": [' + b"[]," * 2_000_000 + b"[]]}", 413),
        (b'{"prompt": "a", "n": ' + b"9" * 5_000_000 + b"}", 400),
        (b"{" + b",".join(b'"k%d": 0' % i for i in range(500_000)) + b"}", 413),
        (b'{"prompt": "' + b"\\u0000" * 1_500_000 + b'", "x": 1}', 400),
        pytest.param(b'{"prompt": "' + b",:" * 1_500_000 + b'", "x": 1}', 413, marks=pytest.mark.slow),
        (('{"prompt": ["\\"",' + "5," * 1_000_000 + "5]}").encode("utf-16"), 413),
    ],
    ids=["lists", "objects", "many lists", "number", "keys", "escapes", "text", "UTF-16"],
)
def test_bombs_are_refused_soon(backend: FakeBackend, body: bytes, status: int) -> None:
    gc.collect()  # so that the garbage of other tests is not counted
    started = time.process_time()
    reply = ask(backend, "POST", COMPLETIONS, content=body, headers=JSON)
    assert ("values" in refusal(reply, status)["message"]) == (status == 413)
    assert time.process_time() - started < 3


def test_keys_count_more_than_values(backend: FakeBackend) -> None:
    many = {str(i): 0 for i in range(MAX_VALUES // VALUES_PER_KEY + 1)}
    refusal(ask(backend, "POST", COMPLETIONS, json={"prompt": "hello", "metadata": many}), 413)


def test_a_prompt_may_be_as_long_as_the_model_takes(backend: FakeBackend) -> None:
    body = {"prompt": [5] * (MAX_VALUES + 10)}
    refusal(ask(backend, "POST", COMPLETIONS, json=body), 413)
    backend.max_len = MAX_VALUES + 100
    assert "tokens" in refusal(ask(backend, "POST", COMPLETIONS, json=body))["message"]


# ---- ids, counts, the log


@pytest.mark.parametrize(
    ("given", "echoed"), [("abc-1.2:3", True), ("a b", False), ("x" * 129, False), ("", False)]
)
def test_ids_are_echoed(backend: FakeBackend, given: str, echoed: bool) -> None:
    reply = ask(backend, "GET", "/v1/models", headers={"x-request-id": given})
    assert (reply.headers["x-request-id"] == given) == echoed
    assert len(reply.headers["x-request-id"]) <= 128


def test_ids_are_told_to_who_has_sent_one_or_to_all(backend: FakeBackend) -> None:
    assert "x-request-id" not in ask(backend, "GET", "/v1/models").headers
    reply = ask(backend, "GET", "/v1/models", config={"enable_request_id_headers": True})
    assert len(reply.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (COMPLETIONS, "POST"),
        ("/v1/models", "GET"),
        ("/ping", "GET, POST"),
        ("/", "GET, HEAD, POST"),
        ("/generate", "GET, POST"),
        ("/v1/responses/abc", "DELETE, GET"),
    ],
)
def test_the_methods_of_a_path_are_told(backend: FakeBackend, path: str, allowed: str) -> None:
    reply = ask(backend, "OPTIONS", path, config={"health_route": "/generate"})
    refusal(reply, 405)
    assert reply.headers["allow"] == allowed


def test_open_requests_are_counted(backend: FakeBackend) -> None:
    backend.hold = asyncio.Event()
    app, metrics = make(backend, request_timeout=1)
    refusal(asked(app, "POST", COMPLETIONS, json=SLOW), 504)
    assert metrics.num_open == 0
    seen = []
    backend.updates = lambda request: seen.append(metrics.num_open) or []  # type: ignore[method-assign]
    backend.hold = None
    asked(app, "POST", COMPLETIONS, json=SLOW)
    assert seen == [1]


class Timed(FakeBackend):
    """Tells of its requests as the engine's client does."""

    metrics: Metrics

    def updates(self, request: Any) -> Any:
        return super().updates(request)

    def generate(self, prompt: Any, params: Any, **more: Any) -> Any:
        now = time.monotonic()
        self.metrics.began(Timeline(num_prompt=6, num_generated=4, first=now + 0.25))
        return super().generate(prompt, params, **more)


def test_each_request_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hex_llm")
    backend = Timed(byte_tokenizer())
    app, backend.metrics = make(backend, api_key="secret")
    headers = {"authorization": "Bearer secret", "x-request-id": "mine"}
    body = {"prompt": ["confidential", "words"]}
    assert asked(app, "POST", COMPLETIONS, json=body, headers=headers).status_code == 200
    asked(app, "POST", COMPLETIONS, json={**body, "no_such": 1}, headers=headers)
    asked(app, "GET", "/none/x", headers=headers)
    asked(app, "GET", "/health")
    fields = [record.fields for record in caplog.records if record.name == "hex_llm.server.gate"]  # type: ignore[attr-defined]
    assert [(one["route"], one["status"]) for one in fields] == [
        (COMPLETIONS, 200),
        (COMPLETIONS, 400),
        ("none", 404),
    ]
    assert fields[0]["id"] == "mine"
    assert (fields[0]["prompt_tokens"], fields[0]["output_tokens"]) == (12, 8)
    assert 0.2 < fields[0]["ttft_s"] < 5
    assert "prompt_tokens" not in fields[1]
    lines = [form.format(record) for record in caplog.records for form in (TextLines(), JsonLines())]
    assert not any(word in line for line in lines for word in ("secret", "confidential", "words"))
    assert not any("\n" in line for line in lines)
    assert json.loads(lines[1])["route"] == COMPLETIONS
    assert f" id=mine route={COMPLETIONS} status=200 prompt_tokens=12 " in lines[0]


@pytest.mark.parametrize("ready", [True, False])
def test_probes_leave_no_lines(caplog: pytest.LogCaptureFixture, ready: bool) -> None:
    caplog.set_level(logging.INFO, "hex_llm")
    backend = FakeBackend(byte_tokenizer(), ready=ready)
    for method, path in (("GET", "/health"), ("POST", "/health"), ("POST", "/ping"), ("GET", "/alive")):
        reply = ask(backend, method, path, config={"health_route": "/alive"})
        assert reply.status_code == (200 if ready else 503)
    ask(backend, "GET", "/v1/models")
    assert not caplog.records
    ask(backend, "POST", COMPLETIONS, json=HELLO[COMPLETIONS])
    assert len(caplog.records) == 1


def test_a_flood_leaves_few_lines(backend: FakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hex_llm")
    app, _ = make(backend)
    backend.error = QueueFull("full")
    for _ in range(20):
        assert asked(app, "POST", COMPLETIONS, json=SLOW).status_code == 429
    [first, *more] = [record.fields["refused"] for record in caplog.records]  # type: ignore[attr-defined]
    assert (first, len(more) <= 2) == (1, True)
    told = b'hex_llm:http_requests_total{method="POST",route="/v1/completions",status="429"} 20.0'
    assert told in asked(app, "GET", "/metrics").content


def test_lines_can_be_turned_off(backend: FakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "hex_llm")
    ask(backend, "POST", COMPLETIONS, json=HELLO[COMPLETIONS], config={"disable_log_requests": True})
    assert not caplog.records


@pytest.mark.parametrize("value", ["a b", 'a"b', "a=b", "a\nb", ""])
def test_odd_values_are_quoted(value: str) -> None:
    record = logging.LogRecord("x", 20, "", 0, "m", (), None)
    record.fields = {"key": value}
    assert TextLines().format(record).endswith(f" m key={json.dumps(value)}")


# ---- the description of all routes


def test_the_description_is_whole(backend: FakeBackend) -> None:
    schema = asked(make(backend)[0], "GET", "/openapi.json").json()
    text = json.dumps(schema)
    assert "HTTPValidationError" not in text
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            replies = set(operation["responses"])
            assert "503" in replies, path
            if method == "post" and path not in ("/ping", "/health"):
                assert {"400", "401", "413", "429", "500", "504"} <= replies, path
                assert "{" in path or operation["requestBody"]["content"], path
    refs = {line.split('"')[0] for line in text.split('"#/components/schemas/')[1:]}
    assert refs <= set(schema["components"]["schemas"])
    content = schema["paths"][COMPLETIONS]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}


def test_the_page_of_routes_fetches_nothing(backend: FakeBackend) -> None:
    reply = asked(make(backend)[0], "GET", "/docs")
    assert reply.headers["content-type"].startswith("text/html")
    assert f"POST {COMPLETIONS}" in reply.text
    assert "://" not in reply.text
    assert "<script" not in reply.text


@pytest.mark.parametrize(
    "path", [COMPLETIONS, CHAT, GENERATE, "/tokenize", "/generate_stream", "/invocations"]
)
def test_who_leaves_while_he_sends_is_no_failure(backend: FakeBackend, path: str) -> None:
    app, _ = make(backend)
    messages = [
        {"type": "http.request", "body": b'{"prompt"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    statuses: list[int] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
        "server": ("test", 80), "client": ("test", 1), "root_path": "", "app": app,
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    assert statuses[0] == 499
