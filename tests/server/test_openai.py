from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.asking import CHAT, COMPLETIONS, HELLO, ask, post, refusal
from tests.server.fakes import FIRST_BYTE, FakeBackend, byte_tokenizer

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
