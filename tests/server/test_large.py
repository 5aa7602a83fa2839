"""Requests and replies that are large: the event loop goes on meanwhile, and they are as small ones are."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from hex_llm.config import ServerConfig
from hex_llm.frontend import beside
from hex_llm.server.app import create_app
from hex_llm.types import FinishReason, Request, Update
from tests.server.asking import CHAT, COMPLETIONS, GENERATE, HELLO, JSON, ask, post, refusal, stream
from tests.server.fakes import EOS, FIRST_BYTE, ByteCodec, FakeBackend, byte_tokenizer, fake_logprobs
from tests.server.lag import asked

PAUSE_S = 0.4  # allowed, on a busy machine too; what is asked here took several times as long on the loop
NUM_TOKENS = 6000
SAID = [FIRST_BYTE + ord("a") + i % 26 for i in range(NUM_TOKENS)]
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
RESPONSES = "/v1/responses"
TOLD = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
ECHO = {"prompt": "p" * 4000, "max_tokens": 9, "logprobs": 20, "echo": True, "n": 4}


class Flood(FakeBackend):
    """Each choice says all of `said` at once, with all that was asked for."""

    def __init__(self, said: list[int]) -> None:
        super().__init__(byte_tokenizer())
        self.said = [*said, EOS]
        self.known = [fake_logprobs(i, 20) for i in self.said]
        self.of_prompt = fake_logprobs(FIRST_BYTE, 20)

    def updates(self, request: Request) -> Iterable[Update]:
        params = request.params
        for index in range(params.num_choices):
            update = Update(request.request_id, index, self.said, finish_reason=FinishReason.STOP)
            if params.logprobs is not None:
                update.logprobs = self.known
            if params.prompt_logprobs is not None and index == 0:
                update.prompt_logprobs = [self.of_prompt] * (len(request.prompt_ids) - 1)
            yield update


LARGE = [
    (CHAT, {**HI, "logprobs": True, "top_logprobs": 20, "n": 2}),
    (CHAT, {**HI, "logprobs": True, "top_logprobs": 20, "n": 2, "stream": True}),
    (COMPLETIONS, {"prompt": "hi", "logprobs": 20, "n": 3}),
    (COMPLETIONS, {"prompt": "hi", "logprobs": 20, "n": 3, "stream": True}),
    (COMPLETIONS, {"prompt": "p" * 4000, "max_tokens": 9, "prompt_logprobs": 20, "n": 6}),
    (COMPLETIONS, {**ECHO, "stream": True}),
    (GENERATE, {"prompt": "hi", "logprobs": 20, "n": 3}),
    (RESPONSES, {"input": "hi", **TOLD}),
    (RESPONSES, {"input": "hi", **TOLD, "stream": True}),
    ("/generate_stream", {"inputs": "hi", "parameters": {"top_n_tokens": 5, "details": True}}),
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(
            path, body, marks=[pytest.mark.slow] * ("stream" in path or "stream" in body or path == GENERATE)
        )
        for path, body in LARGE
    ],
)
def test_the_loop_goes_on_while_a_large_reply_is_made(path: str, body: dict[str, Any]) -> None:
    reply, pause, _ = asked(Flood(SAID * 2), path, json=body)
    assert reply.status_code == 200, reply.text[:300]
    assert len(reply.content) > 500_000
    assert pause < PAUSE_S


@pytest.mark.slow
def test_large_replies_say_what_small_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for large in 1, 10**9:
        monkeypatch.setattr(beside, "LARGE", large)
        backend = Flood(SAID[:300])
        for path, body in LARGE:
            if not body.get("stream") and path in (CHAT, COMPLETIONS, GENERATE):
                said.append(_unlike(ask(backend, "POST", path, json=body)))
        said += [chunk["choices"] for chunk in stream(backend, CHAT, LARGE[0][1])]
    assert said[: len(said) // 2] == said[len(said) // 2 :]


# ---- texts


def test_the_loop_goes_on_while_millions_of_tokens_are_told() -> None:
    backend = FakeBackend(byte_tokenizer())
    body = {"prompt": "a" * 3_000_000, "return_token_strs": True}
    reply, pause, took = asked(backend, "/tokenize", json=body)
    told = reply.json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) == 3_000_001
    assert told["token_strs"][:3] == ["<s>", "a", "a"]
    assert pause < max(PAUSE_S, took / 8)


class Stuck(ByteCodec):
    """Long texts take until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > 1000:
            self.go.wait(60)
        return super().encode(text, add_special_tokens)


def test_short_texts_do_not_wait_behind_long_ones() -> None:
    codec = Stuck()
    app = create_app(FakeBackend(byte_tokenizer(codec=codec)), ServerConfig())

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=300) as client:
            text = "a" * 100_000
            long = [
                asyncio.create_task(client.post("/tokenize", json={"prompt": text})) for _ in range(20)
            ] + [
                asyncio.create_task(
                    client.post("/tokenize", json={"messages": [{"role": "user", "content": text}]})
                )
                for _ in range(20)
            ]
            try:
                await asyncio.sleep(0.5)
                for body in {"prompt": "a"}, HI:
                    short = await asyncio.wait_for(client.post("/tokenize", json=body), 20)
                    assert short.status_code == 200
                assert not any(one.done() for one in long)
            finally:
                codec.go.set()
            assert {(await one).status_code for one in long} == {200}

    asyncio.run(run())


def test_a_chat_that_cannot_fit_is_refused_before_it_is_cut_into_tokens() -> None:
    codec = ByteCodec()
    backend = FakeBackend(byte_tokenizer(codec=codec))
    body = {"messages": [{"role": "user", "content": "a" * 2_000_000}]}
    for more in {}, {"stream": True}:
        error = refusal(ask(backend, "POST", CHAT, json={**body, **more}))
        assert error["message"].startswith("the prompt has at least ")
        assert error["message"].endswith(" tokens; prompt and output together may have 4096")
        assert error["param"] == "prompt"
    assert not codec.threads
    kept = post(backend, CHAT, {**body, "truncate_prompt_tokens": 5, "max_tokens": 1})
    assert kept["usage"]["prompt_tokens"] == 5
    assert post(backend, "/tokenize", body)["count"] > 2_000_000


# ---- bodies


def _padded(body: dict[str, Any]) -> bytes:
    return json.dumps({**body, "user": "u" * 100_000}).encode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO[CHAT]),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}),
        (CHAT, {**HI, "no_such_field": 1}),
        (COMPLETIONS, {"prompt": [1, 2, 3.0]}),
        (COMPLETIONS, {"prompt": "a", "seed": 10**40}),
        (COMPLETIONS, {"prompt": "a", "temperature": "warm"}),
        (GENERATE, {"prompt": "a", "n": 0}),
        (GENERATE, {"instances": 5}),
    ],
)
def test_large_bodies_are_read_as_small_ones_are(path: str, body: dict[str, Any]) -> None:
    backend = FakeBackend(byte_tokenizer())
    small = ask(backend, "POST", path, json={**body, "user": "u"})
    large = ask(backend, "POST", path, content=_padded(body), headers=JSON)
    assert (small.status_code, _unlike(small)) == (large.status_code, _unlike(large))


def _unlike(reply: httpx.Response) -> dict[str, Any]:
    """All but what is always new."""
    return {name: value for name, value in reply.json().items() if name not in ("id", "created")}


@pytest.mark.parametrize("body", [b'{"prompt": "%b"', b'{"prompt": "%b\\ud800"}', b'{"prompt": "%b\xff"}'])
def test_large_bodies_that_are_no_json(backend: FakeBackend, body: bytes) -> None:
    refusal(ask(backend, "POST", COMPLETIONS, content=body % (b"a" * 100_000), headers=JSON))
    refusal(ask(backend, "POST", GENERATE, content=body % (b"a" * 100_000), headers=JSON))


def test_the_loop_goes_on_while_a_body_is_checked(backend: FakeBackend) -> None:
    messages: list[Any] = [{"role": "user", "content": "a"}] * 20_000
    reply, pause, took = asked(backend, CHAT, json={"messages": [*messages, {"role": "nobody"}]})
    assert refusal(reply)["message"].startswith("messages.20000: content is missing")
    assert pause < took / 2
