"""POST /v1/responses, asked by the `openai` package over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from hex_llm.types import FinishReason, Request, Update
from tests.server.asking import ask, post, refusal
from tests.server.fakes import CALLS, HERMES, FakeBackend, Speaker, byte_tokenizer
from tests.server.live import live

PATH = "/v1/responses"
SHOWS_ALL = "{{ messages | tojson }}|{{ tools | tojson }}|{{ reasoning_effort }}"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": False,
}
TEXT_EVENTS = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
CALL_EVENTS = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


class Asking:
    """A backend that is asked by OpenAI's client."""

    def __init__(self, backend: FakeBackend, address: str) -> None:
        self.backend = backend
        self.client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)

    def create(self, **fields: Any) -> Response:
        return self.client.responses.create(**{"model": "fake", "input": "hello", **fields})

    def events(self, **fields: Any) -> list[ResponseStreamEvent]:
        return list(
            self.client.responses.create(**{"model": "fake", "input": "hello", **fields}, stream=True)
        )

    @property
    def prompt(self) -> str:
        assert self.backend.tokenizer is not None
        return self.backend.tokenizer.decode(self.backend.asked[-1].prompt_ids)


@pytest.fixture(scope="module")
def hi() -> Iterator[Asking]:
    backend = Speaker("Hi, é there!")
    with live(backend) as address:
        yield Asking(backend, address)


@contextmanager
def asking(said: str, template: str, **config: Any) -> Iterator[Asking]:
    backend = Speaker(said, byte_tokenizer(template))
    with live(backend, **config) as address:
        yield Asking(backend, address)


# ---- whole


def test_a_text_is_answered(hi: Asking) -> None:
    response = hi.create(instructions="Be brief.", metadata={"a": "b"}, user="me")
    assert response.output_text == "Hi, é there!"
    assert hi.prompt == "<system>Be brief.<user>hello<assistant>"
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", "fake")
    assert (response.instructions, response.metadata, response.user) == ("Be brief.", {"a": "b"}, "me")
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert response.error is response.incomplete_details is response.previous_response_id is None
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens == len(hi.backend.asked[-1].prompt_ids)
    assert usage.output_tokens == len("Hi, é there!".encode())
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_sampling_reaches_the_engine(hi: Asking) -> None:
    response = hi.create(
        temperature=0.5, top_p=0.25, max_output_tokens=40, extra_body={"top_k": 7, "seed": 3, "stop": ["z"]}
    )
    params = hi.backend.asked[-1].params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 40)
    assert (params.top_k, params.seed, params.stop) == (7, 3, ("z",))
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.25, 40)


def test_what_is_cut_is_incomplete(hi: Asking) -> None:
    response = hi.create(max_output_tokens=2)
    assert (response.status, response.output_text) == ("incomplete", "Hi")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert hi.events(max_output_tokens=2)[-1].type == "response.incomplete"


def test_what_the_model_has_seen_and_said(hi: Asking) -> None:
    extra = {"enable_response_messages": True}
    whole, events = hi.create(extra_body=extra), hi.events(extra_body=extra)
    for response in (whole, events[-1].response):  # type: ignore[union-attr]
        [seen], [said] = response.input_messages, response.output_messages  # type: ignore[union-attr]
        assert seen["tokens"] == hi.backend.asked[-1].prompt_ids
        assert seen["message"] == byte_tokenizer().decode(seen["tokens"], skip_special_tokens=False)
        assert (said["message"], said["type"]) == (response.output_text, "raw_message_tokens")
        assert byte_tokenizer().decode(said["tokens"]) == said["message"]


def test_no_words_are_a_reply_too() -> None:
    reply = post(Speaker(""), PATH, {"input": "x"})
    assert [item["content"][0]["text"] for item in reply["output"]] == [""]


def test_items_of_every_kind_become_messages() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "Qq"]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call", "call_id": "c3", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
        {"role": "user", "content": "So?"},
    ]  # fmt: skip
    backend = FakeBackend(byte_tokenizer(SHOWS_ALL))
    body = {"input": items, "instructions": "First.", "reasoning": {"effort": "low"}, "tools": [WEATHER]}
    post(backend, PATH, {**body, "tool_choice": "none"})
    assert backend.tokenizer is not None
    messages, tools, effort = backend.tokenizer.decode(backend.asked[-1].prompt_ids).split("|")

    def call(call_id: str, name: str, **arguments: int) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert json.loads(messages) == [
        {"role": "system", "content": "First."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q\nq"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [call("c1", "f", a=1), call("c2", "g")],
         "reasoning_content": "Hm."},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
        {"role": "assistant", "content": "", "tool_calls": [call("c3", "g")]},
        {"role": "tool", "content": "", "tool_call_id": "c3"},
        {"role": "user", "content": "So?"},
    ]  # fmt: skip
    assert (tools, effort) == ("null", "low")


class City(BaseModel):
    name: str
    size: int


def test_structured_outputs() -> None:
    with asking('{"name": "Rome", "size": 3}', SHOWS_ALL) as rome:
        parsed = rome.client.responses.parse(model="fake", input="?", text_format=City)
        assert parsed.output_parsed == City(name="Rome", size=3)
        wanted = rome.backend.asked[-1].params.structured_outputs
        assert json.loads(wanted.json)["required"] == ["name", "size"]
        assert parsed.text is not None
        assert parsed.text.format is not None
        assert parsed.text.format.type == "json_schema"
        rome.create(text={"format": {"type": "json_object"}})
        assert rome.backend.asked[-1].params.structured_outputs.json_object


def test_log_probabilities(backend: FakeBackend) -> None:
    body = {
        "input": "abc",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "max_output_tokens": 3,
    }
    (part,) = post(backend, PATH, body)["output"][0]["content"]
    assert [one["token"] for one in part["logprobs"]] == [">", "t", "n"]
    assert len(part["logprobs"][0]["top_logprobs"]) == 2
    with live(backend) as address:
        events = Asking(backend, address).events(**body)
    told = [
        one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs
    ]
    assert told == [">", "t", "n"]


# ---- events


def kinds(events: Iterable[ResponseStreamEvent]) -> list[str]:
    """Without repeats: there are many deltas."""
    found: list[str] = []
    for event in events:
        kind = event.type.removeprefix("response.")
        if not found or found[-1] != kind:
            found.append(kind)
    return found


def check_numbers(events: list[ResponseStreamEvent]) -> None:
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_events_of_a_text(hi: Asking) -> None:
    events = hi.events(metadata={"a": "b"})
    assert kinds(events) == ["created", "in_progress", *TEXT_EVENTS, "completed"]
    check_numbers(events)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Hi, é there!"
    assert len(deltas) > 5
    first, last = events[0], events[-1]
    assert first.type == "response.created"
    assert last.type == "response.completed"
    assert (first.response.status, first.response.output, first.response.usage) == ("in_progress", [], None)
    assert first.response.id == last.response.id
    whole = hi.create(metadata={"a": "b"})
    for response in (last.response, whole):
        response.id, response.created_at, response.output[0].id = "", 0.0, ""
    assert last.response == whole


def test_the_clients_own_stream(hi: Asking) -> None:
    with hi.client.responses.stream(model="fake", input="hello") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == "Hi, é there!"


def test_a_stream_that_breaks_tells_why() -> None:
    class Breaking(Speaker):
        def updates(self, request: Request) -> Iterable[Update]:
            yield from list(super().updates(request))[:3]
            yield Update(request.request_id, 0, finish_reason=FinishReason.ERROR, error="it broke")

    with live(Breaking("Hi there")) as address:
        events = Asking(FakeBackend(), address).events()
    check_numbers(events)
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "it broke")


def test_a_client_that_leaves_ends_its_request() -> None:
    backend = Speaker("x" * 2000)
    with live(backend) as address:
        stream = Asking(backend, address).client.responses.create(model="", input="?", stream=True)
        next(iter(stream))
        stream.close()
    assert backend.num_cancelled == 1


# ---- tools and reasoning


def check_calls(response: Response) -> None:
    message, rome, bonn = response.output
    assert message.type == "message"
    assert response.output_text == "Let me see."
    assert rome.type == bonn.type == "function_call"
    assert (rome.name, rome.arguments, rome.status) == ("weather", '{"place": "Röm"}', "completed")
    assert bonn.arguments == '{"place": "Bonn"}'
    assert rome.call_id != bonn.call_id
    assert response.status == "completed"


def test_tools_are_called_and_answered() -> None:
    with asking(CALLS, HERMES) as hermes:
        response = hermes.create(tools=[WEATHER])
        check_calls(response)
        assert response.tools[0].name == "weather"  # type: ignore[union-attr]
        answers = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "warm"}
            for item in response.output
            if item.type == "function_call"
        ]
        hermes.create(input=[{"role": "user", "content": "?"}, *response.output, *answers], tools=[WEATHER])
        assert hermes.prompt == "<user>?<assistant>Let me see.<tool>warm<tool>warm"


def test_events_of_calls() -> None:
    with asking(CALLS, HERMES) as hermes:
        events = hermes.events(tools=[WEATHER])
    assert kinds(events) == ["created", "in_progress", *TEXT_EVENTS, *CALL_EVENTS, *CALL_EVENTS, "completed"]
    check_numbers(events)
    last = events[-1]
    assert last.type == "response.completed"
    check_calls(last.response)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"place": "Röm"}{"place": "Bonn"}'


def test_a_call_can_be_forced() -> None:
    with asking('{"place": "Rome"}', HERMES) as backend:
        response = backend.create(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"place": "Rome"}
    wanted = backend.backend.asked[-1].params.structured_outputs
    assert json.loads(wanted.json) == WEATHER["parameters"]


def test_reasoning_is_an_item() -> None:
    with asking("<think>Hm, well.</think>Yes.", HERMES, reasoning_parser="phi4") as thinker:
        response, events = thinker.create(), thinker.events()
    last = events[-1]
    assert last.type == "response.completed"
    for one in (response, last.response):
        reasoning, message = one.output
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert [part.text for part in reasoning.content] == ["Hm, well."]
        assert (message.type, one.output_text) == ("message", "Yes.")
        assert one.usage is not None
        assert one.usage.output_tokens_details.reasoning_tokens == len("Hm, well.")
    thinking = [kind.replace("output_text", "reasoning_text") for kind in TEXT_EVENTS]
    assert kinds(events) == ["created", "in_progress", *thinking, *TEXT_EVENTS, "completed"]


# ---- refusals

IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
REFUSED = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "fly"}}, "tool_choice"),
    ({"input": []}, "input"),
    ({"input": [IMAGE]}, "input"),
    ({"input": [{"type": "computer_call"}]}, "input"),
    ({"input": ["x"]}, "input"),
    ({"input": 3}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 1}]}, "input"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "x"}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"text": {"format": {"type": "grammar"}}}, "text"),
    ({"text": {"verbosity": "high"}}, "text"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning"),
    ({"reasoning": {"effort": "huge"}}, "reasoning"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"messages": []}, "messages"),
    ({"moderation": {"model": "x"}}, "moderation"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("change", "param"), REFUSED)
def test_refusals_name_the_field(
    backend: FakeBackend, change: dict[str, Any], param: str, stream: bool
) -> None:
    body = {"input": "hello", "stream": stream, **change}
    error = refusal(ask(backend, "POST", PATH, json=body))
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert not backend.asked


def test_values_that_change_nothing_are_taken(backend: FakeBackend) -> None:
    body = {
        "input": "hello", "store": False, "previous_response_id": None, "background": False, "tools": [],
        "truncation": "disabled", "service_tier": "auto", "text": {"format": {"type": "text"}}, "include": [],
        "reasoning": None, "prompt_cache_key": "k", "stream_options": {"include_obfuscation": False},
        "parallel_tool_calls": False, "tool_choice": "auto", "max_output_tokens": None,
    }  # fmt: skip
    assert post(backend, PATH, body)["status"] == "completed"


def test_without_a_tokenizer_there_are_none() -> None:
    assert refusal(ask(FakeBackend(), "POST", PATH, json={"input": "x"}))["param"] == "input"


def test_nothing_is_stored(hi: Asking) -> None:
    known = hi.create().id
    stored = hi.client.responses
    for look in (stored.retrieve, stored.cancel, stored.delete):
        with pytest.raises(openai.NotFoundError, match="--enable_response_store"):
            look(known)  # type: ignore[operator]
