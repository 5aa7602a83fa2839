from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from hex_llm.config import ServerConfig
from hex_llm.server.app import create_app
from hex_llm.server.schemas import MAX_PROMPTS
from tests.server.asking import CHAT, GENERATE, HELLO, ask, post, refusal
from tests.server.fakes import EOS, FakeBackend

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
    ids = [*reversed(backend.asked[-1].prompt_ids), EOS]
    counted = {"output_token_counts": [10], "cumulative_logprobs": [pytest.approx(-sum(ids) / 1000)]}
    assert post(backend, GENERATE, body) == {**raw, **counted}


def test_each_choice_is_a_prediction(backend: FakeBackend) -> None:
    body = {
        "instances": [{"prompt": "ab", "n": 2}, {"prompt": "c", "echo": True}],
        "parameters": {"max_tokens": 9},
    }
    raw = post(backend, GENERATE, body, config={"predict_output_format": "raw"})
    assert raw == {"predictions": ["ba", "a", "cc"]}


def test_logprobs_stand_beside_the_predictions(backend: FakeBackend) -> None:
    body = {"instances": [{"prompt": "a", "logprobs": 0, "prompt_logprobs": 0}, {"prompt": "b"}]}
    reply = post(backend, GENERATE, body)
    assert reply["logprobs"][0]["tokens"] == ["a", "<s>", "</s>"]
    assert [known and len(known) for known in reply["prompt_logprobs"]] == [2, None]
    assert reply["logprobs"][1] is None
    body = {"prompt": "a", "raw_response": True}
    assert "logprobs" not in post(backend, GENERATE, body)


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
        ({"instances": [{"prompt": "a", "topP": 1.8}]}, "top_p", "top_p"),
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
