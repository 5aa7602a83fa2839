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
        "choices": [
            {"index": 0, "text": "olleh", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": usage(6, 7, 5),
    }


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
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
    assert reply["usage"] == usage(51, 16, 50)
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", [[], [""], [[]], [True], ["a", 1], [[1], "a"], [-1], [1.5], {}, 7, None])
def test_prompts_that_are_none(backend: FakeBackend, prompt: Any) -> None:
    if prompt == [""]:
        assert post(backend, COMPLETIONS, {"prompt": prompt})  # it is the start token
        return
    reply = ask(backend, "POST", COMPLETIONS, json={"prompt": prompt})
    assert refusal(reply)["param"] == "prompt"


def test_a_stop_token_is_no_part_of_the_text(backend: FakeBackend) -> None:
    h = FIRST_BYTE + ord("h")
    body = {"prompt": "hello", "skip_special_tokens": False, "max_tokens": 100}
    assert post(backend, COMPLETIONS, body)["choices"][0]["text"] == "olleh<s>"
    reply = post(backend, COMPLETIONS, {**body, "stop_token_ids": [float(h)]})
    assert reply["choices"][0]["text"] == "olle"
    assert reply["choices"][0]["stop_reason"] == h
    assert reply["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("stop", ["e", ["x", "e"]])
def test_stop_strings(backend: FakeBackend, stop: Any) -> None:
    (choice,) = post(backend, COMPLETIONS, {"prompt": "hello", "stop": stop})["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("oll", "stop", "e")


def test_several_choices_of_several_prompts(backend: FakeBackend) -> None:
    reply = post(backend, COMPLETIONS, {"prompt": ["ab", "cd"], "n": 2})
    texts = [(choice["index"], choice["text"]) for choice in reply["choices"]]
    assert texts == [(0, "ba"), (1, "a"), (2, "dc"), (3, "c")]
    assert reply["usage"] == usage(6, 14, 4)


def test_the_best_choices_come_first(backend: FakeBackend) -> None:
    reply = post(backend, COMPLETIONS, {"prompt": "ab", "n": 2, "best_of": 3})
    assert [(c["index"], c["text"], c["logprobs"]) for c in reply["choices"]] == [
        (0, "", None),
        (1, "a", None),
    ]
    assert reply["usage"]["completion_tokens"] == 5


def test_completion_logprobs(backend: FakeBackend) -> None:
    ids = [FIRST_BYTE + byte for byte in "aä".encode()]
    (choice,) = post(backend, COMPLETIONS, {"prompt": ids[::-1], "logprobs": 3, "max_tokens": 3})["choices"]
    tops = {"token_id:0": 0.0, "<s>": -0.001, "</s>": -9999.0}
    assert choice["logprobs"] == {
        "tokens": ["a", "\ufffd", "\ufffd"],
        "token_logprobs": [-i / 1000 for i in ids],
        "top_logprobs": [
            {**tops, "a": -ids[0] / 1000},
            {**tops, "\ufffd": -ids[1] / 1000},
            {**tops, "\ufffd": -ids[2] / 1000},
        ],
        "text_offset": [0, 1, 1],
    }
    assert choice["text"] == "aä"


def test_an_echo_has_the_prompts_logprobs_too(backend: FakeBackend) -> None:
    body = {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 1}
    (choice,) = post(backend, COMPLETIONS, body)["choices"]
    a, b = FIRST_BYTE + ord("a"), FIRST_BYTE + ord("b")
    assert choice["text"] == "abb"
    assert choice["logprobs"] == {
        "tokens": ["<s>", "a", "b", "b"],
        "token_logprobs": [None, -a / 1000, -b / 1000, -b / 1000],
        "top_logprobs": [None, {"a": -a / 1000}, {"b": -b / 1000}, {"b": -b / 1000}],
        "text_offset": [0, 0, 1, 2],
    }
    assert "prompt_logprobs" not in choice


def test_prompt_logprobs(backend: FakeBackend) -> None:
    a = FIRST_BYTE + ord("a")
    expected = [None, {str(a): {"logprob": -a / 1000, "rank": a + 1, "decoded_token": "a"}}]
    (choice,) = post(backend, COMPLETIONS, {"prompt": "a", "prompt_logprobs": 0})["choices"]
    assert choice["prompt_logprobs"] == expected
    reply = post(backend, CHAT, {**HELLO[CHAT], "prompt_logprobs": 1})
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]


def test_logprobs_without_a_tokenizer() -> None:
    body = {"prompt": [7, 8], "logprobs": 0, "max_tokens": 1}
    (choice,) = post(FakeBackend(None), COMPLETIONS, body)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["token_id:8"],
        "token_logprobs": [-0.008],
        "top_logprobs": [{"token_id:8": -0.008}],
        "text_offset": [0],
    }


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
    (asked,) = backend.asked
    prompt = "<system>S<user>a\nb<assistant>c<assistant>"
    assert asked.prompt_ids == [FIRST_BYTE + byte for byte in prompt.encode()]  # no BOS but the template's
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
                "stop_reason": None,
            }
        ],
        "usage": usage(len(text), len(text) + 1, len(text) - 1),
    }


def test_chat_logprobs(backend: FakeBackend) -> None:
    body = {**HELLO[CHAT], "logprobs": True, "top_logprobs": 2, "max_tokens": 1, "n": 2}
    first, second = post(backend, CHAT, body)["choices"]
    tops = [
        {"token": "", "logprob": 0.0, "bytes": []},
        {"token": "<s>", "logprob": -9999.0, "bytes": list(b"<s>")},
    ]
    for choice, token in ((first, ">"), (second, "t")):
        assert choice["message"]["content"] == token
        logprob = -(FIRST_BYTE + ord(token)) / 1000
        entry = {"token": token, "logprob": logprob, "bytes": [ord(token)], "top_logprobs": tops}
        assert choice["logprobs"] == {"content": [entry], "refusal": None}
    (choice,) = post(backend, CHAT, {**HELLO[CHAT], "logprobs": True, "max_tokens": 1})["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    assert post(backend, CHAT, {**HELLO[CHAT], "logprobs": False})["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("limit", [{"max_tokens": 3}, {"max_completion_tokens": 3}])
def test_chat_limit(backend: FakeBackend, limit: dict[str, int]) -> None:
    reply = post(backend, CHAT, {**HELLO[CHAT], **limit})
    assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (3, "length")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"chat_template": "x"}, "chat_template"),
    ],
)
def test_chats_that_are_none(backend: FakeBackend, change: dict[str, Any], param: str) -> None:
    assert refusal(ask(backend, "POST", CHAT, json={**HELLO[CHAT], **change}))["param"] == param


def test_a_model_without_a_chat_template() -> None:
    backend = FakeBackend(byte_tokenizer(None))
    assert "chat template" in refusal(ask(backend, "POST", CHAT, json=HELLO[CHAT]))["message"]
