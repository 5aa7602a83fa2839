"""POST /generate: Hex-LLM's predict route, in all the shapes that Google's own samples send.

The fields of an instance stand in it, in its `parameters`, or in the `parameters` that all instances share,
in snake_case or camelCase. Without `instances` the body is one instance. Each choice is one prediction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from hex_llm.errors import InvalidRequest
from hex_llm.server import logprobs
from hex_llm.server.backend import Backend, answer, together, unless_gone
from hex_llm.server.openai import chat
from hex_llm.server.schemas import MAX_PROMPTS, ChatRequest, GenerateRequest, Kind, not_built, parse, shown
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
    nested = _object(own.pop("parameters", None) or {}, "parameters")
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
    shared = flat(body.get("parameters") or {}, "parameters") | {n: body[n] for n in (MARK,) if n in body}
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


async def predict(backend: Backend, body: dict[str, Any], *, raw: bool) -> dict[str, Any]:
    instances = instances_of(body)
    if is_chat(instances):
        talks = parse_all(ChatRequest, instances)
        replies = await together(chat(backend, talk) for talk in talks)
        # One chat is answered by an object, not by a list of one: so do Google's clients read it.
        reply = replies[0] if len(replies) == 1 else replies
        return {"predictions": reply} if "instances" in body else replies[0]
    requests = parse_all(GenerateRequest, instances)
    return await generate(backend, requests, raw=raw)


async def generate(backend: Backend, requests: Sequence[GenerateRequest], *, raw: bool) -> dict[str, Any]:
    params = [request.params() for request in requests]  # all are checked before the first one starts
    outputs = await together(answer(backend, r.prompt, r, p) for r, p in zip(requests, params, strict=True))
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


def routes(backend: Backend, *, raw: bool) -> APIRouter:
    router = APIRouter()

    @router.post("/generate")
    async def vertex_predict(body: dict[str, Any], request: Request) -> Response:
        return await unless_gone(request, predict(backend, body, raw=raw))

    return router
