"""The `openai` package, and clients that read streams line by line, against a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from hex_llm.errors import EngineStopped, QueueFull
from hex_llm.types import Request, Update
from tests.server.fakes import FIRST_BYTE, FakeBackend, Speaker, byte_tokenizer
from tests.server.live import live
from tests.server.test_chat import HERMES, ROME, TOOLS, TWO_CALLS
from tests.server.test_streaming import Failing

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
REPLY = ">tnatsissa<olleh>resu<"  # the template's text reversed
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(FakeBackend(byte_tokenizer())) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def client_of(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


# ---- chats and completions


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=HELLO, n=2)
    assert [choice.message.content for choice in reply.choices] == [REPLY, REPLY[1:]]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_chat_in_chunks(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    usage = chunks.pop()
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(REPLY) + 1
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == REPLY
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_clients_own_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="fake", messages=HELLO, logprobs=True, stream_options={"include_usage": True}
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].message.content == REPLY
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or ()) == len(REPLY) + 1
    assert final.usage is not None


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt=["ab", "cd"], n=2, logprobs=1, echo=True)
    assert [(choice.index, choice.text) for choice in reply.choices] == [
        (0, "abba"), (1, "aba"), (2, "cddc"), (3, "cdc"),
    ]  # fmt: skip
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.tokens == ["<s>", "a", "b", "b", "a", "<s>", "</s>"]
    texts = [""] * 4
    for chunk in client.completions.create(model="fake", prompt=["ab", "cd"], n=2, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in reply.choices]


def test_async(url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            chat, text = await asyncio.gather(
                client.chat.completions.create(model="fake", messages=HELLO),
                client.completions.create(model="fake", prompt="ab"),
            )
            assert chat.choices[0].message.content == REPLY
            assert text.choices[0].text == "ba"
            streams = await asyncio.gather(
                *(client.completions.create(model="fake", prompt=f"{i:04}", stream=True) for i in range(50))
            )
            for i, stream in enumerate(streams):
                assert "".join([chunk.choices[0].text async for chunk in stream]) == f"{i:04}"[::-1]

    asyncio.run(run())


# ---- tools, structured output


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("choice", "said", "called"),
    [
        ("auto", TWO_CALLS, ["weather", "clock"]),
        ("none", TWO_CALLS, []),
        ("required", f'[{{"name": "weather", "parameters": {ROME}}}]', ["weather"]),
        (NAMED, ROME, ["weather"]),
    ],
    ids=["auto", "none", "required", "named"],
)
def test_tools(choice: Any, said: str, called: list[str], streams: bool) -> None:
    tools: Any = TOOLS
    with live(Speaker(said, byte_tokenizer(HERMES))) as address:
        asked: Any = {"model": "fake", "messages": HELLO, "tools": tools, "tool_choice": choice}
        completions = client_of(address).chat.completions
        if streams:
            with completions.stream(**asked) as events:
                for _ in events:
                    pass
                answer: Any = events.get_final_completion().choices[0]
        else:
            answer = completions.create(**asked).choices[0]
        calls = answer.message.tool_calls or []
        assert [call.function.name for call in calls] == called
        assert answer.finish_reason == ("tool_calls" if called else "stop")
        if called:
            assert json.loads(calls[0].function.arguments) == json.loads(ROME)
        else:
            assert answer.message.content == said
        # The reply goes back as it came, with what the tools have said.
        results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls]
        completions.create(model="fake", messages=[*HELLO, answer.message, *results], tools=tools)


class Place(pydantic.BaseModel):
    place: str


def test_parsed_output() -> None:
    backend = Speaker(ROME)
    with live(backend) as address:
        completions = client_of(address).chat.completions
        reply = completions.parse(model="fake", messages=HELLO, response_format=Place)
        assert reply.choices[0].message.parsed == Place(place="Röm")
        wanted = backend.asked[-1].params.structured_outputs
        assert wanted is not None
        assert json.loads(wanted.json or "")["required"] == ["place"]
        with completions.stream(model="fake", messages=HELLO, response_format=Place) as events:
            parsed = [event.parsed for event in events if event.type == "content.delta"][-1]
        assert parsed == {"place": "Röm"}
        tool = openai.pydantic_function_tool(Place)
        reply = completions.parse(model="fake", messages=HELLO, tools=[tool], tool_choice=_named("Place"))
        (call,) = reply.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == Place(place="Röm")


def _named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def test_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="fake", messages=HELLO, logprobs=True, top_logprobs=2, max_completion_tokens=2
    )
    assert reply.choices[0].logprobs is not None
    first, _ = reply.choices[0].logprobs.content or []
    assert (first.token, first.bytes) == (">", [ord(">")])
    assert len(first.top_logprobs) == 2


def test_fields_of_vllm(client: openai.OpenAI) -> None:
    body = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}}
    reply = client.chat.completions.create(model="", messages=HELLO, max_tokens=3, extra_body=body)
    assert reply.choices[0].finish_reason == "length"


# ---- errors


def test_errors_have_types(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(model="fake", prompt="a", best_of=3, stream=True)
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="a")
    backend = FakeBackend(byte_tokenizer())
    with live(backend, api_key="k") as address:
        with pytest.raises(openai.AuthenticationError):
            client_of(address).models.list()
        known = openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0)
        for error, kind in (
            (QueueFull("full"), openai.RateLimitError),
            (EngineStopped("gone"), openai.InternalServerError),
        ):
            backend.error = error
            for streams in (False, True):
                with pytest.raises(kind):
                    known.chat.completions.create(model="fake", messages=HELLO, stream=streams)


def test_a_stream_that_breaks() -> None:
    with live(Failing(2, "no finite score")) as address:
        stream = client_of(address).completions.create(model="fake", prompt="a", stream=True)
        assert [next(stream).choices[0].text for _ in range(2)] == ["x", "x"]
        with pytest.raises(openai.APIError, match="no finite score"):
            next(stream)


# ---- clients that are not OpenAI's


def test_as_vllm_bench_serve_reads(url: str) -> None:
    """Its request, and its way through the reply: pieces of any size, cut at empty lines."""
    asked = {
        "model": "fake",
        "prompt": "hello",
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 64,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    text, num_tokens, num_chunks, buffer = "", 0, 0, ""
    with httpx.stream("POST", f"{url}/v1/completions", json=asked) as reply:
        assert reply.status_code == 200
        for piece in reply.iter_raw(chunk_size=7):
            buffer += piece.decode("ascii")
            while "\n\n" in buffer:
                event, buffer = buffer.split("\n\n", 1)
                data = event.strip().removeprefix("data: ")
                if data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if choices := chunk.get("choices"):
                    text += choices[0].get("text") or ""
                    num_chunks += 1
                elif usage := chunk.get("usage"):
                    num_tokens = usage.get("completion_tokens")
    assert num_tokens == 64
    assert num_chunks > 32
    assert len(text) == 54  # ten times "olleh" and the start token, which has no text, and "olle"
    assert text.startswith("olleholleh")


class Slow(FakeBackend):
    """A token each hundredth of a second, for ever."""

    async def _feed(self, generation: Any) -> None:
        request: Request = generation.collector.request
        while True:
            generation.add(Update(request.request_id, 0, [FIRST_BYTE + ord("x")]))
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_connection_that_is_cut_aborts(path: str) -> None:
    backend = Slow(byte_tokenizer())
    body = {"prompt": "a", "messages": HELLO, "stream": True, "max_tokens": 4000}
    del body["messages" if path == "/v1/completions" else "prompt"]
    with live(backend) as address:
        host, port = address.removeprefix("http://").split(":")
        data = json.dumps(body)
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
            got = b""
            while got.count(b"data: ") < 5:
                got += connection.recv(4096)
            assert backend.num_cancelled == 0
        assert _soon(lambda: backend.num_cancelled == 1)


def _soon(is_so: Any, limit_s: float = 5) -> bool:
    end = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(is_so())
