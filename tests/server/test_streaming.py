"""Streams of /v1/completions and /v1/chat/completions, judged by the replies that are not streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from hex_llm.config import ServerConfig
from hex_llm.errors import EngineStopped, HexError, QueueFull
from hex_llm.server.app import create_app
from hex_llm.server.common import streams
from hex_llm.types import FinishReason, Request, Update
from tests.server.asking import CHAT, COMPLETIONS, HELLO, JSON, ask, events, post, refusal, stream
from tests.server.fakes import EOS, FIRST_BYTE, FakeBackend, Speaker, byte_tokenizer

ROUTES = (COMPLETIONS, CHAT)
NONSENSE = '日本語 ünd 🙂 \n\n data: [DONE]\r\n\u2028 "quoted" \\ end'


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that a client puts together from the chunks."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices.setdefault(part["index"], {"index": part["index"]})
            assert whole.get("finish_reason") is None, "a chunk after the end"
            for name, value in part.items():
                whole[name] = _longer(whole.get(name), value)
    return [choices[index] for index in sorted(choices)]


def _longer(known: Any, new: Any) -> Any:
    """Texts and lists grow, also in objects."""
    if isinstance(new, dict):
        old = known or {}
        return old | {name: _longer(old.get(name), value) for name, value in new.items()}
    if known is None or new is None:
        return new if known is None else known
    return known + new if isinstance(new, str | list) else new


def as_messages(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"message" if name == "delta" else name: value for name, value in one.items()} for one in choices]


BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "choices": {"n": 3},
    "stop string": {"n": 2, "stop": ["ell", "leh"]},
    "included": {"stop": ["l"], "include_stop_str_in_output": True},
    "stop token": {"stop_token_ids": [FIRST_BYTE + ord("l")], "max_tokens": 100},
    "short": {"max_tokens": 3},
    "long": {"max_tokens": 500, "ignore_eos": True},
    "ids": {"return_token_ids": True, "n": 2},
    "special": {"skip_special_tokens": False, "max_tokens": 100},
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", ROUTES)
def test_no_token_is_lost_or_moved(backend: FakeBackend, path: str, name: str) -> None:
    body = {**HELLO[path], "stream_options": {"include_usage": True}, **BODIES[name]}
    chunks = stream(backend, path, body)
    del body["stream_options"]
    whole = post(backend, path, body)
    last = chunks.pop()
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert as_messages(joined(chunks)) == whole["choices"]
    kinds = {COMPLETIONS: "text_completion", CHAT: "chat.completion.chunk"}
    for chunk in (*chunks, last):
        assert {n: chunk[n] for n in ("id", "created", "model", "object")} == {
            "id": last["id"], "created": last["created"], "model": "fake", "object": kinds[path],
        }  # fmt: skip
    if path == CHAT and name == "ids":
        assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert "prompt_token_ids" not in chunks[1]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["ab", "cde", "f"], "n": 2},
        {"prompt": ["ab", "cd"], "n": 2, "echo": True},
        {"prompt": [[FIRST_BYTE + 97], [FIRST_BYTE + 98]], "return_token_ids": True},
        {"prompt": "aä", "logprobs": 2},
        {"prompt": ["aä", "b"], "logprobs": 2, "n": 2, "echo": True},
        {"prompt": "ab", "logprobs": 1, "return_tokens_as_token_ids": True},
        {"prompt": "ab", "add_special_tokens": False},
    ],
)
def test_completions_in_chunks(backend: FakeBackend, body: dict[str, Any]) -> None:
    chunks = stream(backend, COMPLETIONS, {**body, "max_tokens": 20})
    assert joined(chunks) == post(backend, COMPLETIONS, {**body, "max_tokens": 20})["choices"]
    assert len(chunks) > len(joined(chunks))  # not all at once


def test_chat_logprobs_in_chunks(backend: FakeBackend) -> None:
    for more in ({}, {"return_tokens_as_token_ids": True}):
        body = {**HELLO[CHAT], "logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 9, **more}
        whole = post(backend, CHAT, body)
        for choice in whole["choices"]:
            del choice["logprobs"]["refusal"]
        choices = as_messages(joined(stream(backend, CHAT, body)))
        for choice in choices:
            choice["logprobs"].pop("refusal")
        assert choices == whole["choices"]


def test_the_shape_of_chunks() -> None:
    first, *texts, last = stream(Speaker("hä"), CHAT, HELLO[CHAT])
    opening = {"role": "assistant", "content": ""}
    assert first["choices"] == [{"index": 0, "delta": opening, "logprobs": None, "finish_reason": None}]
    # A token with half a character makes no chunk.
    assert [chunk["choices"][0]["delta"] for chunk in texts] == [{"content": "h"}, {"content": "ä"}]
    end = {"finish_reason": "stop", "stop_reason": None}
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, **end}]

    *texts, last = stream(Speaker("hä"), COMPLETIONS, HELLO[COMPLETIONS])
    assert [chunk["choices"] for chunk in texts] == [
        [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}] for text in "hä"
    ]
    assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, **end}]


@pytest.mark.parametrize("path", ROUTES)
def test_any_text_survives(path: str) -> None:
    """Also one that looks like the frame of a stream, in a reader that cuts at every kind of line's end."""
    reply = ask(Speaker(NONSENSE), "POST", path, json={**HELLO[path], "stream": True, "max_tokens": 99})
    (choice,) = joined(events(reply.text))
    assert (choice["text"] if path == COMPLETIONS else choice["delta"]["content"]) == NONSENSE
    assert reply.headers["x-accel-buffering"] == "no"
    assert "no-cache" in reply.headers["cache-control"]


@pytest.mark.parametrize("path", ROUTES)
def test_usage_in_every_chunk(backend: FakeBackend, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**HELLO[path], "stream_options": options, "max_tokens": 4}
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream(backend, path, body)]
    assert counts == sorted(counts)
    assert (counts[0] == 0, counts[-1]) == (path == CHAT, 4)
    for chunk in stream(backend, path, {**body, "stream_options": {"continuous_usage_stats": True}}):
        assert chunk["usage"] is None


def test_silence_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """For proxies; clients do not see it."""
    monkeypatch.setattr(streams, "SILENT_S", 0.0)
    tool = {"type": "function", "function": {"name": "f"}}
    body = {**HELLO[CHAT], "tools": [tool], "tool_choice": "required", "stream": True}
    text = ask(Speaker('[{"name": "f", "parameters": {}}]'), "POST", CHAT, json=body).text
    assert text.count(":\n\n") > 10
    chunks = events(text.replace(":\n\n", ""))
    assert [len(chunk["choices"][0]["delta"].get("tool_calls", ())) for chunk in chunks] == [0, 1, 0]


def test_the_last_text_comes_with_the_end(backend: FakeBackend) -> None:
    first, *_, last = stream(backend, CHAT, {**HELLO[CHAT], "max_tokens": 3})
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["delta"]["content"]


def test_without_a_tokenizer() -> None:
    backend = FakeBackend(None)
    backend.num_turns = 20
    chunks = stream(backend, COMPLETIONS, {"prompt": [5, 6], "max_tokens": 9})
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[6], [5], [EOS]]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "x" * 201}, "request_id"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
@pytest.mark.parametrize("path", ROUTES)
def test_what_cannot_be_streamed(backend: FakeBackend, path: str, change: dict[str, Any], param: str) -> None:
    body = {**HELLO[path], "stream": True, **change}
    assert refusal(ask(backend, "POST", path, json=body))["param"] == param


# ---- errors


class Failing(FakeBackend):
    """Every choice fails after `num_good` tokens."""

    num_turns = 20

    def __init__(self, num_good: int, message: str, param: str | None = None) -> None:
        super().__init__(byte_tokenizer())
        self.num_good, self.message, self.param = num_good, message, param

    def updates(self, request: Request) -> Iterable[Update]:
        for _ in range(self.num_good):
            yield Update(request.request_id, 0, [FIRST_BYTE + ord("x")])
        reason = FinishReason.ERROR
        yield Update(request.request_id, 0, finish_reason=reason, error=self.message, param=self.param)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("param", "status"), [(None, 500), ("structured_outputs", 400)], ids=["ours", "theirs"]
)
def test_errors_before_and_after_the_first_byte(path: str, param: str | None, status: int) -> None:
    body = {**HELLO[path], "stream": True}
    early = refusal(ask(Failing(0, "no grammar", param), "POST", path, json=body), status)
    *good, late = stream(Failing(2, "no grammar", param), path, HELLO[path])
    assert late == {"error": early}
    assert early["message"] == "no grammar"
    assert early["param"] == param
    assert len(good) == (3 if path == CHAT else 2)  # the role


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("problem", "status"), [(QueueFull("full"), 429), (EngineStopped("gone"), 503)])
def test_errors_of_the_engine(backend: FakeBackend, path: str, problem: HexError, status: int) -> None:
    backend.error = problem
    reply = ask(backend, "POST", path, json={**HELLO[path], "stream": True})
    assert refusal(reply, status)["message"] == str(problem)


def test_errors_that_nobody_foresaw(backend: FakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeBackend):
        def updates(self, request: Request) -> Iterable[Update]:
            yield Update(request.request_id, 0, [FIRST_BYTE + ord("x")])
            yield Update(request.request_id, 0, [10**100, "0x7fff"])  # type: ignore[list-item]

    class Loud(Broken):
        async def _feed(self, generation: Any) -> None:
            try:
                await super()._feed(generation)
            except TypeError:
                generation.fail(RuntimeError("at 0x7fffdeadbeef"))

    *_, last = stream(Loud(byte_tokenizer()), COMPLETIONS, HELLO[COMPLETIONS])
    assert "0x7fff" not in str(last)
    assert last["error"]["code"] == 500
    assert "0x7fffdeadbeef" in caplog.text


def test_one_bad_prompt_ends_the_others() -> None:
    backend = FakeBackend(byte_tokenizer())
    backend.hold = asyncio.Event()
    body = {"prompt": [[5], [6], [5] * 5000], "stream": True}
    refusal(ask(backend, "POST", COMPLETIONS, json=body))
    assert backend.num_cancelled == len(backend.asked) == 2


# ---- clients that leave


def left_by_client(
    backend: FakeBackend, path: str, body: dict[str, Any], *, after: int, sends: Callable[[], Any]
) -> list[Any]:
    """A client that leaves when it has got `after` messages; `sends` makes what each send waits for."""
    app = create_app(backend, ServerConfig())
    asking = {
        "type": "http.request",
        "body": json.dumps({**body, "stream": True}).encode(),
        "more_body": False,
    }
    headers = [(name.encode(), value.encode()) for name, value in JSON.items()]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "http_version": "1.1",
             "headers": headers, "scheme": "http"}  # fmt: skip
    sent: list[Any] = []

    async def run() -> None:
        waiting = [asking]
        leaves = asyncio.Event()

        async def receive() -> Any:
            if waiting:
                return waiting.pop()
            while not backend.asked:
                await asyncio.sleep(0)
            if after:
                await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == after:
                leaves.set()
                await sends()

        await asyncio.wait_for(app(scope, receive, send), 10)
        await asyncio.sleep(0)

    asyncio.run(run())
    return sent


class Endless(FakeBackend):
    """Says some, then nothing more for ever."""

    async def _feed(self, generation: Any) -> None:
        for _ in range(3):
            generation.add(Update(generation.collector.request.request_id, 0, [FIRST_BYTE + ord("x")]))
            await asyncio.sleep(0)
        await asyncio.Event().wait()


async def _at_once() -> None:
    pass


@pytest.mark.parametrize("path", ROUTES)
def test_a_client_that_leaves_before_the_first_token(backend: FakeBackend, path: str) -> None:
    backend.hold = asyncio.Event()
    left_by_client(backend, path, HELLO[path], after=0, sends=_at_once)
    assert backend.num_cancelled == 1


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("sends", [_at_once, lambda: asyncio.Event().wait()], ids=["waits", "blocked"])
def test_a_client_that_leaves_later(path: str, sends: Callable[[], Any]) -> None:
    """Whether the reply waits for the engine, or the server for the client to take what was sent."""
    backend = Endless(byte_tokenizer())
    sent = left_by_client(backend, path, HELLO[path], after=2, sends=sends)
    assert sent[1]["body"].startswith(b"data: ")
    assert backend.num_cancelled == 1


def test_a_client_that_leaves_several_prompts() -> None:
    backend = Endless(byte_tokenizer())
    left_by_client(backend, COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 1}, after=3, sends=_at_once)
    assert backend.num_cancelled == 3
