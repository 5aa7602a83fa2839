"""OpenAI's /v1/responses: a chat whose reply is a list of items, told as a whole or by events.

The chat itself is chat.py's. Unless there is a store, what was answered is not known any more.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response

from hex_llm.config import ServerConfig
from hex_llm.errors import InvalidRequest
from hex_llm.frontend.beside import read, shaped
from hex_llm.frontend.outputs import Delta, raise_failure
from hex_llm.server.common.backend import Backend, answer, begin, served_name, size_of
from hex_llm.server.common.body_route import BodyRoute
from hex_llm.server.common.replies import Encoded, Listed, Whole, encode, problem_of
from hex_llm.server.common.streams import Pieces, Silence, delta_size, streamed, unless_gone
from hex_llm.server.openai.chat import PreparedChat, prepare
from hex_llm.server.openai.replies import Fields
from hex_llm.server.openai.response_store import ResponseStore, StoredResponse
from hex_llm.server.openai.responses_schemas import Message, ResponsesRequest, add_output
from hex_llm.types import CompletionOutput, FinishReason, RequestOutput

PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
ENDS = {FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete"}
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
# The chat's names of what is at fault, and ours.
OUR_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
    "structured_outputs": "text",
}


async def respond(backend: Backend, talk: PreparedChat, growing: Growing) -> Whole:
    output = await answer(backend, talk.prompt_ids, talk.request, talk.params)
    size = size_of(output)
    await shaped(size, partial(growing.add, output.outputs[0]))
    await growing.count(output)
    await shaped(size, partial(growing.end, output))
    await growing.keep(size)
    return Whole(size, lambda: growing.response)


def begin_in_background(backend: Backend, talk: PreparedChat, growing: Growing) -> bytes:
    """What is known of it now. As in vLLM it is queued until it has ended."""

    async def work() -> None:
        try:
            await respond(backend, talk, growing)
        except asyncio.CancelledError:
            growing.response["status"] = "cancelled"
            await growing.keep()
        except Exception as error:
            growing.fail(error)
            await growing.keep()

    assert growing.store is not None
    growing.response["background"] = True
    queued = encode({**growing.response, "status": "queued"})
    growing.task = asyncio.create_task(work())
    growing.store.put(growing.response["id"], StoredResponse(queued, task=growing.task))
    return queued


async def events_of(backend: Backend, talk: PreparedChat, growing: Growing) -> Pieces:
    silence = Silence()
    async with begin(backend, talk.prompt_ids, talk.request, talk.params) as generation:
        async for delta in generation:
            raise_failure(delta)
            if events := silence.filled(await shaped(delta_size(delta), partial(growing.add, delta))):
                yield events
            if delta.finish_reason is not None:
                output = generation.output()
                await growing.count(output)
                last = await shaped(size_of(output), partial(growing.end, output))
                await growing.keep(size_of(output))
                yield last


def in_our_names(error: Exception, request: ResponsesRequest) -> Exception:
    """What the chat finds at fault, by the name that the client has sent it under."""
    if not isinstance(error, InvalidRequest) or error.param in request.model_fields_set:
        return error
    ours = OUR_NAMES.get(error.param or "")
    return InvalidRequest.at(ours, str(error).removeprefix(f"{error.param}: ")) if ours else error


class Growing:
    """One response while it grows: the events that tell it, and at last the whole."""

    def __init__(
        self,
        backend: Backend,
        request: ResponsesRequest,
        talk: PreparedChat,
        store: ResponseStore | None,
        conversation: list[Message],
    ) -> None:
        """To be kept in `store`, if any, with the conversation that it goes on with."""
        self.store, self._conversation = store, conversation
        self.task: asyncio.Task[None] | None = None  # that makes it, if nobody waits for it
        self.response = _head(backend, request, talk) | {"store": store is not None}
        self._request = request
        self._talk = talk
        self._reader = talk.reader()
        self._reasoning: list[str] = []
        self._num_events = 0
        self._item: Fields | None = None  # that is open
        self._texts: list[str] = []  # of the open item
        # JSON, for it is told several times:
        self._logprobs: list[msgspec.Raw] = []  # of the open item
        self._new_logprobs: list[msgspec.Raw] = []  # not told yet

    def add(self, news: CompletionOutput | Delta) -> bytes:
        events: list[bytes] = []
        if self._num_events == 0:
            events += [self._event(kind, response=self.response) for kind in ("created", "in_progress")]
        if (logprobs := self._talk.logprobs(news)) is not None:
            self._new_logprobs += [msgspec.Raw(encode(one)) for one in logprobs["content"].items]
        message = self._reader.add(news.text, ended=news.finish_reason is not None)
        if "reasoning" in message:
            self._reasoning.append(message["reasoning"])
            events += self._say("reasoning", message["reasoning"])
        if "content" in message:
            events += self._say("message", message["content"])
        for call in message.get("tool_calls", ()):
            events += self._call(call)
        return b"".join(events)

    def end(self, output: RequestOutput) -> bytes:
        """After `count`."""
        choice = output.outputs[0]
        assert choice.finish_reason is not None
        status = ENDS.get(choice.finish_reason, "cancelled")
        last = "completed" if status == "completed" else "incomplete"
        events = list(self._close(last))
        if not self.response["output"]:  # a reply without words is one
            events += [*self._open("message"), *self._close("completed")]
        self.response["status"] = status
        if self._request.enable_response_messages:
            raw = self._talk.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
            self.response["input_messages"] = [_raw_message(raw, output.prompt_token_ids)]
            self.response["output_messages"] = [_raw_message(choice.text, choice.token_ids)]
        if choice.finish_reason is FinishReason.LENGTH:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return b"".join([*events, self._event(last, response=self.response)])

    def fail(self, error: Exception) -> bytes:
        problem = problem_of(in_our_names(error, self._request))
        code = ERROR_CODES.get(problem.status, "server_error")
        self.response |= {"status": "failed", "error": {"code": code, "message": problem.message}}
        return self._event("failed", response=self.response)

    async def keep(self, size: int = 0) -> None:
        """Once it has ended, however."""
        if self.store is not None:
            self.store.put(self.response["id"], await shaped(size, self._stored))

    def _stored(self) -> StoredResponse:
        if has_ended := self.response["status"] in ENDS.values():
            add_output(self.response["output"], self._conversation)
        conversation = encode(self._conversation) if has_ended else b""
        return StoredResponse(encode(self.response), conversation, self.task)

    # ---- items

    def _say(self, kind: str, text: str) -> Iterator[bytes]:
        if self._item is None or self._item["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind)
        logprobs: Fields = {"logprobs": Listed(self._new_logprobs)} if kind == "message" else {}
        yield self._event(f"{PARTS[kind]}.delta", **self._where(), content_index=0, delta=text, **logprobs)
        self._texts.append(text)
        self._logprobs += self._new_logprobs
        self._new_logprobs = []

    def _call(self, call: Fields) -> Iterator[bytes]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        yield from self._close("completed")
        yield from self._open("function_call", call_id=call["id"], name=name, arguments="")
        self._texts.append(arguments)
        yield self._event("function_call_arguments.delta", **self._where(), delta=arguments)
        yield from self._close("completed")

    def _open(self, kind: str, **fields: Any) -> Iterator[bytes]:
        if kind == "message":
            fields = {"role": "assistant", "content": []}
        elif kind == "reasoning":
            fields = {"summary": [], "content": []}
        self._item = {"id": new_id(PREFIXES[kind]), "type": kind, "status": "in_progress", **fields}
        self.response["output"].append(self._item)
        self._texts, self._logprobs = [], []
        yield self._event("output_item.added", output_index=self._where()["output_index"], item=self._item)
        if kind in PARTS:
            yield self._event("content_part.added", **self._where(), content_index=0, part=self._part())

    def _close(self, status: str) -> Iterator[bytes]:
        item = self._item
        if item is None:
            return
        text, where = "".join(self._texts), self._where()
        if item["type"] in PARTS:
            self._logprobs += self._new_logprobs
            kind, part = PARTS[item["type"]], self._part()
            item["content"] = [part]
            logprobs: Fields = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._event(f"{kind}.done", **where, content_index=0, text=text, **logprobs)
            yield self._event("content_part.done", **where, content_index=0, part=part)
        else:
            item["arguments"] = text
            yield self._event("function_call_arguments.done", **where, name=item["name"], arguments=text)
        item["status"] = status
        self._item, self._new_logprobs = None, []
        yield self._event("output_item.done", output_index=where["output_index"], item=item)

    def _part(self) -> Fields:
        assert self._item is not None
        text = {"type": PARTS[self._item["type"]], "text": "".join(self._texts)}
        more = {"annotations": [], "logprobs": Listed(self._logprobs)}
        return text | more if self._item["type"] == "message" else text

    def _where(self) -> Fields:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.response["output"]) - 1}

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Encoded at once: what it tells will grow."""
        name = f"response.{kind}"
        data = encode({"type": name, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)

    async def count(self, output: RequestOutput) -> None:
        """Notes the usage."""
        num_prompt, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        num_thought = 0
        if reasoning := "".join(self._reasoning):  # counted without its tags
            to_ids = partial(self._talk.tokenizer.encode, reasoning, add_special_tokens=False)
            num_thought = len(await read(len(reasoning), to_ids))
        cached, written = output.num_cached_tokens, output.num_cache_creation_tokens
        self.response["usage"] = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": min(num_thought, num_output)},
            "total_tokens": num_prompt + num_output,
        }


def _head(backend: Backend, request: ResponsesRequest, talk: PreparedChat) -> Fields:
    """What a response tells of its request, and of itself before it has begun."""
    text_format = request.text.format
    written = (
        {"type": "text"} if text_format is None else text_format.model_dump(by_alias=True, exclude_unset=True)
    )
    return {
        "id": f"resp_{request.request_id}" if request.request_id else new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata,
        "model": served_name(backend, talk.request),
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": request.reasoning.effort, "summary": None},
        "service_tier": "default",
        "temperature": talk.params.temperature,
        "text": {"format": written},
        "tool_choice": request.model_dump(include={"tool_choice"})["tool_choice"],
        "tools": [tool.model_dump() for tool in request.tools],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": talk.params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user or None,
    }


def _raw_message(text: str, token_ids: list[int]) -> Fields:
    """vLLM's, for who looks at what the model has seen and said."""
    return {"type": "raw_message_tokens", "message": text, "tokens": Listed(token_ids)}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


# ---- routes


class StoredRoute(BodyRoute):
    needs_room = False


async def retrieve(store: ResponseStore, response_id: str) -> bytes:
    return store.get(response_id).body


async def cancel(store: ResponseStore, response_id: str) -> bytes:
    stored = store.get(response_id)
    if stored.task is None:
        raise InvalidRequest("Cannot cancel a synchronous response.", "response_id")
    await stored.stop()
    return store.get(response_id).body


async def delete(store: ResponseStore, response_id: str) -> bytes:
    await store.get(response_id).stop()
    store.remove(response_id)
    return encode({"id": response_id, "object": "response.deleted", "deleted": True})


def routes(backend: Backend, config: ServerConfig) -> APIRouter:
    router = APIRouter(prefix="/v1/responses", route_class=BodyRoute)
    store = ResponseStore() if config.enable_response_store else None

    @router.post("")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        body.check_store(store is not None)
        try:
            known = body.previous_response_id
            conversation = store.conversation(known) if store is not None and known else []
            body.add_input(conversation)
            talk = await prepare(backend, body.chat(conversation), config)
            kept_in = None if body.store is False else store
            growing = Growing(backend, body, talk, kept_in, conversation)
            if body.background:
                return Encoded(begin_in_background(backend, talk, growing))
            if body.stream:
                return await streamed(request, events_of(backend, talk, growing), broken=growing.fail)
            return await unless_gone(request, respond(backend, talk, growing))
        except InvalidRequest as error:
            raise in_our_names(error, body) from None

    def add(path: str, method: str, look: Callable[[ResponseStore, str], Awaitable[bytes]]) -> None:
        async def stored_response(response_id: str) -> Response:
            if store is None:
                raise HTTPException(404, "responses are not stored here (--enable_response_store)")
            return Encoded(await look(store, response_id))

        options: dict[str, Any] = {"methods": [method], "route_class_override": StoredRoute}
        router.add_api_route("/{response_id}" + path, stored_response, name=look.__name__, **options)

    add("", "GET", retrieve)
    add("", "DELETE", delete)
    add("/cancel", "POST", cancel)
    return router
