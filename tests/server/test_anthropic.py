"""POST /v1/messages, asked by the `anthropic` package over real HTTP; and what Claude Code sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message

from hex_llm.errors import EngineStopped, QueueFull
from hex_llm.types import FinishReason, Request, Update
from tests.server.asking import ask, post
from tests.server.fakes import CALLS, FIRST_BYTE, HERMES, FakeBackend, Speaker, byte_tokenizer
from tests.server.live import live

PATH = "/v1/messages"
SHOWS_ALL = "{{ messages | tojson }}|{{ tools | tojson }}|{{ enable_thinking }}|{{ reasoning_effort }}"
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "of a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
HELLO: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 1000,
    "messages": [{"role": "user", "content": "hello"}],
}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


class Asking:
    def __init__(self, backend: FakeBackend, address: str) -> None:
        self.backend = backend
        self.address = address
        self.client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)

    def create(self, **fields: Any) -> Message:
        return self.client.messages.create(**{**HELLO, **fields})

    def events(self, **fields: Any) -> list[Any]:
        return list(self.client.messages.create(**{**HELLO, **fields}, stream=True))

    def count(self, **fields: Any) -> int:
        body = {k: v for k, v in HELLO.items() if k != "max_tokens"}
        return self.client.messages.count_tokens(**{**body, **fields}).input_tokens

    @property
    def prompt(self) -> str:
        assert self.backend.tokenizer is not None
        return self.backend.tokenizer.decode(self.backend.asked[-1].prompt_ids)

    @property
    def rendered(self) -> list[Any]:
        """The template's variables, of SHOWS_ALL."""
        messages, tools, *others = self.prompt.split("|")
        return [json.loads(messages), json.loads(tools), *others]


@contextmanager
def asking(said: str, template: str, **config: Any) -> Iterator[Asking]:
    backend = Speaker(said, byte_tokenizer(template))
    with live(backend, **config) as address:
        yield Asking(backend, address)


@pytest.fixture(scope="module")
def hi() -> Iterator[Asking]:
    backend = Speaker("Hi, é there!")
    with live(backend) as address:
        yield Asking(backend, address)


@pytest.fixture(scope="module")
def shown() -> Iterator[Asking]:
    with asking("ok", SHOWS_ALL, tool_call_parser="hermes") as one:
        yield one


@pytest.fixture(scope="module")
def calls() -> Iterator[Asking]:
    with asking(CALLS, HERMES) as one:
        yield one


# ---- texts


def test_a_text_is_answered(hi: Asking) -> None:
    message = hi.create(system="Be brief.")
    assert hi.prompt == "<system>Be brief.<user>hello<assistant>"
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    (block,) = message.content
    assert (block.type, block.text) == ("text", "Hi, é there!")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len("Hi, é there!".encode())
    prompt_ids = hi.backend.asked[-1].prompt_ids
    assert message.usage.input_tokens == len(prompt_ids) == hi.count(system="Be brief.")


def test_sampling_reaches_the_engine(hi: Asking) -> None:
    more = {"temperature": 0.5, "top_p": 0.25, "top_k": 7}
    message = hi.create(max_tokens=40, stop_sequences=["the", "z"], extra_body=more)
    params = hi.backend.asked[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 7)
    assert (params.max_tokens, params.stop) == (40, ("the", "z"))
    assert message.content[0].text == "Hi, é "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "the")
    assert hi.create(max_tokens=2).stop_reason == "max_tokens"


def test_events_are_those_of_the_protocol(hi: Asking) -> None:
    start, opened, *deltas, closed, delta, stop = hi.events()
    assert start.type == "message_start"
    assert (start.message.content, start.message.stop_reason) == ([], None)
    assert start.message.usage.input_tokens == len(hi.backend.asked[-1].prompt_ids)
    assert (opened.type, opened.index) == ("content_block_start", 0)
    assert (opened.content_block.type, opened.content_block.text) == ("text", "")
    assert {(one.type, one.index, one.delta.type) for one in deltas} == {
        ("content_block_delta", 0, "text_delta")
    }
    assert "".join(one.delta.text for one in deltas) == "Hi, é there!"
    assert len(deltas) > 1
    assert (closed.type, closed.index) == ("content_block_stop", 0)
    assert (delta.type, delta.delta.stop_reason) == ("message_delta", "end_turn")
    assert delta.usage.output_tokens == len("Hi, é there!".encode())
    assert stop.type == "message_stop"


def test_events_have_names(hi: Asking) -> None:
    reply = httpx.post(f"{hi.address}{PATH}", json={**HELLO, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    told = [one.split("\n") for one in reply.text.removesuffix("\n\n").split("\n\n")]
    assert "event: ping" in [name for name, _ in told]
    for name, data in told:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_the_clients_own_stream(hi: Asking) -> None:
    with hi.client.messages.stream(**HELLO) as stream:
        assert "".join(stream.text_stream) == "Hi, é there!"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.input_tokens == len(hi.backend.asked[-1].prompt_ids)


def test_async(hi: Asking) -> None:
    async def run() -> None:
        async with anthropic.AsyncAnthropic(base_url=hi.address, api_key="none") as client:
            whole = await client.messages.create(**HELLO)
            async with client.messages.stream(**HELLO) as stream:
                streamed = await stream.get_final_message()
        assert whole.content[0].text == streamed.content[0].text == "Hi, é there!"

    asyncio.run(run())


def test_an_assistants_last_message_is_continued(hi: Asking) -> None:
    hi.create(messages=[*HELLO["messages"], {"role": "assistant", "content": "It is"}])
    assert hi.prompt == "<user>hello<assistant>It is"


def test_an_empty_answer_has_no_blocks() -> None:
    backend = Speaker("")
    assert post(backend, PATH, HELLO)["content"] == []


class Cached(FakeBackend):
    def updates(self, request: Request) -> Iterable[Update]:
        yield Update(request.request_id, token_ids=[FIRST_BYTE + 65], num_cached=4, num_published=10)
        yield Update(request.request_id, finish_reason=FinishReason.STOP)


def test_cached_tokens_are_counted_apart() -> None:
    backend = Cached(byte_tokenizer())
    usage = post(backend, PATH, HELLO)["usage"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (4, 6)
    assert usage["input_tokens"] == len(backend.asked[-1].prompt_ids) - 10


# ---- tools


def test_calls(calls: Asking) -> None:
    message = calls.create(tools=[WEATHER])
    assert message.stop_reason == "tool_use"
    text, *called = message.content
    assert text.text == "Let me see."
    assert [(one.type, one.name, one.input) for one in called] == [
        ("tool_use", "weather", {"place": "Röm"}),
        ("tool_use", "weather", {"place": "Bonn"}),
    ]
    assert called[0].id != called[1].id


def test_calls_in_events(calls: Asking) -> None:
    with calls.client.messages.stream(**HELLO, tools=[WEATHER]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    whole = calls.create(tools=[WEATHER])
    assert [one.to_dict() | {"id": ""} for one in final.content] == [
        one.to_dict() | {"id": ""} for one in whole.content
    ]
    assert final.stop_reason == "tool_use"
    starts = [e for e in calls.events(tools=[WEATHER]) if e.type == "content_block_start"]
    assert [(e.index, e.content_block.type) for e in starts] == [
        (0, "text"),
        (1, "tool_use"),
        (2, "tool_use"),
    ]
    assert starts[1].content_block.input == {}


def test_one_call_only(calls: Asking) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(calls.create(tools=[WEATHER], tool_choice=choice).content) == 2  # a text and a call


def test_a_call_that_is_cut_off_is_not_told(calls: Asking) -> None:
    at = CALLS.index("Röm")
    message = calls.create(tools=[WEATHER], max_tokens=at)
    assert [(one.type, one.text) for one in message.content] == [("text", CALLS[:at])]  # type: ignore[union-attr]
    assert message.stop_reason == "max_tokens"
    with calls.client.messages.stream(**{**HELLO, "max_tokens": at}, tools=[WEATHER]) as stream:
        assert [one.to_dict() for one in stream.get_final_message().content] == [
            one.to_dict() for one in message.content
        ]


def test_tools_and_results_reach_the_template(shown: Asking) -> None:
    asked = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"place": "Rom"}, **EPHEMERAL}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", **EPHEMERAL}
    shown.create(
        tools=[{**WEATHER, **EPHEMERAL}],
        messages=[
            *HELLO["messages"],
            {"role": "assistant", "content": [thought, {"type": "text", "text": "Let me see."}, asked]},
            {
                "role": "user",
                "content": [
                    {**result, "content": [{"type": "text", "text": "12 °C"}], "is_error": False},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )
    messages, tools, *_ = shown.rendered
    call = {"name": "weather", "arguments": {"place": "Rom"}}
    assert messages == [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": call}],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "12 °C", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "weather", "description": "of a place", "parameters": WEATHER["input_schema"]}
    assert tools == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("choice", "said", "called"),
    [
        ({"type": "any"}, '[{"name": "weather", "parameters": {"place": "Rom"}}]', {"place": "Rom"}),
        ({"type": "tool", "name": "weather"}, '{"place": "Rom"}', {"place": "Rom"}),
        ({"type": "none"}, '{"place": "Rom"}', None),
    ],
)
def test_tool_choice(choice: dict[str, Any], said: str, called: Any) -> None:
    backend = Speaker(said, byte_tokenizer(SHOWS_ALL))
    reply = post(backend, PATH, {**HELLO, "tools": [WEATHER], "tool_choice": choice})
    assert reply["content"][0].get("input") == called
    assert (backend.asked[-1].params.structured_outputs is None) == (called is None)


# ---- thinking


def test_thinking() -> None:
    with asking("<think>\nHm.\n</think>\n\nYes.", SHOWS_ALL, reasoning_parser="deepseek_r1") as one:
        message = one.create(thinking={"type": "enabled", "budget_tokens": 1024})
        assert one.rendered[2] == "True"
        thinking, text = message.content
        assert (thinking.type, thinking.thinking.strip(), text.text) == ("thinking", "Hm.", "Yes.")
        assert thinking.signature
        kinds = [e.delta.type for e in one.events() if e.type == "content_block_delta"]
        assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta"]
        assert one.rendered[2] == ""
        with one.client.messages.stream(**HELLO) as stream:
            assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]
        off = one.create(thinking={"type": "disabled"})
        assert [block.type for block in off.content] == ["text"]
        assert one.rendered[2] == "False"


def test_output_config(shown: Asking) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    shown.create(output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
    assert shown.rendered[3] == "low"
    wanted = shown.backend.asked[-1].params.structured_outputs
    assert wanted is not None
    assert json.loads(wanted.json or "") == schema


# ---- Claude Code


def test_what_claude_code_sends() -> None:
    """Long system blocks, many tools, betas and fields that no document names."""
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=8a1f2;"},
        {"type": "text", "text": "You are Claude Code.", **EPHEMERAL},
        {"type": "text", "text": "Be careful. " * 200, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    schema = {**WEATHER["input_schema"], "$schema": "https://json-schema.org/draft/2020-12/schema"}
    tools = [
        {**WEATHER, "name": f"tool_{i}", "input_schema": schema, "eager_input_streaming": True}
        for i in range(40)
    ]
    reminder = {"type": "text", "text": "<system-reminder>…</system-reminder>"}
    body = {
        "model": "claude-sonnet-4-5-20250929",
        "max_tokens": 60,
        "system": blocks,
        "tools": tools,
        "messages": [{"role": "user", "content": [reminder, {"type": "text", "text": "hi", **EPHEMERAL}]}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "temperature": 1,
        "stream": True,
        "diagnostics": {"previous_message_id": None},
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "x-app": "cli",
        "x-api-key": "none",
    }
    backend = Speaker("ok", byte_tokenizer("{{ messages | tojson }}|{{ tools | length }}"))
    asked = {"headers": headers, "config": {"tool_call_parser": "hermes"}}
    reply = ask(backend, "POST", f"{PATH}?beta=true", json=body, **asked)
    assert reply.status_code == 200, reply.text
    assert "message_stop" in reply.text
    messages, num_tools = Asking(backend, "http://none").rendered
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("You are Claude Code.\nBe careful.")
    assert messages[1]["content"].endswith("hi")
    assert num_tools == 40
    count = {name: body[name] for name in ("model", "system", "tools", "messages", "thinking")}
    count["system"] = [*blocks, {"type": "text", "text": "Be careful. " * 2000}]
    counted = post(backend, f"{PATH}/count_tokens?beta=true", count, **asked)
    assert counted["input_tokens"] > 24_000


def test_betas(hi: Asking) -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    message = hi.client.beta.messages.create(
        **HELLO, betas=["context-management-2025-06-27"], context_management=edits
    )
    assert message.content[0].text == "Hi, é there!"


# ---- faults


def refusal(reply: httpx.Response, status: int = 400) -> dict[str, str]:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert list(body) == ["type", "error"]
    assert body["type"] == "error"
    assert list(body["error"]) == ["type", "message"]
    return body["error"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "1"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences: must be a text"),
        ({"system": 1}, "system"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "image is not taken",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "must be text, thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER]}, "tools"),  # the template knows none
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "4096"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(backend: FakeBackend, changes: dict[str, Any], message: str, stream: bool) -> None:
    error = refusal(ask(backend, "POST", PATH, json={**HELLO, **changes, "stream": stream}))
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert not backend.asked


def test_bodies_that_are_none(backend: FakeBackend) -> None:
    headers = {"content-type": "application/json"}
    for path in (PATH, f"{PATH}/count_tokens"):
        for content in (b"", b"{", b"[]", b'"\\ud800"', b"{" * 40_000):
            refusal(ask(backend, "POST", path, content=content, headers=headers))


def test_errors_of_the_server_have_the_same_shape(backend: FakeBackend) -> None:
    reply = ask(backend, "GET", PATH)
    refusal(reply, 405)
    backend.error = QueueFull("full")
    assert refusal(ask(backend, "POST", PATH, json=HELLO), 429)["type"] == "rate_limit_error"
    backend.error = EngineStopped("gone")
    assert refusal(ask(backend, "POST", PATH, json=HELLO), 503)["type"] == "overloaded_error"
    backend.error = RuntimeError("a secret")
    error = refusal(ask(backend, "POST", PATH, json=HELLO), 500)
    assert error["type"] == "api_error"
    assert "secret" not in error["message"]
    too_large = ask(backend, "POST", PATH, json=HELLO, config={"max_request_bytes": 10})
    assert refusal(too_large, 413)["type"] == "request_too_large"
    loading = FakeBackend(byte_tokenizer(), ready=False)
    assert refusal(ask(loading, "POST", PATH, json=HELLO), 503)["type"] == "overloaded_error"


def test_the_key_by_either_name(backend: FakeBackend) -> None:
    def status(headers: dict[str, str]) -> int:
        return ask(backend, "POST", PATH, json=HELLO, headers=headers, config={"api_key": "k"}).status_code

    assert status({"x-api-key": "k"}) == status({"authorization": "Bearer k"}) == 200
    assert status({"x-api-key": "k", "authorization": "Bearer other"}) == 200
    for headers in ({}, {"x-api-key": ""}, {"x-api-key": "l"}, {"authorization": "k"}):
        assert status(headers) == 401
    reply = ask(backend, "POST", PATH, json=HELLO, config={"api_key": "k"})
    assert refusal(reply, 401)["type"] == "authentication_error"


class Failing(FakeBackend):
    def updates(self, request: Request) -> Iterable[Update]:
        yield Update(request.request_id, token_ids=[FIRST_BYTE + 65])
        yield Update(request.request_id, finish_reason=FinishReason.ERROR, error="the engine broke")


def test_a_stream_that_breaks_ends_with_an_error() -> None:
    with live(Failing(byte_tokenizer())) as address:
        one = Asking(Failing(byte_tokenizer()), address)
        with pytest.raises(anthropic.APIStatusError) as raised:
            one.events()
        assert raised.value.body["error"]["type"] == "api_error"  # type: ignore[index]
        with pytest.raises(anthropic.InternalServerError):
            one.create()


def test_the_clients_errors(hi: Asking) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        hi.create(max_tokens=0)
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image is not taken"):
        hi.count(messages=[{"role": "user", "content": [image]}])
