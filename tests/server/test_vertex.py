from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from hex_llm.config import ServerConfig
from hex_llm.server.app import create_app
from hex_llm.server.common.body import MAX_PROMPTS
from hex_llm.types import FinishReason, Update
from tests.server.apps import asked
from tests.server.asking import CHAT, GENERATE, HELLO, ask, post, refusal
from tests.server.fakes import EOS, FakeBackend, byte_tokenizer
from tests.server.live import live

SAMPLES = {
    path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("fixtures/vertex/*.json")
}
PREDICT = "/v1/endpoints/1/deployedModels/2:predict"


@pytest.mark.parametrize("path", [GENERATE, PREDICT, "/vertex"])
@pytest.mark.parametrize("sample", [name for name in SAMPLES if "text" in SAMPLES[name]])
def test_samples_get_what_they_read(backend: FakeBackend, sample: str, path: str) -> None:
    """Bodies as Google's and Hugging Face's samples send them; `read` is what these then look at."""
    known = SAMPLES[sample]
    found = post(backend, path, known["body"], config={"predict_route": PREDICT})
    for step in known["read"]:
        found = found[step]
    assert found == known["text"]
    (asked,) = backend.asked
    assert {name: getattr(asked.params, name) for name in known["sampled"]} == known["sampled"]


def test_a_sample_that_never_worked(backend: FakeBackend) -> None:
    known = SAMPLES["malformed"]
    assert refusal(ask(backend, "POST", GENERATE, json=known["body"]))["param"] == known["refused"]


def test_routes_of_the_deployment(backend: FakeBackend) -> None:
    config = {"predict_route": PREDICT, "health_route": "/v1/endpoints/1/deployedModels/2", "api_key": "k"}
    assert ask(backend, "GET", config["health_route"], config=config).status_code == 200
    assert ask(backend, "POST", PREDICT, json={"prompt": "a"}, config=config).status_code == 401
    # A health route opens no other route that has its path.
    config["health_route"] = PREDICT
    assert ask(backend, "POST", PREDICT, json={"prompt": "a"}, config=config).status_code == 401
    assert ask(FakeBackend(ready=False), "GET", PREDICT, config=config).status_code == 503


def test_ping_is_posted_too(backend: FakeBackend) -> None:
    reply = ask(backend, "POST", "/ping", config={"api_key": "k"})
    assert (reply.status_code, reply.content) == (200, b"")


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
        HELLO[CHAT],
        {"instances": [{**HELLO[CHAT], **MARK}]},
        {"instances": [HELLO[CHAT]], **MARK},
    ],
)
def test_chats_through_generate(backend: FakeBackend, body: dict[str, Any]) -> None:
    reply = post(backend, GENERATE, body)
    chat = reply["predictions"] if "instances" in body else reply
    assert chat["choices"][0]["message"]["content"] == "<user>hello<assistant>"[::-1]


def test_any_path_behind_invoke(backend: FakeBackend) -> None:
    """Vertex AI's prefix; the key is asked for there too."""
    chat = post(backend, "/invoke/v1/chat/completions", HELLO[CHAT])
    assert chat["choices"][0]["message"]["content"] == "<user>hello<assistant>"[::-1]
    app = create_app(backend, ServerConfig(api_key="k"))
    assert asked(app, "POST", "/invoke/v1/chat/completions", json=HELLO[CHAT]).status_code == 401
    assert asked(app, "GET", "/invoke/health").status_code == 200
    assert asked(app, "GET", "/invoked/health").status_code in (401, 404)


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
        ({"instances": [{"prompt": "a"}], "parameters": 0}, "parameters", "object"),
        ({"prompt": "a", "parameters": ""}, "parameters", "object"),
        ({"instances": [{"prompt": "a", "topK": 1, "top_k": 1}]}, "top_k", "twice"),
        ({"prompt": "a", "max_tokens": 1, "parameters": {"maxOutputTokens": 1}}, "max_tokens", "twice"),
        ({"instances": [{"prompt": "a", "topP": 1.8}]}, "top_p", "top_p"),
        ({"instances": [{"prompt": "a", "dynamic-lora": "gs://b"}]}, "model", "--enable_lora"),
        ({"inputs": "a", "prompt": "a"}, "inputs", "unknown field"),
        ({"instances": [{"inputs": "a"}, {"prompt": "a"}]}, "prompt", "instances.1.prompt"),
        ({"instances": [{"inputs": "a", "details": True}]}, "details", "text"),
        ({"instances": [{"inputs": "a", "stream": True}]}, "stream", "text"),
        ({"instances": [{"inputs": "a", "max_tokens": 1, "max_new_tokens": 1}]}, "max_new_tokens", "twice"),
        ({"instances": [{"inputs": "a", "parameters": {"watermark": True}}]}, "watermark", "watermark"),
        ({"instances": [{"prompt": "a", "stream": True}, {"prompt": "b"}]}, "stream", "only one"),
        ({"prompt": "a", "stream": 1}, "stream", "true or false"),
        ({"prompt": "a", "stream": True, "logprobs": 1}, "logprobs", "stream"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        ({"prompt": "a", "stream": True, "n": 1, "best_of": 2}, "best_of", "stream"),
        ({"instances": [{**HELLO[CHAT], **MARK, "stream": True}, {**HELLO[CHAT], **MARK}]}, "stream", "only"),
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


# ---- streams


def parts(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    *objects, rest = reply.text.split("\0")
    assert rest == ""
    return [json.loads(one) for one in objects]


@pytest.mark.parametrize("body", [{"prompt": "hé"}, {"instances": [{"prompt": "hé"}]}])
def test_a_stream_tells_what_is_new(backend: FakeBackend, body: dict[str, Any]) -> None:
    instance = body.get("instances", [body])[0]
    instance |= {"stream": True, "max_tokens": 9}
    found = parts(ask(backend, "POST", GENERATE, json=body))
    assert len(found) > 1
    assert all(list(part) == ["predictions"] for part in found)
    whole = post(backend, GENERATE, body | {"stream": False} if instance is body else {
        "instances": [{**instance, "stream": False}]}, config={"predict_output_format": "raw"})  # fmt: skip
    assert "".join(part["predictions"][0] for part in found) == whole["predictions"][0]


def test_a_raw_stream_counts(backend: FakeBackend) -> None:
    body = {"prompt": "abc", "raw_response": True, "n": 2, "max_tokens": 9}
    whole = post(backend, GENERATE, body)
    found = parts(ask(backend, "POST", GENERATE, json={**body, "stream": True}))
    for i in range(2):
        assert "".join(part["predictions"][i] for part in found) == whole["predictions"][i]
        assert sum(part["output_token_counts"][i] for part in found) == whole["output_token_counts"][i]
    assert found[-1]["cumulative_logprobs"] == pytest.approx(whole["cumulative_logprobs"])


def test_a_stream_of_ids(backend: FakeBackend) -> None:
    backend.tokenizer = None
    found = parts(ask(backend, "POST", GENERATE, json={"prompt": [5, 6], "stream": True}))
    assert [i for part in found for i in part["predictions"][0]] == [6, 5, EOS]


class Breaking(FakeBackend):
    def updates(self, request: Any) -> Any:
        first, *_ = super().updates(request)
        yield first
        yield Update(request.request_id, finish_reason=FinishReason.ERROR, error="device lost")


@pytest.mark.parametrize("path", [GENERATE, "/generate_stream"])
def test_a_stream_that_breaks_says_so(path: str) -> None:
    body = {"prompt": "abc", "stream": True} if path == GENERATE else {"inputs": "abc"}
    with live(Breaking(byte_tokenizer())) as url:
        reply = httpx.post(url + path, json=body)
    last = [
        one for one in reply.text.replace("data: ", "").split("\0" if path == GENERATE else "\n\n") if one
    ][-1]
    assert "device lost" in json.dumps(json.loads(last)["error"])


def test_a_reader_who_leaves_ends_the_request(backend: FakeBackend) -> None:
    backend.hold = asyncio.Event()
    with live(backend) as url, pytest.raises(httpx.ReadTimeout):
        httpx.post(url + GENERATE, json={"prompt": "abc", "stream": True}, timeout=0.3)
    assert backend.num_cancelled == 1


def chunks_of(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(one.removeprefix("data: ")) for one in events]


STREAMED = {**HELLO[CHAT], **MARK, "stream": True, "model": "", "max_tokens": 9}


@pytest.mark.parametrize("body", [STREAMED, {"instances": [STREAMED]}])
def test_a_chat_in_a_stream_ends_with_its_usage(backend: FakeBackend, body: dict[str, Any]) -> None:
    """No chunk is without choices: Google's gradio client looks into them unasked."""
    chunks = chunks_of(ask(backend, "POST", GENERATE, json=body))
    assert all(chunk["choices"] for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 9


def test_googles_loop_over_a_chat_reads_all_of_it(backend: FakeBackend) -> None:
    """Its notebooks skip the chunk that has a usage."""
    text = ""
    for chunk in chunks_of(ask(backend, "POST", GENERATE, json=STREAMED)):
        if chunk["usage"] is not None:
            continue
        text += chunk["choices"][0]["delta"].get("content") or ""
    assert text == "<user>hello<assistant>"[::-1][:9]
