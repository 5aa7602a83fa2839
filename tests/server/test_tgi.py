"""TGI's routes: bodies and replies, and the clients that people have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import text_generation
from huggingface_hub import InferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError
from text_generation import errors as tgi_errors

from hex_llm.errors import EngineStopped, HexError, InvalidRequest, QueueFull
from hex_llm.sampling_params import MAX_CHOICES, MAX_LOGPROBS, StructuredOutputs
from hex_llm.types import FinishReason, Update
from tests.server.asking import CHAT, GENERATE, HELLO, JSON, ask, post
from tests.server.fakes import BOS, EOS, FIRST_BYTE, LIMITS, FakeBackend, byte_tokenizer
from tests.server.live import live

STREAM, ROOT, INVOKE = "/generate_stream", "/", "/invocations"
ROUTES = [GENERATE, STREAM, ROOT, INVOKE]


def refusal(reply: httpx.Response, status: int = 422, kind: str = "validation") -> str:
    assert reply.status_code == status, reply.text
    assert list(reply.json()) == ["error", "error_type"]
    assert reply.json()["error_type"] == kind
    return str(reply.json()["error"])


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *found, rest = reply.text.split("\n\n")
    assert rest == ""
    return [json.loads(one.removeprefix("data: ")) for one in found]


def token(byte: str) -> dict[str, Any]:
    token_id = FIRST_BYTE + ord(byte)
    return {"id": token_id, "text": byte, "logprob": -token_id / 1000, "special": False}


END = {"id": EOS, "text": "</s>", "logprob": -EOS / 1000, "special": True}


# ---- replies


def test_a_whole_reply(backend: FakeBackend) -> None:
    body = {"inputs": "héllo", "parameters": {"max_new_tokens": 3}}
    assert post(backend, GENERATE, body) == {"generated_text": "oll"}
    assert post(backend, ROOT, body) == [{"generated_text": "héllooll"}]
    assert post(backend, INVOKE, body) == [{"generated_text": "héllooll"}]
    body["parameters"]["return_full_text"] = False
    assert post(backend, ROOT, body) == [{"generated_text": "oll"}]
    body["parameters"]["return_full_text"] = True
    assert post(backend, GENERATE, body) == {"generated_text": "héllooll"}


def test_headers(backend: FakeBackend) -> None:
    reply = ask(backend, "POST", GENERATE, json={"inputs": "hé", "parameters": {"max_new_tokens": 2}})
    counts = {"x-compute-characters": "2", "x-prompt-tokens": "4", "x-generated-tokens": "2"}
    assert {name: reply.headers[name] for name in counts} == counts
    for name in ("total-time", "validation-time", "queue-time", "inference-time", "time-per-token"):
        assert 0 <= int(reply.headers[f"x-{name}"]) < 10_000
    assert 0 < float(reply.headers["x-compute-time"]) < 10
    streamed = ask(backend, "POST", STREAM, json={"inputs": "hé"})
    assert streamed.headers["x-compute-type"] == reply.headers["x-compute-type"] != ""
    assert streamed.headers["x-compute-characters"] == "2"
    assert streamed.headers["x-accel-buffering"] == "no"


def test_details(backend: FakeBackend) -> None:
    body = {"inputs": "ab", "parameters": {"details": True, "decoder_input_details": True, "seed": 5}}
    details = post(backend, GENERATE, body)["details"]
    assert details == {
        "finish_reason": "eos_token",
        "generated_tokens": 4,
        "seed": None,  # nothing was drawn
        "prefill": [
            {"id": BOS, "text": "<s>", "logprob": None},
            *({k: v for k, v in token(byte).items() if k != "special"} for byte in "ab"),
        ],
        "tokens": [
            token("b"),
            token("a"),
            {"id": BOS, "text": "<s>", "logprob": -BOS / 1000, "special": True},
            END,
        ],
    }
    assert (
        post(backend, GENERATE, {"inputs": "ab", "parameters": {"details": True}})["details"]["prefill"] == []
    )


@pytest.mark.parametrize(
    ("parameters", "reason", "text"),
    [
        ({"max_new_tokens": 2}, "length", "cb"),
        ({"stop": ["b", "xyz"]}, "stop_sequence", "cb"),  # which TGI leaves in the text
        ({}, "eos_token", "cba"),
    ],
)
def test_how_it_ended(backend: FakeBackend, parameters: dict[str, Any], reason: str, text: str) -> None:
    body = {"inputs": "abc", "parameters": {**parameters, "details": True}}
    reply = post(backend, GENERATE, body)
    assert (reply["generated_text"], reply["details"]["finish_reason"]) == (text, reason)
    last = events(ask(backend, "POST", STREAM, json=body))[-1]
    assert (last["generated_text"], last["details"]["finish_reason"]) == (text, reason)


def test_top_tokens(backend: FakeBackend) -> None:
    body = {"inputs": "a", "parameters": {"details": True, "top_n_tokens": 2, "max_new_tokens": 1}}
    expected = [
        {"id": 0, "text": "", "logprob": 0.0, "special": False},
        {"id": BOS, "text": "<s>", "logprob": -9999.0, "special": True},
    ]
    assert post(backend, GENERATE, body)["details"]["top_tokens"] == [expected]
    assert [one["top_tokens"] for one in events(ask(backend, "POST", STREAM, json=body))] == [expected]


def test_best_of(backend: FakeBackend) -> None:
    """The fake's second choice leaves out the first token; the mean of the third is the likeliest."""
    body = {
        "inputs": "abz",
        "parameters": {"best_of": 3, "do_sample": True, "details": True, "max_new_tokens": 1},
    }
    reply = post(backend, GENERATE, body)
    details = reply["details"]
    others = details.pop("best_of_sequences")
    assert reply["generated_text"] == "a"
    assert details["tokens"] == [token("a")]
    assert [other["generated_text"] for other in others] == ["z", "b"]
    assert all(set(other) == {*details, "generated_text"} for other in others)
    seed = backend.asked[0].params.seed
    assert [one["seed"] for one in (*others, details)] == [seed, seed + 1, seed + 2]


def test_text_of_tokens_joins_to_the_text(backend: FakeBackend) -> None:
    class Says(FakeBackend):
        def updates(self, request: Any) -> Iterator[Update]:
            for byte in "aé€b".encode():
                known = next(iter(super().updates(request))).logprobs
                yield Update(request.request_id, token_ids=[FIRST_BYTE + byte], logprobs=[known[0]])
            yield Update(request.request_id, finish_reason=FinishReason.STOP)

    found = events(ask(Says(byte_tokenizer()), "POST", STREAM, json={"inputs": "x"}))
    assert [one["token"]["text"] for one in found] == ["a", "", "é", "", "", "€", "b", ""]
    assert [one["generated_text"] for one in found] == [None] * 7 + ["aé€b"]


def test_a_stream(backend: FakeBackend) -> None:
    body = {"inputs": "ab", "parameters": {"details": True, "max_new_tokens": 2}}
    assert events(ask(backend, "POST", STREAM, json=body)) == [
        {"index": 1, "token": token("b"), "generated_text": None, "details": None},
        {
            "index": 2,
            "token": token("a"),
            "generated_text": "ba",
            "details": {"finish_reason": "length", "generated_tokens": 2, "seed": None, "input_length": 3},
        },
    ]
    body["parameters"]["details"] = False
    for path in (GENERATE, ROOT, INVOKE):
        last = events(ask(backend, "POST", path, json={**body, "stream": True}))[-1]
        assert last["details"] is None
        assert last["generated_text"] == ("ba" if path == GENERATE else "abba")


def test_info(backend: FakeBackend) -> None:
    info = ask(backend, "GET", "/info").json()
    assert info["model_id"] == "fake"
    assert info["max_total_tokens"] == LIMITS.max_len
    assert info["max_stop_sequences"] == 4
    assert set(info) == {
        "model_id", "model_sha", "model_pipeline_tag", "max_concurrent_requests", "max_best_of",
        "max_stop_sequences", "max_input_tokens", "max_total_tokens", "validation_workers",
        "max_client_batch_size", "router", "version", "sha", "docker_label",
    }  # fmt: skip


def test_sagemakers_other_bodies(backend: FakeBackend) -> None:
    reply = post(backend, INVOKE, HELLO[CHAT])
    assert reply["choices"][0]["message"]["content"] == "<user>hello<assistant>"[::-1]
    assert post(backend, INVOKE, {"prompt": "abc"})["choices"][0]["text"] == "cba"
    for body in (HELLO[CHAT], {"prompt": "abc"}):
        reply = ask(backend, "POST", INVOKE, json={**body, "stream": True})
        assert reply.text.endswith("data: [DONE]\n\n")


# ---- parameters


@pytest.mark.parametrize(
    ("sent", "sampled"),
    [
        (None, {"temperature": 1.0, "max_tokens": 100}),
        ({}, {"temperature": 0.0, "max_tokens": 100}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}),
        ({"top_p": 0.95}, {"temperature": 1.0, "top_p": 0.95}),
        ({"top_k": 5.0, "typical_p": 0.5}, {"temperature": 1.0, "top_k": 5, "typical_p": 0.5}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5, "temperature": 0.0}),
        ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
        ({"max_new_tokens": 7.0}, {"max_tokens": 7}),
        ({"stop": ["a", "b", "c", "d"]}, {"stop": ("a", "b", "c", "d"), "include_stop_str_in_output": True}),
        ({"truncate": 2}, {"truncate_prompt_tokens": 2}),
        ({"seed": 2**64 - 1}, {"seed": -1}),
        ({"seed": 7}, {"seed": 7}),
        ({"watermark": False, "adapter_id": None, "no_repeat_ngram_size": 0}, {"n": 1, "logprobs": None}),
    ],
)  # fmt: skip
def test_parameters_act(backend: FakeBackend, sent: Any, sampled: dict[str, Any]) -> None:
    post(backend, GENERATE, {"inputs": "hello"} | ({} if sent is None else {"parameters": sent}))
    (asked,) = backend.asked
    assert {name: getattr(asked.params, name) for name in sampled} == sampled


ARRAY = StructuredOutputs(json='{"type": "array"}')


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        ("regex", "a+", StructuredOutputs(regex="a+")),
        ("json", {"type": "array"}, ARRAY),
        ("json", '{"type": "array"}', ARRAY),
        ("json_object", {"type": "array"}, ARRAY),
        ("json_schema", {"name": "x", "schema": {"type": "array"}}, ARRAY),
    ],
)
def test_grammars(backend: FakeBackend, kind: str, value: Any, wanted: StructuredOutputs) -> None:
    post(backend, GENERATE, {"inputs": "a", "parameters": {"grammar": {"type": kind, "value": value}}})
    assert backend.asked[0].params.structured_outputs == wanted


def test_each_reply_names_a_seed_of_its_own(backend: FakeBackend) -> None:
    body = {"inputs": "a", "parameters": {"do_sample": True, "details": True}}
    seeds = [post(backend, GENERATE, body)["details"]["seed"] for _ in range(2)]
    assert seeds == [asked.params.seed for asked in backend.asked]
    assert seeds[0] != seeds[1]
    body["parameters"]["seed"] = 2**64 - 1
    assert post(backend, GENERATE, body)["details"]["seed"] == 2**64 - 1


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"watermark": True}, "`watermark`"),
        ({"adapter_id": "x"}, "--enable_lora"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"max_new_tokens": LIMITS.max_len}, f"must be <= {LIMITS.max_len}. Given: 6 `inputs` tokens"),
        ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"stop": [""]}, "stop"),
        ({"truncate": 0}, "`truncate` must be strictly positive"),
        ({"truncate": LIMITS.max_len}, "truncate:"),
        ({"best_of": 0}, "`best_of`"),
        ({"best_of": MAX_CHOICES + 1, "do_sample": True}, "`best_of`"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
        ({"top_n_tokens": MAX_LOGPROBS + 1}, "`top_n_tokens`"),
        ({"top_n_tokens": -1}, "`top_n_tokens`"),
        ({"seed": -1}, "`seed`"),
        ({"seed": 2**64}, "`seed`"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": "hot"}, "parameters.temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"grammar": {"type": "regex", "value": 5}}, "grammar.regex"),
        ({"grammar": {"type": "json", "value": 5}}, "grammar.value"),
        ({"grammar": {"type": "ebnf", "value": ""}}, "grammar.type"),
        ({"grammar": {"type": "json_schema", "value": {"strictly": 1}}}, "grammar.value.strictly"),
        ({"min_p": 0.5}, "parameters.min_p"),
        ({"stop_sequences": ["a"]}, "parameters.stop_sequences"),
    ],
)  # fmt: skip
def test_parameters_that_are_refused(
    backend: FakeBackend, path: str, parameters: dict[str, Any], words: str
) -> None:
    reply = ask(backend, "POST", path, json={"inputs": "hello", "parameters": parameters})
    message = refusal(reply)
    assert message.startswith("Input validation error: ")
    assert words in message


def test_what_cannot_be_streamed(backend: FakeBackend) -> None:
    for parameters, words in (
        ({"best_of": 2, "do_sample": True}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming"),
    ):
        for path, more in ((STREAM, {}), (ROOT, {"stream": True}), (GENERATE, {"stream": True})):
            body = {"inputs": "a", "parameters": parameters, **more}
            assert words in refusal(ask(backend, "POST", path, json=body))


@pytest.mark.parametrize(
    "body",
    [b"[1]", b"{", b'{"inputs": 5}', b'{"inputs": ""}', b'{"inputs": "a", "model": "x"}', b"{}"],
)
def test_bodies_that_are_none(backend: FakeBackend, body: bytes) -> None:
    for path in (STREAM, ROOT, INVOKE):
        assert refusal(ask(backend, "POST", path, content=body, headers=JSON))


def test_inputs_need_a_tokenizer() -> None:
    for path in ROUTES:
        assert "tokenizer" in refusal(ask(FakeBackend(), "POST", path, json={"inputs": "a"}))


# ---- errors


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (QueueFull("x"), 429, "overloaded", "Model is overloaded"),
        (EngineStopped("x"), 424, "generation", "Request failed during generation: x"),
        (HexError("x"), 424, "generation", "Request failed during generation: x"),
        (
            InvalidRequest("max_tokens: x", "max_tokens"),
            422,
            "validation",
            "Input validation error: max_new_tokens: x",
        ),
    ],
)
def test_errors(
    backend: FakeBackend, path: str, error: Exception, status: int, kind: str, message: str
) -> None:
    backend.error = error
    reply = ask(backend, "POST", path, json={"inputs": "a"})
    assert refusal(reply, status, kind) == message
    assert ("retry-after" in reply.headers) == (status == 429)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("end", "status", "kind"),
    [
        (Update("", finish_reason=FinishReason.ABORT), 500, "incomplete_generation"),
        (Update("", finish_reason=FinishReason.ERROR, error="lost"), 424, "generation"),
        (Update("", finish_reason=FinishReason.ERROR, error="no", param="stop"), 422, "validation"),
    ],
)
def test_generations_that_fail(path: str, end: Update, status: int, kind: str) -> None:
    class Failing(FakeBackend):
        def updates(self, request: Any) -> list[Update]:
            return [end]

    reply = ask(Failing(byte_tokenizer()), "POST", path, json={"inputs": "a"})
    refusal(reply, status, kind)


def test_a_stream_that_breaks(backend: FakeBackend) -> None:
    class Breaking(FakeBackend):
        def updates(self, request: Any) -> Iterator[Update]:
            yield next(iter(super().updates(request)))
            yield Update(request.request_id, finish_reason=FinishReason.ERROR, error="lost")

    with live(Breaking(byte_tokenizer())) as url:
        found = events(httpx.post(url + STREAM, json={"inputs": "ab"}))
    assert found[-1] == {"error": "Request failed during generation: lost", "error_type": "generation"}
    assert found[0].get("token", token("b")) == token("b")


# ---- real clients


def test_hugging_faces_client(backend: FakeBackend) -> None:
    with live(backend) as url:
        client = InferenceClient(model=url, provider="hf-inference")
        assert client.text_generation("hello", max_new_tokens=3, return_full_text=False) == "oll"
        output = client.text_generation(
            "ab", details=True, decoder_input_details=True, top_n_tokens=2, best_of=2, temperature=0.5,
            return_full_text=False, stop=["q"],
        )  # fmt: skip
        assert output.details.finish_reason == "eos_token"
        assert [one.text for one in output.details.prefill] == ["<s>", "a", "b"]
        assert len(output.details.best_of_sequences) == 1
        assert len(output.details.top_tokens) == output.details.generated_tokens
        pieces = list(client.text_generation("hello", stream=True, max_new_tokens=3))
        assert pieces == ["o", "l", "l"]
        *_, last = client.text_generation("hello", stream=True, details=True, max_new_tokens=3)
        assert last.details.finish_reason == "length"
        assert last.details.input_length == 6
        with pytest.raises(ValidationError, match="stop sequences"):
            client.text_generation("hello", stop=list("abcde"))
        with pytest.raises(ValidationError, match="watermark"):
            list(client.text_generation("hello", stream=True, watermark=True))
        assert client.get_endpoint_info()["max_total_tokens"] == LIMITS.max_len
        assert client.health_check()
        backend.error = QueueFull("x")
        with pytest.raises(OverloadedError):
            client.text_generation("hello")


def test_hugging_faces_client_chats(backend: FakeBackend) -> None:
    said = "<user>hello<assistant>"[::-1]
    with live(backend) as url:
        client = InferenceClient(model=url)
        whole = client.chat_completion(HELLO[CHAT]["messages"], max_tokens=100)
        assert whole.choices[0].message.content == said
        chunks = client.chat_completion(HELLO[CHAT]["messages"], max_tokens=100, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
def test_tgis_own_client(backend: FakeBackend) -> None:
    with live(backend) as url:
        client = text_generation.Client(url)
        whole = client.generate("hello", max_new_tokens=3, decoder_input_details=True, top_n_tokens=1)
        assert whole.generated_text == "oll"
        assert whole.details.finish_reason == "length"
        assert len(whole.details.prefill) == 6
        found = list(client.generate_stream("hello", max_new_tokens=3, return_full_text=True))
        assert [one.token.text for one in found] == ["o", "l", "l"]
        assert found[-1].generated_text == "hellooll"
        told = client.chat([text_generation.types.Message(role="user", content="hello")], max_tokens=3)
        assert told.choices[0].message.content is not None
        tool = text_generation.types.Tool(type="function", function={"name": "f", "parameters": {}})
        client.chat(
            [text_generation.types.Message(role="user", content="hello")], tools=[tool], tool_choice="f"
        )
        assert backend.asked[-1].params.structured_outputs is not None
        best = client.generate("abc", best_of=2, do_sample=True)
        assert len(best.details.best_of_sequences) == 1
        with pytest.raises(tgi_errors.ValidationError, match="watermark"):
            client.generate("hello", watermark=True)
        backend.error = QueueFull("x")
        with pytest.raises(tgi_errors.OverloadedError):
            client.generate("hello")
