from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from hex_llm.config import ServerConfig
from hex_llm.errors import HexError, ModelError
from hex_llm.server.app import MAX_BODY, OPEN_PATHS, create_app
from hex_llm.server.schemas import INERT, MAX_PROMPTS
from tests.server.fakes import BOS, EOS, FIRST_BYTE, ByteCodec, FakeBackend, byte_tokenizer

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
HELLO: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello"},
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    GENERATE: {"prompt": "hello"},
}
POSTS = list(HELLO)
JSON = {"content-type": "application/json"}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(byte_tokenizer())


def ask(backend: FakeBackend, method: str, path: str, **given: Any) -> httpx.Response:
    """One request to a new app; `config` are fields of ServerConfig."""
    app = create_app(backend, ServerConfig(**given.pop("config", {})))

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **given)

    return asyncio.run(send())


def post(backend: FakeBackend, path: str, body: Any, **given: Any) -> Any:
    reply = ask(backend, "POST", path, json=body, **given)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    (error,) = reply.json().values()
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == status
    return error


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


# ---- /v1/completions


def test_completion(backend: FakeBackend) -> None:
    reply = post(backend, COMPLETIONS, {"prompt": "hello", "max_tokens": 100})
    assert reply.pop("id").startswith("cmpl-")
    assert reply.pop("created") > 0
    assert reply == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "olleh", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 6, "completion_tokens": 7, "total_tokens": 13},
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ba"]),
        (["ab", "cd"], ["ba", "dc"]),
        ([FIRST_BYTE + 97, FIRST_BYTE + 98], ["ba"]),
        ([[FIRST_BYTE + 97, FIRST_BYTE + 98], [FIRST_BYTE + 99]], ["ba", "c"]),
        ([FIRST_BYTE + 97.0], ["a"]),
    ],
)
def test_kinds_of_prompts(backend: FakeBackend, prompt: Any, texts: list[str]) -> None:
    choices = post(backend, COMPLETIONS, {"prompt": prompt})["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == list(enumerate(texts))


def test_a_completion_has_16_tokens_by_default(backend: FakeBackend) -> None:
    reply = post(backend, COMPLETIONS, {"prompt": "x" * 50})
    assert reply["usage"] == {"prompt_tokens": 51, "completion_tokens": 16, "total_tokens": 67}
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", [[], [""], [[]], [True], ["a", 1], [[1], "a"], [-1], [1.5], {}, 7, None])
def test_prompts_that_are_none(backend: FakeBackend, prompt: Any) -> None:
    if prompt == [""]:
        assert post(backend, COMPLETIONS, {"prompt": prompt})  # it is the start token
        return
    reply = ask(backend, "POST", COMPLETIONS, json={"prompt": prompt})
    assert refusal(reply)["param"] == "prompt"


def test_a_stop_token_is_no_part_of_the_text(backend: FakeBackend) -> None:
    body = {"prompt": "hello", "skip_special_tokens": False, "stop_token_ids": [5.0], "ignore_eos": True}
    assert post(backend, COMPLETIONS, body)["choices"][0]["text"] == "olleh<s>"
    ((_, params),) = backend.asked
    assert (params.stop_token_ids, params.ignore_eos, params.temperature) == ((5,), True, 0.0)


def test_one_bad_prompt_ends_the_others() -> None:
    backend = FakeBackend(byte_tokenizer())
    backend.hold = asyncio.Event()
    refusal(ask(backend, "POST", COMPLETIONS, json={"prompt": [[5], [6], [5] * 5000]}))
    assert backend.num_cancelled == len(backend.asked) == 2


# ---- /v1/chat/completions


def test_chat(backend: FakeBackend) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
    ]
    reply = post(backend, CHAT, {"messages": messages, "model": "anything"})
    ((ids, params),) = backend.asked
    prompt = "<system>S<user>a\nb<assistant>c<assistant>"
    assert ids == [FIRST_BYTE + byte for byte in prompt.encode()]  # no BOS but the template's
    assert params.max_tokens is None
    assert reply.pop("id").startswith("chatcmpl-")
    assert reply.pop("created") > 0
    text = prompt[::-1]
    assert reply == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": len(text), "completion_tokens": len(text) + 1, "total_tokens": 83},
    }


@pytest.mark.parametrize("limit", [{"max_tokens": 3}, {"max_completion_tokens": 3}])
def test_chat_limit(backend: FakeBackend, limit: dict[str, int]) -> None:
    reply = post(backend, CHAT, {**HELLO[CHAT], **limit})
    assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (3, "length")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"chat_template": "x"}, "chat_template"),
    ],
)
def test_chats_that_are_none(backend: FakeBackend, change: dict[str, Any], param: str) -> None:
    assert refusal(ask(backend, "POST", CHAT, json={**HELLO[CHAT], **change}))["param"] == param


def test_a_model_without_a_chat_template() -> None:
    backend = FakeBackend(byte_tokenizer(None))
    assert "chat template" in refusal(ask(backend, "POST", CHAT, json=HELLO[CHAT]))["message"]


# ---- /generate

SAMPLES = {
    "python": {"instances": [{"prompt": "hello", "max_tokens": 3, "temperature": 1.0, "top_k": 1}]},
    "node": {"instances": [{"prompt": "hello", "maxOutputTokens": 3, "topP": 1.0, "topK": 1.0}]},
    "java": {"instances": [{"prompt": "hello"}], "parameters": {"maxDecodeSteps": 3, "temperature": 0.0}},
    "go": {"instances": [{"prompt": "hello", "parameters": {"maxOutputTokens": 3.0, "topK": 1}}]},
    "bare": {"prompt": "hello", "max_tokens": 3.0},
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_googles_samples(backend: FakeBackend, sample: str) -> None:
    assert post(backend, GENERATE, SAMPLES[sample]) == {"predictions": ["Prompt:\nhello\nOutput:\noll"]}


def test_output_formats(backend: FakeBackend) -> None:
    body = {"instances": [{"prompt": " \n hello", "max_tokens": 100}]}
    assert post(backend, GENERATE, body) == {"predictions": ["Prompt:\nhello\nOutput:\nolleh \n "]}
    raw = post(backend, GENERATE, body, config={"predict_output_format": "raw"})
    assert raw == {"predictions": ["olleh \n "]}
    body["instances"][0]["raw_response"] = True
    counted = {"output_token_counts": [10], "cumulative_logprobs": [None]}
    assert post(backend, GENERATE, body) == {**raw, **counted}


def test_instances_run_together(backend: FakeBackend) -> None:
    backend.hold = asyncio.Event()
    app = create_app(backend, ServerConfig(predict_output_format="raw"))
    body = {
        "instances": [{"prompt": "ab"}, {"prompt": "cd", "max_tokens": 1}],
        "parameters": {"max_tokens": 9},
    }

    async def send() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            reply = asyncio.create_task(client.post(GENERATE, json=body))
            while len(backend.asked) < 2:
                await asyncio.sleep(0)
            backend.hold.set()
            return (await reply).json()

    assert asyncio.run(asyncio.wait_for(send(), 10)) == {"predictions": ["ba", "d"]}


MARK = {"@requestFormat": "chatCompletions"}


@pytest.mark.parametrize(
    "body",
    [
        {**HELLO[CHAT], **MARK},
        {"instances": [{**HELLO[CHAT], **MARK}]},
        {"instances": [HELLO[CHAT]], **MARK},
    ],
)
def test_chats_through_generate(backend: FakeBackend, body: dict[str, Any]) -> None:
    reply = post(backend, GENERATE, body)
    chat = reply["predictions"] if "instances" in body else reply
    assert chat["choices"][0]["message"]["content"] == "<user>hello<assistant>"[::-1]


def test_several_chats_through_generate(backend: FakeBackend) -> None:
    chats = post(backend, GENERATE, {"instances": [HELLO[CHAT]] * 2, **MARK})["predictions"]
    assert [chat["object"] for chat in chats] == ["chat.completion"] * 2


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"instances": []}, "instances", "instances"),
        ({"instances": [{"prompt": "a"}] * (MAX_PROMPTS + 1)}, "instances", "1024"),
        ({"instances": {"prompt": "a"}}, "instances", "list"),
        ({"instances": ["a"]}, "instances.0", "object"),
        ({"instances": [{"prompt": "a"}, {"max_tokens": 5}]}, "prompt", "instances.1.prompt"),
        ({"instances": [{"prompt": "a"}], "prompt": "b"}, "prompt", "prompt"),
        ({"instances": [{"prompt": "a"}], "parameters": 5}, "parameters", "object"),
        ({"instances": [{"prompt": "a", "parameters": [5]}]}, "parameters", "object"),
        ({"instances": [{"prompt": "a", "topK": 1, "top_k": 1}]}, "top_k", "twice"),
        ({"prompt": "a", "max_tokens": 1, "parameters": {"maxOutputTokens": 1}}, "max_tokens", "twice"),
        ({"instances": [{"prompt": "a", "topP": 0.8}]}, "top_p", "top_p"),
        ({"instances": [{"prompt": "a", "dynamic-lora": "gs://b"}]}, "dynamic-lora", "dynamic-lora"),
        ({"inputs": "a"}, "inputs", "not built yet"),
        ({"prompt": ["a"]}, "prompt", "prompt"),
        ({"prompt": "a", "@requestFormat": "x"}, "@requestFormat", "chatCompletions"),
        ({"prompt": "a", "@requestFormat": ["x"]}, "@requestFormat", "chatCompletions"),
        ({"instances": [{**HELLO[CHAT], **MARK}, {"prompt": "a"}]}, "@requestFormat", "all"),
    ],
)  # fmt: skip
def test_predictions_that_are_none(backend: FakeBackend, body: Any, param: str, words: str) -> None:
    error = refusal(ask(backend, "POST", GENERATE, json=body))
    assert error["param"] == param
    assert words in error["message"]


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
