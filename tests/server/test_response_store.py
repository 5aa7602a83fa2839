"""Responses that are stored: found, gone on from, made in the background, forgotten."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from fastapi import HTTPException
from openai.types.responses import Response

from hex_llm.errors import HexError
from hex_llm.server.openai.response_store import ResponseStore, StoredResponse
from tests.server.fakes import CALLS, HERMES
from tests.server.test_responses import SHOWS_ALL, WEATHER, Asking, asking


@pytest.fixture(scope="module")
def storing() -> Iterator[Asking]:
    with asking("Hi!", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
                enable_response_store=True) as one:  # fmt: skip
        yield one


def test_a_stored_response_is_found_and_gone_on_from(storing: Asking) -> None:
    stored = storing.client.responses
    first = storing.create(instructions="Be brief.", metadata={"a": "b"})
    assert first.store  # type: ignore[attr-defined]
    assert stored.retrieve(first.id) == first
    second = storing.create(input="and?", previous_response_id=first.id)
    assert storing.prompt == "<user>hello<assistant>Hi!<user>and?"  # instructions hold for one response
    assert second.previous_response_id == first.id
    (*_, last) = storing.events(input="so?", previous_response_id=second.id)
    assert storing.prompt == "<user>hello<assistant>Hi!<user>and?<assistant>Hi!<user>so?"
    assert last.type == "response.completed"
    assert stored.retrieve(last.response.id) == last.response
    storing.create(input="else?", previous_response_id=first.id)
    assert storing.prompt == "<user>hello<assistant>Hi!<user>else?"
    stored.delete(first.id)
    for unknown in (first.id, "resp_?", storing.create(store=False).id):
        for look in (stored.retrieve, stored.cancel, stored.delete):
            with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
                look(unknown)  # type: ignore[operator]
        with pytest.raises(openai.NotFoundError):
            storing.create(previous_response_id=unknown)
    with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a synchronous response\."):
        stored.cancel(second.id)


def test_calls_and_reasoning_are_gone_on_from() -> None:
    flags = {"enable_response_store": True, "reasoning_parser": "phi4"}
    with asking("<think>Hm.</think>" + CALLS, SHOWS_ALL + HERMES, **flags) as one:
        before = one.create(tools=[WEATHER])
        answers = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "warm"}
            for item in before.output
            if item.type == "function_call"
        ]
        one.create(input=answers, tools=[WEATHER], previous_response_id=before.id)
        messages = json.loads(one.prompt.partition("|")[0])
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
        assert messages[1]["reasoning_content"] == "Hm."
        assert [call["id"] for call in messages[1]["tool_calls"]] == [one["call_id"] for one in answers]


def wait_for(asked: Asking, response: Response) -> Response:
    while response.status == "queued":
        response = asked.client.responses.retrieve(response.id)
    return response


def test_responses_in_the_background(storing: Asking) -> None:
    stored, backend = storing.client.responses, storing.backend
    queued = storing.create(background=True)
    assert (queued.status, queued.output, queued.background) == ("queued", [], True)
    done = wait_for(storing, queued)
    assert (done.status, done.output_text) == ("completed", "Hi!")
    assert stored.cancel(done.id) == done  # too late
    backend.error = HexError("the engine broke")
    failed = wait_for(storing, storing.create(background=True))
    backend.error = None
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.message == "the engine broke"
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        storing.create(previous_response_id=failed.id)
    backend.hold = asyncio.Event()
    try:
        num_cancelled = backend.num_cancelled
        held = [storing.create(background=True) for _ in range(2)]
        assert stored.cancel(held[0].id).status == "cancelled"
        assert stored.retrieve(held[0].id).status == "cancelled"
        stored.delete(held[1].id)
        assert backend.num_cancelled == num_cancelled + 2
    finally:
        backend.hold = None
    for change in ({"store": False}, {"stream": True}):
        with pytest.raises(openai.BadRequestError) as raised:
            storing.create(background=True, **change)
        assert raised.value.param == "background"


def test_the_oldest_are_forgotten() -> None:
    store, one = ResponseStore(max_stored=3, max_bytes=100), StoredResponse(b"x" * 10)
    for name in "abcd":
        store.put(name, one)
    store.put("b", one)  # again
    store.put("e", StoredResponse(b"x" * 70, b"y" * 20))
    for name in "acd":
        with pytest.raises(HTTPException):
            store.get(name)
    assert store.get("b") is one
    store.put("f", StoredResponse(b"x" * 101))
    with pytest.raises(HTTPException):
        store.get("f")
