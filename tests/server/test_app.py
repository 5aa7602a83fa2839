from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import fields, replace
from typing import Any

import pytest

from hex_llm.config import ServerConfig
from hex_llm.errors import EngineStopped, HexError, ModelError, QueueFull, TimedOut
from hex_llm.sampling_params import SamplingParams, StructuredOutputs
from hex_llm.server.app import OPEN_PATHS, create_app
from hex_llm.server.common.body import INERT
from hex_llm.types import FinishReason, Request, Update
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

EXTREMES = [True, "1", [], {}, -101, 0.5, 2**31, 2**63, 2**64, 10**400, float("nan"), float("inf"), -0.1]
FLOATS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty")
PENALTIES = ("presence_penalty", "frequency_penalty")
COUNTS = ("n", "best_of", "top_k", "max_tokens", "min_tokens", "prompt_logprobs", "truncate_prompt_tokens")


@pytest.mark.parametrize("path", POSTS)
def test_fields_that_change_nothing_are_taken(backend: FakeBackend, path: str) -> None:
    for name, values in INERT.items():
        for value in (*values, None):
            post(backend, path, {**HELLO[path], name: value})


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in FLOATS for value in EXTREMES if value is True or value != 0.5),
        *(
            (name, value)
            for name in PENALTIES
            for value in EXTREMES
            if value is True or value not in (0.5, -0.1)
        ),
        *((name, value) for name in COUNTS for value in EXTREMES),
        *((name, 0) for name in ("n", "best_of", "max_tokens", "truncate_prompt_tokens")),
        *(("seed", value) for value in EXTREMES if value not in (-101, 2**31) or value is True),
        *(("priority", value) for value in EXTREMES if value != -101),
        *(
            (name, v)
            for name in ("stop_token_ids", "allowed_token_ids")
            for v in ["1", 1, [-1], [True], [0.5], [300], [2**31], ["1"]]
        ),
        ("stop_token_ids", [1] * 2000),
        ("allowed_token_ids", []),
        *(
            ("logit_bias", value)
            for value in [
                5,
                [],
                {"a": 1},
                {"-1": 1},
                {"300": 1},
                {"1": "1"},
                {"1": True},
                {"5": float("nan")},
                {str(i): 1 for i in range(2000)},
            ]
        ),
        *(("stop", value) for value in [5, "", [""], [5], ["a"] * 100, "a" * 100_000]),
        *(("bad_words", value) for value in ["a", [""], [" "], [5], ["a"] * 100]),
        *(
            (name, value)
            for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
            for value in [1, "true"]
        ),
        ("cache_salt", 5),
        ("cache_salt", "x" * 5000),
        ("logprobs", "1"),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stream", "yes"),
        ("tools", [{}]),
        ("tool_choice", "required"),
        ("use_beam_search", 1),
        *(
            ("response_format", value)
            for value in [
                "json",
                {},
                {"type": "xml"},
                {"type": "json_schema"},
                {"type": "text", "json_schema": {"schema": {}}},
                {"type": "json_object", "x": 1},
                {"type": "json_object", "schema": {}, "value": {}},
                {"type": "json_object", "json_schema": {"schema": {}}},
                {"type": "text", "value": "a"},
                {"type": "json"},
            ]
        ),
        *(
            ("structured_outputs", value)
            for value in [
                "a",
                {},
                {"json": {}, "regex": "a"},
                {"choice": []},
                {"choice": "a"},
                {"regex": ""},
                {"lark": "a"},
            ]
        ),
        ("guided_decoding_backend", "x"),
        ("no_such_field", None),
        ("\n" * 100, 1),
    ],
)
def test_values_that_are_refused_by_name(backend: FakeBackend, path: str, name: str, value: Any) -> None:
    reply = ask(backend, "POST", path, content=json.dumps({**HELLO[path], name: value}), headers=JSON)
    error = refusal(reply)
    assert error["param"].startswith(ascii(name)[:80] if "\n" in name else name)
    assert error["param"] in error["message"]
    assert len(error["message"]) < 300
    assert not backend.asked


ACTING: dict[str, tuple[Any, Any]] = {  # what is sent, and what the engine gets
    "n": (2.0, 2),
    "best_of": (3.0, 3),
    "temperature": (0.5, 0.5),
    "top_p": (0.5, 0.5),
    "top_k": (40.0, 40),
    "min_p": (0.1, 0.1),
    "typical_p": (0.9, 0.9),
    "presence_penalty": (-1, -1),
    "frequency_penalty": (0.5, 0.5),
    "repetition_penalty": (1.1, 1.1),
    "logit_bias": ({"5": 200, "6": -1.0}, {5: 100.0, 6: -1.0}),
    "seed": (-7.0, -7),
    "max_tokens": (5.0, 5),
    "min_tokens": (2.0, 2),
    "stop": ("lo", ("lo",)),
    "stop_token_ids": ([5.0, 6], (5, 6)),
    "include_stop_str_in_output": (True, True),
    "ignore_eos": (True, True),
    "bad_words": (["x"], ("x",)),
    "allowed_token_ids": ([5.0, 6], (5, 6)),
    "prompt_logprobs": (1.0, 1),
    "skip_special_tokens": (False, False),
    "truncate_prompt_tokens": (3.0, 3),
    "truncation_side": ("right", "right"),
    "structured_outputs": ({"choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
}


@pytest.mark.parametrize("path", POSTS)
def test_every_sampling_parameter_acts(backend: FakeBackend, path: str) -> None:
    others = {"logprobs", "logprob_token_ids", "echo", "pooling"}
    assert set(ACTING) | others == {field.name for field in fields(SamplingParams)}
    for name, (sent, gets) in ACTING.items():
        post(backend, path, {**HELLO[path], "max_tokens": 100, name: sent})
        default = SamplingParams(max_tokens=100)
        assert backend.asked[-1].params == replace(default, **{name: gets})
    post(backend, path, {**HELLO[path], "priority": -3.0, "cache_salt": "mine"})
    assert (backend.asked[-1].priority, backend.asked[-1].cache_salt) == (-3, "mine")


@pytest.mark.parametrize("path", POSTS)
def test_defaults_are_those_of_openai(backend: FakeBackend, path: str) -> None:
    post(backend, path, HELLO[path])
    assert backend.asked[-1].params == SamplingParams(max_tokens=None if path == CHAT else 16)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}}},
            {"json": '{"a": 1}'},
        ),
        ({"response_format": {"type": "json_object", "schema": {"a": 1}}}, {"json": '{"a": 1}'}),
        ({"response_format": {"type": "json", "value": {"a": 1}}}, {"json": '{"a": 1}'}),
        (
            {"response_format": {"type": "json_schema", "value": {"name": "x", "schema": {"a": 1}}}},
            {"json": '{"a": 1}'},
        ),
        ({"response_format": {"type": "regex", "value": "a+"}}, {"regex": "a+"}),
        ({"json_schema": {"a": 1}}, {"json": '{"a": 1}'}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"json": {"type": "array"}}}, {"json": '{"type": "array"}'}),
        ({"structured_outputs": {"json": '{"type": "array"}'}}, {"json": '{"type": "array"}'}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"guided_json": {"type": "array"}}, {"json": '{"type": "array"}'}),
        ({"guided_json_object": True}, {"json_object": True}),
        ({"guided_json_object": False}, None),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b")}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ],
)  # fmt: skip
def test_structured_outputs(
    backend: FakeBackend, path: str, fields: dict[str, Any], wanted: dict[str, Any] | None
) -> None:
    post(backend, path, {**HELLO[path], **fields})
    expected = None if wanted is None else StructuredOutputs(**wanted)
    assert backend.asked[-1].params.structured_outputs == expected


@pytest.mark.parametrize("path", POSTS)
def test_only_one_structure_may_be_asked_for(backend: FakeBackend, path: str) -> None:
    body = {**HELLO[path], "guided_regex": "a", "response_format": {"type": "json_object"}}
    assert refusal(ask(backend, "POST", path, json=body))["param"] == "structured_outputs"


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
        b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
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
    small = {"max_request_bytes": 10_000}

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 1000

    refusal(ask(backend, "POST", path, content=b"x" * 10_001, headers=JSON, config=small), 413)
    refusal(ask(backend, "POST", path, content=pieces(), headers=JSON, config=small), 413)


# ---- the key


def test_every_route_wants_the_key(backend: FakeBackend) -> None:
    app = create_app(backend, ServerConfig(api_key="secret"))
    paths = {*app.openapi()["paths"], "/openapi.json", "/docs", "/none"}
    assert {COMPLETIONS, CHAT, GENERATE, "/metrics"} < paths
    for path in paths - {*OPEN_PATHS, "/"}:
        for method in ("GET", "POST", "OPTIONS"):
            reply = ask(backend, method, path, config={"api_key": "secret"})
            assert reply.status_code == 401
            assert reply.json()["error"]["type"] == "authentication_error"
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
    ("problem", "status"),
    [
        (ModelError("the template is broken"), 500),
        (HexError("the output could not be put together"), 500),
        (EngineStopped("the engine stopped"), 503),
        (TimedOut("too long"), 504),
        (QueueFull("too many requests"), 429),
        (RuntimeError("at 0x7fffdeadbeef"), 500),
    ],
)
def test_errors_of_the_engine(backend: FakeBackend, path: str, problem: Exception, status: int) -> None:
    backend.error = problem
    reply = ask(backend, "POST", path, json=HELLO[path])
    error = refusal(reply, status)
    assert error["type"] == ("rate_limit_error" if status == 429 else "server_error")
    assert (str(problem) == error["message"]) == isinstance(problem, HexError)
    assert ("retry-after" in reply.headers) == (status in (429, 503))


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("message", "status", "param"),
    [("no finite score", 500, None), ("structured_outputs.regex: unbalanced", 400, "structured_outputs")],
)
def test_a_choice_that_fails_fails_its_request(
    path: str, message: str, status: int, param: str | None
) -> None:
    class Failing(FakeBackend):
        def updates(self, request: Request) -> Iterable[Update]:
            for update in super().updates(request):
                if update.finish_reason is not None:
                    update.finish_reason, update.error, update.param = FinishReason.ERROR, message, param
                yield update

    error = refusal(ask(Failing(byte_tokenizer()), "POST", path, json=HELLO[path]), status)
    assert (error["message"], error["param"]) == (message, param)


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


def test_chats_are_rendered_off_the_event_loop() -> None:
    codec = ByteCodec()
    post(FakeBackend(byte_tokenizer(codec=codec)), CHAT, HELLO[CHAT])
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
