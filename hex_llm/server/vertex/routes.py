"""POST /generate: Hex-LLM's predict route, in all the shapes that Google's own samples send; /vertex, TGI's.

The fields of an instance stand in it, in its `parameters`, or in the `parameters` that all instances share,
in snake_case or camelCase. Without `instances` the body is one instance. Each choice is one prediction.
Instances of TGI's kind, with `inputs` or with `messages` that nothing marks, are answered as TGI does: by
their text alone. Both kinds come to every predict route, so a deployment may name any of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from hex_llm.config import ServerConfig
from hex_llm.errors import InvalidRequest
from hex_llm.frontend.beside import shaped
from hex_llm.frontend.outputs import Delta
from hex_llm.server.common.backend import Backend, answer, begin, size_of, together
from hex_llm.server.common.body_route import BodyRoute, checked
from hex_llm.server.common.replies import Whole, encode, problem_of
from hex_llm.server.common.streams import ReplyStream, StreamDelta, refuse_best_of, streamed, unless_gone
from hex_llm.server.openai import logprobs
from hex_llm.server.openai.chat import chat, stream_chat
from hex_llm.server.openai.schemas import ChatRequest
from hex_llm.server.tgi import routes as tgi
from hex_llm.server.tgi import schemas as tgi_schemas
from hex_llm.server.vertex.schemas import (
    Chats,
    GenerateRequest,
    Prompts,
    TgiBody,
    TgiInstances,
    prediction_of,
)
from hex_llm.types import CompletionOutput, RequestOutput


def prediction(
    request: GenerateRequest, one: CompletionOutput, backend: Backend, *, raw: bool
) -> str | list[int]:
    """Without a tokenizer, the ids; else the text, behind its prompt unless `raw`."""
    if backend.tokenizer is None:
        return one.token_ids
    if raw:
        return one.text
    prompt = request.prompt if isinstance(request.prompt, str) else str(request.prompt)
    output = one.text.strip("\n")
    return f"Prompt:\n{prompt.strip()}\nOutput:\n{output}"


async def chats(
    backend: Backend, config: ServerConfig, requests: Sequence[ChatRequest], is_wrapped: bool
) -> Whole:
    backend.check_room(sum(request.params().num_choices for request in requests))
    replies = await together(chat(backend, request, config) for request in requests)

    def make() -> Any:
        made = [reply.make() for reply in replies]
        # One chat is answered by an object, not by a list of one: so do Google's clients read it.
        return {"predictions": made[0] if len(made) == 1 else made} if is_wrapped else made[0]

    return Whole(sum(reply.size for reply in replies), make)


async def generate(backend: Backend, requests: Sequence[GenerateRequest], *, raw: bool) -> Whole:
    params = [request.params() for request in requests]  # all are checked before the first one starts
    backend.check_room(sum(one.num_choices for one in params))
    outputs = await together(answer(backend, r.prompt, r, p) for r, p in zip(requests, params, strict=True))
    return Whole(size_of(*outputs), partial(_reply, backend, requests, outputs, raw))


def _reply(
    backend: Backend, requests: Sequence[GenerateRequest], outputs: Sequence[RequestOutput], raw: bool
) -> dict[str, Any]:
    each = [
        (request, output, choice)
        for request, output in zip(requests, outputs, strict=True)
        for choice in output.outputs
    ]
    reply: dict[str, Any] = {
        "predictions": [
            prediction(request, choice, backend, raw=raw or request.raw_response)
            for request, _, choice in each
        ]
    }
    if any(request.raw_response for request in requests):
        reply["output_token_counts"] = [len(choice.token_ids) for _, _, choice in each]
        reply["cumulative_logprobs"] = [_finite(choice.cumulative_logprob) for _, _, choice in each]
    if any(request.logprobs is not None for request in requests):
        reply["logprobs"] = [_logprobs(backend, *one) for one in each]
    if any(request.prompt_logprobs is not None for request in requests):
        reply["prompt_logprobs"] = [logprobs.of_prompt(output) for _, output, _ in each]
    return reply


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is not None and math.isfinite(logprob) else None


def _logprobs(
    backend: Backend, request: GenerateRequest, output: RequestOutput, choice: CompletionOutput
) -> dict[str, Any] | None:
    """Those that a raw response takes for its sum were not asked for."""
    if request.logprobs is None:
        return None
    skip = request.skip_special_tokens is not False
    return logprobs.of_completion(backend.tokenizer, output, choice, skip_special=skip)


# ---- instances of TGI's kind


async def _generated_text(backend: Backend, request: tgi_schemas.GenerateRequest) -> str:
    reply, _ = await tgi.generate(backend, request, max_tokens=None)
    text: str = (await shaped(*reply))["generated_text"]
    return text


async def _chat_text(backend: Backend, config: ServerConfig, request: ChatRequest) -> str:
    message = (await shaped(*await chat(backend, request, config)))["choices"][0]["message"]
    text: str | None = message["content"]
    return json.dumps(message["tool_calls"]) if text is None else text


async def predict_as_tgi(backend: Backend, config: ServerConfig, instances: TgiInstances) -> Whole:
    backend.check_room(instances.num_sequences)
    texts = await together(
        _chat_text(backend, config, one) if isinstance(one, ChatRequest) else _generated_text(backend, one)
        for one in instances.requests
    )
    return Whole(0, lambda: {"predictions": texts})


# ---- streams


def pieces(backend: Backend, request: GenerateRequest) -> ReplyStream:
    """JSON objects, each with a zero byte behind it, that tell what is new in every choice."""
    params = request.params()
    refuse_best_of(params)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(request, name) is not None:
            raise InvalidRequest.at(name, "not in a stream")
    nothing: str | list[int] = [] if backend.tokenizer is None else ""
    sums = [0.0] * params.n

    def render(news: StreamDelta) -> bytes:
        delta = news.delta
        new = delta.token_ids if backend.tokenizer is None else delta.text
        piece: dict[str, Any] = {"predictions": _at(delta.index, new, nothing, params.n)}
        if request.raw_response:
            sums[delta.index] += _logprob(delta)
            piece["output_token_counts"] = _at(delta.index, len(delta.token_ids), 0, params.n)
            piece["cumulative_logprobs"] = [_finite(one) for one in sums]
        return encode(piece) + b"\0"

    return ReplyStream([begin(backend, request.prompt, request, params)], render)


def _at(index: int, value: Any, elsewhere: Any, num: int) -> list[Any]:
    return [value if i == index else elsewhere for i in range(num)]


def _logprob(delta: Delta) -> float:
    assert delta.logprobs is not None
    return sum(candidates[i].logprob for i, candidates in zip(delta.token_ids, delta.logprobs, strict=True))


# ---- routes


async def respond(backend: Backend, config: ServerConfig, request: Request, body: dict[str, Any]) -> Response:
    match await checked(request, partial(prediction_of, body)):
        case TgiBody(tgi_body):
            return await tgi.in_their_shape(tgi.respond(backend, request, tgi_body))
        case TgiInstances() as instances:
            return await unless_gone(request, predict_as_tgi(backend, config, instances))
        case Chats([first, *_], is_stream=True):
            return await streamed(request, await stream_chat(backend, first, config, usage_at_end=True))
        case Chats(requests, _, is_wrapped):
            return await unless_gone(request, chats(backend, config, requests, is_wrapped))
        case Prompts([first, *_], is_stream=True):
            reply = pieces(backend, first)
            return await streamed(request, reply, broken=broken_piece, media_type="text/plain")
        case Prompts(requests):
            raw = config.predict_output_format == "raw"
            return await unless_gone(request, generate(backend, requests, raw=raw))


def broken_piece(error: Exception) -> bytes:
    return encode(problem_of(error).body()) + b"\0"


class PredictRoute(BodyRoute):
    needs_room = False  # yet: how a refusal is told depends on the body


def routes(backend: Backend, config: ServerConfig) -> APIRouter:
    router = APIRouter(route_class=PredictRoute)

    async def vertex_predict(body: dict[str, Any], request: Request) -> Response:
        return await respond(backend, config, request, body)

    for path in dict.fromkeys(("/generate", config.predict_route or "/generate")):
        router.add_api_route(path, vertex_predict, methods=["POST"])
    router.add_api_route("/vertex", vertex_predict, methods=["POST"], route_class_override=tgi.TgiRoute)
    return router
