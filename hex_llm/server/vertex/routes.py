"""POST /generate: Hex-LLM's predict route, in all the shapes that Google's own samples send; /vertex, TGI's.

The fields of an instance stand in it, in its `parameters`, or in the `parameters` that all instances share,
in snake_case or camelCase. Without `instances` the body is one instance. Each choice is one prediction.
Instances of TGI's kind, with `inputs` or with `messages` that nothing marks, are answered as TGI does: by
their text alone. Both kinds come to every predict route, so a deployment may name any of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from hex_llm.config import ServerConfig
from hex_llm.errors import HexError, InvalidRequest
from hex_llm.frontend.beside import shaped
from hex_llm.frontend.outputs import Delta
from hex_llm.server.common.backend import Backend, answer, size_of, together, unless_gone
from hex_llm.server.common.body import Kind, not_built, parse, shown
from hex_llm.server.common.body_route import BodyRoute, checked
from hex_llm.server.common.encoding import Whole, encode
from hex_llm.server.common.problems import problem_of
from hex_llm.server.common.sampling_fields import MAX_PROMPTS
from hex_llm.server.common.stream import Job, ReplyStream, StreamDelta, refuse_best_of, streamed
from hex_llm.server.openai import logprobs
from hex_llm.server.openai.chat import chat, stream_chat
from hex_llm.server.openai.schemas import ChatRequest
from hex_llm.server.tgi import routes as tgi
from hex_llm.server.tgi import schemas as tgi_schemas
from hex_llm.server.vertex.schemas import GenerateRequest
from hex_llm.types import CompletionOutput, RequestOutput

MARK = "@requestFormat"  # its one value makes an instance a chat completion
ALIASES = {
    "maxDecodeSteps": "max_tokens",
    "maxOutputTokens": "max_tokens",
    "topK": "top_k",
    "topP": "top_p",
}


def flat(instance: Any, where: str) -> dict[str, Any]:
    """The fields of an instance and of its `parameters`, under the names that they have here."""
    own = dict(_object(instance, where))
    nested = _object_or_null(own.pop("parameters", None), "parameters")
    fields: dict[str, Any] = {}
    for written, value in (*own.items(), *nested.items()):
        name = ALIASES.get(written, written)
        if name in fields:
            raise InvalidRequest(f"{where}: {shown(name)} is given twice", shown(name))
        fields[name] = value
    return fields


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: must be an object", where)
    return value


def _object_or_null(value: Any, where: str) -> dict[str, Any]:
    return {} if value is None else _object(value, where)


def instances_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Every instance's fields; its own count before those that all share."""
    if "instances" not in body:
        return [flat(body, "body")]
    for name in body:
        if name not in ("instances", "parameters", MARK):
            raise InvalidRequest(f"{shown(name)}: {not_built(name)}", shown(name))
    instances = body["instances"]
    if not isinstance(instances, list) or not 1 <= len(instances) <= MAX_PROMPTS:
        raise InvalidRequest(f"instances: must be a list of 1 to {MAX_PROMPTS} objects", "instances")
    shared = flat(_object_or_null(body.get("parameters"), "parameters"), "parameters")
    shared |= {name: body[name] for name in (MARK,) if name in body}
    return [shared | flat(instance, f"instances.{i}") for i, instance in enumerate(instances)]


def is_chat(instances: Sequence[dict[str, Any]]) -> bool:
    """Takes the mark out of the instances; all of them must bear it, or none."""
    marks = [instance.pop(MARK, None) for instance in instances]
    if any(mark not in (None, "chatCompletions") for mark in marks) or len(set(marks)) > 1:
        raise InvalidRequest(f"{MARK}: only chatCompletions is known, for all instances or for none", MARK)
    return marks[0] is not None


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


def parse_all(kind: type[Kind], instances: Sequence[dict[str, Any]]) -> list[Kind]:
    several = len(instances) > 1
    return [
        parse(kind, instance, f"instances.{i}." if several else "") for i, instance in enumerate(instances)
    ]


async def chats(
    backend: Backend, config: ServerConfig, requests: Sequence[ChatRequest], *, wrapped: bool
) -> Whole:
    """`wrapped`: they came as instances, so predictions are expected."""
    backend.check_room(sum(request.params().num_choices for request in requests))
    replies = await together(chat(backend, request, config) for request in requests)

    def make() -> Any:
        made = [reply.make() for reply in replies]
        # One chat is answered by an object, not by a list of one: so do Google's clients read it.
        return {"predictions": made[0] if len(made) == 1 else made} if wrapped else made[0]

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
        reply["cumulative_logprobs"] = [_sum(choice) for _, _, choice in each]
    if any(request.logprobs is not None for request in requests):
        reply["logprobs"] = [_logprobs(backend, *one) for one in each]
    if any(request.prompt_logprobs is not None for request in requests):
        reply["prompt_logprobs"] = [logprobs.of_prompt(output) for _, output, _ in each]
    return reply


def _sum(choice: CompletionOutput) -> float | None:
    known = choice.cumulative_logprob
    return known if known is not None and math.isfinite(known) else None


def _logprobs(
    backend: Backend, request: GenerateRequest, output: RequestOutput, choice: CompletionOutput
) -> dict[str, Any] | None:
    """Those that a raw response takes for its sum were not asked for."""
    skip = request.skip_special_tokens is not False
    asked = request.logprobs is not None
    return logprobs.of_completion(backend.tokenizer, output, choice, skip_special=skip) if asked else None


# ---- instances of TGI's kind


def is_tgi(instance: dict[str, Any]) -> bool:
    return "inputs" in instance or ("messages" in instance and MARK not in instance)


def tgi_text(
    backend: Backend, config: ServerConfig, instance: dict[str, Any], where: str
) -> tuple[int, Coroutine[Any, Any, str]]:
    """Its sequences, and what its prediction will be. Unlike TGI's own route, it keeps all parameters."""
    for name in ("details", "decoder_input_details", "top_n_tokens", "stream"):
        if instance.get(name):
            raise InvalidRequest(f"{where}{name}: a prediction is a text and nothing else", name)
    if "messages" in instance:
        talk = parse(ChatRequest, instance, where)
        return talk.params().num_choices, _chat_text(backend, config, talk)
    values = {name: value for name, value in instance.items() if name not in ("inputs", "stream")}
    if "max_tokens" in values:  # so Google's samples for TGI's container call it
        if "max_new_tokens" in values:
            raise InvalidRequest(f"{where}max_new_tokens is given twice", "max_new_tokens")
        values["max_new_tokens"] = values.pop("max_tokens")
    parameters = parse(tgi_schemas.Parameters, {"do_sample": True, **values}, where)
    inputs = instance.get("inputs")
    request = parse(tgi_schemas.GenerateRequest, {"inputs": inputs, "parameters": parameters}, where)
    return request.parameters.params(max_tokens=None).num_choices, _generated_text(backend, request)


async def _generated_text(backend: Backend, request: tgi_schemas.GenerateRequest) -> str:
    reply = await tgi.generate(backend, request, max_tokens=None)
    text: str = (await shaped(*reply.body))["generated_text"]
    return text


async def _chat_text(backend: Backend, config: ServerConfig, request: ChatRequest) -> str:
    message = (await shaped(*await chat(backend, request, config)))["choices"][0]["message"]
    text: str | None = message["content"]
    return json.dumps(message["tool_calls"]) if text is None else text


async def predict_as_tgi(
    backend: Backend, config: ServerConfig, instances: Sequence[dict[str, Any]]
) -> Whole:
    several = len(instances) > 1
    jobs: list[Coroutine[Any, Any, str]] = []
    num_sequences = 0
    try:
        for i, instance in enumerate(instances):
            num, job = tgi_text(backend, config, instance, f"instances.{i}." if several else "")
            num_sequences += num
            jobs.append(job)
        backend.check_room(num_sequences)
    except HexError:
        for job in jobs:
            job.close()
        raise
    texts = await together(jobs)
    return Whole(0, lambda: {"predictions": texts})


# ---- streams


def wants_stream(instances: Sequence[dict[str, Any]]) -> bool:
    wanted = [instance.get("stream") for instance in instances]
    if not all(value is None or isinstance(value, bool) for value in wanted):
        raise InvalidRequest("stream: must be true or false", "stream")
    if any(wanted) and len(wanted) > 1:
        raise InvalidRequest("stream: only one instance can be streamed", "stream")
    return bool(wanted[0])


def pieces(backend: Backend, request: GenerateRequest) -> ReplyStream:
    """JSON objects, each with a zero byte behind it, that tell what is new in every choice."""
    params = request.params()
    refuse_best_of(params)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name}: not in a stream", name)
    nothing: str | list[int] = [] if backend.tokenizer is None else ""
    sums = [0.0] * params.n

    def render(news: StreamDelta) -> bytes:
        delta = news.delta
        new = delta.token_ids if backend.tokenizer is None else delta.text
        piece: dict[str, Any] = {"predictions": _at(delta.index, new, nothing, params.n)}
        if request.raw_response:
            sums[delta.index] += _logprob(delta)
            piece["output_token_counts"] = _at(delta.index, len(delta.token_ids), 0, params.n)
            piece["cumulative_logprobs"] = [known if math.isfinite(known) else None for known in sums]
        return encode(piece) + b"\0"

    return ReplyStream(backend, [Job(request.prompt, params, request.priority, request.cache_salt)], render)


def _at(index: int, value: Any, elsewhere: Any, num: int) -> list[Any]:
    return [value if i == index else elsewhere for i in range(num)]


def _logprob(delta: Delta) -> float:
    assert delta.logprobs is not None
    return sum(known[i].logprob for i, known in zip(delta.token_ids, delta.logprobs, strict=True))


# ---- routes


async def respond(backend: Backend, config: ServerConfig, request: Request, body: dict[str, Any]) -> Response:
    wrapped = "instances" in body
    if "inputs" in body and not wrapped and not body.keys() & {"prompt", MARK}:
        return await tgi.in_their_shape(tgi.respond(backend, request, body))
    instances = instances_of(body)
    if wrapped and any(map(is_tgi, instances)):
        return await unless_gone(request, predict_as_tgi(backend, config, instances))
    is_stream = wants_stream(instances)
    if is_chat(instances):
        talks = await checked(request, partial(parse_all, ChatRequest, instances))
        if is_stream:
            return await streamed(request, await stream_chat(backend, talks[0], config, usage_at_end=True))
        return await unless_gone(request, chats(backend, config, talks, wrapped=wrapped))
    for instance in instances:
        instance.pop("stream", None)
    requests = await checked(request, partial(parse_all, GenerateRequest, instances))
    if is_stream:
        pieces_of_it = pieces(backend, requests[0])
        return await streamed(request, pieces_of_it, broken=broken_piece, media_type="text/plain")
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
