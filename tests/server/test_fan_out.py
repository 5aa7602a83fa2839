"""How many sequences one body may ask for, and what a full server says, on every route."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest

from hex_llm.errors import QueueFull
from tests.server.asking import CHAT, COMPLETIONS, GENERATE, HELLO, ask, refusal
from tests.server.fakes import ByteCodec, FakeBackend, byte_tokenizer

MESSAGES = HELLO[CHAT]["messages"]
MARKED = {"@requestFormat": "chatCompletions"}
BOMBS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompts": (COMPLETIONS, {"prompt": ["a"] * 1024, "n": 128}),
    "best_of": (COMPLETIONS, {"prompt": ["a"] * 1024, "best_of": 128}),
    "ids": (COMPLETIONS, {"prompt": [[5]] * 1024, "n": 128}),
    "stream": (COMPLETIONS, {"prompt": ["a"] * 1024, "n": 128, "stream": True}),
    "instances": (GENERATE, {"instances": [{"prompt": "a", "n": 128}] * 1024}),
    "parameters": (GENERATE, {"instances": [{"prompt": "a"}] * 1024, "parameters": {"n": 128}}),
    "chats": (GENERATE, {"instances": [{"messages": MESSAGES, "n": 128, **MARKED}] * 1024}),
    "tgi": (GENERATE, {"instances": [{"inputs": "a", "best_of": 128}] * 1024}),
    "tgi chats": (GENERATE, {"instances": [{"messages": MESSAGES, "n": 128}] * 1024}),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_body_that_can_never_be_admitted_is_refused_at_once(bomb: str) -> None:
    """131,072 sequences: nothing is made for them, and the bound and its flag are named."""
    codec = ByteCodec()
    backend = FakeBackend(byte_tokenizer(codec=codec))
    path, body = BOMBS[bomb]
    ask(backend, "POST", path, json=HELLO[path])  # what is made once for all is made now
    codec.threads.clear()
    backend.asked.clear()
    tracemalloc.start()
    started = time.monotonic()
    try:
        reply = ask(backend, "POST", path, json=body)
        assert time.monotonic() - started < 60  # under a second where nothing else runs and nobody traces
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    error = refusal(reply)
    assert "131072 sequences" in error["message"]
    assert "4096 (--max_concurrent_requests)" in error["message"]
    assert not backend.asked
    assert not codec.threads


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *HELLO.items(),
        *((path, body | {"stream": True}) for path, body in HELLO.items()),
        (COMPLETIONS, {"prompt": "hello", "add_special_tokens": False}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/responses", {"input": "hello", "stream": True}),
        (GENERATE, {"inputs": "hello"}),
        (GENERATE, {"inputs": "hello", "stream": True}),
        (GENERATE, {"instances": [{"inputs": "hello"}] * 2}),
        (GENERATE, {"instances": [{"messages": MESSAGES}]}),
        ("/vertex", {"instances": [{"inputs": "hello"}]}),
        ("/generate_stream", {"inputs": "hello"}),
        ("/", {"inputs": "hello"}),
        ("/invocations", {"inputs": "hello"}),
        ("/invocations", {"messages": MESSAGES}),
    ],
)
def test_a_full_server_says_when_to_come_again(path: str, body: dict[str, Any]) -> None:
    """And looks at no text first."""
    codec = ByteCodec()
    backend = FakeBackend(byte_tokenizer(codec=codec))
    backend.error = QueueFull("full")
    reply = ask(backend, "POST", path, json=body)
    assert reply.status_code == 429
    assert int(reply.headers["retry-after"]) > 0
    assert not codec.threads


def test_the_bound_is_told(backend: FakeBackend) -> None:
    assert ask(backend, "GET", "/info").json()["max_concurrent_requests"] == backend.max_sequences


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/responses", "/vertex", "/generate_stream"])
def test_a_full_server_parses_nothing(backend: FakeBackend, path: str) -> None:
    backend.error = QueueFull("full")
    headers = {"content-type": "application/json"}
    assert ask(backend, "POST", path, content=b"[" * 100_000, headers=headers).status_code == 429


def test_a_full_server_tokenizes(backend: FakeBackend) -> None:
    backend.error = QueueFull("full")
    for path, body in {
        "/tokenize": {"prompt": "hello"},
        "/detokenize": {"tokens": [5]},
        "/chat_tokenize": {"messages": MESSAGES},
    }.items():
        assert ask(backend, "POST", path, json=body).status_code == 200, path
