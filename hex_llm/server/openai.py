"""OpenAI's routes: /v1/completions, /v1/chat/completions and /v1/models.

Here a request's fields become sampling parameters, and an output becomes a reply; the rest is the backend's.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from hex_llm.errors import InvalidRequest
from hex_llm.server import logprobs
from hex_llm.server.backend import Backend, answer, together, unless_gone
from hex_llm.server.schemas import ChatRequest, CompletionRequest
from hex_llm.text.chat import encode_chat
from hex_llm.types import CompletionOutput, RequestOutput


async def complete(backend: Backend, request: CompletionRequest) -> dict[str, Any]:
    params = request.params()
    outputs = await together(answer(backend, prompt, request, params) for prompt in request.prompts())
    skip = params.skip_special_tokens
    choices = [
        {
            "text": choice.text,
            "logprobs": logprobs.of_completion(backend.tokenizer, output, choice, skip_special=skip),
            **_asked({"prompt_logprobs": logprobs.of_prompt(output)}),
            **_ids(backend, choice),
            **_end(choice),
        }
        for output in outputs
        for choice in output.outputs
    ]
    return _reply(backend, "cmpl", "text_completion", outputs, choices)


async def chat(backend: Backend, request: ChatRequest) -> dict[str, Any]:
    params, tokenizer = request.params(), backend.tokenizer
    if tokenizer is None:
        raise InvalidRequest(
            "messages: this server has no tokenizer (--skip_tokenizer_init); send token ids to "
            "/v1/completions",
            "messages",
        )
    messages = [message.plain() for message in request.messages]
    _, prompt_ids = await asyncio.to_thread(encode_chat, tokenizer, messages)
    output = await answer(backend, prompt_ids, request, params)
    choices = [
        {
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": logprobs.of_chat(tokenizer, choice, params.logprobs or 0),
            **_end(choice),
        }
        for choice in output.outputs
    ]
    reply = _reply(backend, "chatcmpl", "chat.completion", [output], choices)
    return {**reply, **_asked({"prompt_logprobs": logprobs.of_prompt(output)})}


def _asked(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _ids(backend: Backend, choice: CompletionOutput) -> dict[str, Any]:
    """Without a tokenizer the ids are all there is to answer with."""
    return {"token_ids": choice.token_ids} if backend.tokenizer is None else {}


def _end(choice: CompletionOutput) -> dict[str, Any]:
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}


def _reply(
    backend: Backend, prefix: str, kind: str, outputs: Sequence[RequestOutput], choices: list[dict[str, Any]]
) -> dict[str, Any]:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": backend.model_name,
        "choices": [{"index": i, **choice} for i, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        },
    }


def routes(backend: Backend) -> APIRouter:
    router = APIRouter(prefix="/v1")
    started = int(time.time())

    @router.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await unless_gone(request, complete(backend, body))

    @router.post("/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await unless_gone(request, chat(backend, body))

    @router.get("/models")
    async def models() -> dict[str, Any]:
        card = {
            "id": backend.model_name,
            "object": "model",
            "created": started,
            "owned_by": "hex_llm",
            "root": backend.model_name,
            "parent": None,
            "max_model_len": backend.max_len,
            "permission": [],
        }
        return {"object": "list", "data": [card]}

    return router
