"""Anthropic's /v1/messages and /v1/messages/count_tokens: a chat whose reply is a list of blocks, told as a
whole or by events. The chat itself is the OpenAI dialect's.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from hex_llm.config import ServerConfig
from hex_llm.frontend.outputs import Delta
from hex_llm.server.anthropic.schemas import CountRequest, MessagesRequest
from hex_llm.server.common.backend import Backend, answer, begin, served_name, size_of
from hex_llm.server.common.body_route import BodyRoute, checked
from hex_llm.server.common.replies import Problem, Whole, encode, problem_of
from hex_llm.server.common.streams import ReplyStream, StreamDelta, streamed, unless_gone
from hex_llm.server.openai.chat import PreparedChat, prepare
from hex_llm.types import CompletionOutput, RequestOutput

Json = dict[str, Any]

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# The chat's names of what is at fault, and theirs.
THEIR_NAMES = {
    "continue_final_message": "messages",
    "reasoning_effort": "output_config",
    "response_format": "output_config",
    "stop": "stop_sequences",
    "structured_outputs": "output_config",
}


# ---- errors


def error_body(problem: Problem) -> Json:
    kind = KINDS.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
    message, name = problem.message, THEIR_NAMES.get(problem.param or "")
    if name is not None:
        message = f"{name}: {message.removeprefix(f'{problem.param}: ')}"
    return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicRoute(BodyRoute):
    """A route that tells its errors as Anthropic does."""

    error_body = staticmethod(error_body)


class CountRoute(AnthropicRoute):
    needs_room = False


# ---- replies


def event(data: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), encode(data))


class GrowingMessage:
    """One reply while it grows: the events that tell it, and its blocks, whole once they are closed."""

    def __init__(self, backend: Backend, talk: PreparedChat) -> None:
        self.content: list[Json] = []
        self._model = served_name(backend, talk.request)
        self._reader = talk.reader()
        self._num_output = 0
        self._texts: list[str] = []  # of the open block
        self._is_open = False
        self._is_begun = False

    def render(self, news: StreamDelta) -> bytes:
        delta, collector = news.delta, news.generation.collector
        self._num_output += len(delta.token_ids)
        events = list(self.add(delta))
        num_prompt, num_created = len(collector.request.prompt_ids), collector.num_cache_creation
        usage = usage_of(num_prompt, collector.num_cached, num_created, self._num_output)
        if not self._is_begun:
            self._is_begun = True
            # As vLLM's: at first the whole prompt, and at the end what of it was cached.
            message = self.whole(usage_of(num_prompt, 0, 0, 0)) | {"content": []}
            events = [{"type": "message_start", "message": message}, {"type": "ping"}, *events]
        if delta.finish_reason is not None:
            events += [
                {"type": "message_delta", "delta": self.end_of(delta), "usage": usage},
                {"type": "message_stop"},
            ]
        return b"".join(map(event, events))

    def whole(self, usage: Json) -> Json:
        told = {"model": self._model, "content": self.content, "stop_reason": None, "stop_sequence": None}
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            **told,
            "usage": usage,
        }

    def add(self, news: CompletionOutput | Delta) -> Iterator[Json]:
        message = self._reader.add(news.text, ended=news.finish_reason is not None)
        for kind, text in (("thinking", message.get("reasoning")), ("text", message.get("content"))):
            if text:
                yield from self._say(kind, text)
        for call in message.get("tool_calls", ()):
            yield from self._call(call)
        if news.finish_reason is not None:
            yield from self._close()

    def end_of(self, news: CompletionOutput | Delta) -> Json:
        reason = STOP_REASONS.get(str(self._reader.finish_reason(news.finish_reason)), "end_turn")
        sequence = news.stop_reason if isinstance(news.stop_reason, str) else None
        if sequence is not None and reason == "end_turn":
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _say(self, kind: str, text: str) -> Iterator[Json]:
        if not self._is_open or self.content[-1]["type"] != kind:
            # Nothing is signed, but some clients send thinking back only with a signature.
            signature = {"signature": uuid.uuid4().hex} if kind == "thinking" else {}
            yield from self._open({"type": kind, kind: "", **signature})
        yield self._delta(f"{kind}_delta", kind, text)

    def _call(self, call: Json) -> Iterator[Json]:
        function = call["function"]
        yield from self._open({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        yield self._delta("input_json_delta", "partial_json", function["arguments"])
        yield from self._close()

    def _open(self, block: Json) -> Iterator[Json]:
        yield from self._close()
        self.content.append(block)
        self._texts, self._is_open = [], True
        begins = {**block, "signature": ""} if "signature" in block else dict(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": begins}

    def _delta(self, kind: str, name: str, text: str) -> Json:
        self._texts.append(text)
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, name: text}}

    def _close(self) -> Iterator[Json]:
        if not self._is_open:
            return
        self._is_open = False
        block, text = self.content[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = msgspec.Raw(text.encode())
        else:
            block[block["type"]] = text
        if signature := block.get("signature"):
            delta = {"type": "signature_delta", "signature": signature}
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}
        yield {"type": "content_block_stop", "index": self._index}

    @property
    def _index(self) -> int:
        return len(self.content) - 1


def usage_of(num_prompt: int, num_cached: int, num_created: int, num_output: int) -> Json:
    """Anthropic counts what was cached, and what now is, apart from the rest of the prompt."""
    return {
        "input_tokens": num_prompt - num_cached - num_created,
        "cache_creation_input_tokens": num_created,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


def reply_of(growing: GrowingMessage, output: RequestOutput) -> Json:
    [choice] = output.outputs
    for _ in growing.add(choice):
        pass
    num_prompt, num_created = len(output.prompt_token_ids), output.num_cache_creation_tokens
    usage = usage_of(num_prompt, output.num_cached_tokens, num_created, len(choice.token_ids))
    return growing.whole(usage) | growing.end_of(choice)


def routes(backend: Backend, config: ServerConfig) -> APIRouter:
    router = APIRouter(prefix="/v1/messages", route_class=AnthropicRoute)

    async def prepared(request: Request, body: CountRequest, *, only_prompt: bool = False) -> PreparedChat:
        chat = await checked(request, body.chat)
        return await prepare(backend, chat, config, only_prompt=only_prompt)

    @router.post("")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        talk = await prepared(request, body)
        asked = (backend, talk.prompt_ids, talk.request, talk.params)
        growing = GrowingMessage(backend, talk)

        async def whole() -> Whole:
            output = await answer(*asked)
            return Whole(size_of(output), partial(reply_of, growing, output))

        if not body.stream:
            return await unless_gone(request, whole())
        pieces = ReplyStream([begin(*asked)], growing.render)
        return await streamed(request, pieces, broken=lambda error: event(error_body(problem_of(error))))

    async def count_tokens(body: CountRequest, request: Request) -> Json:
        return {"input_tokens": len((await prepared(request, body, only_prompt=True)).prompt_ids)}

    router.add_api_route("/count_tokens", count_tokens, methods=["POST"], route_class_override=CountRoute)
    return router
