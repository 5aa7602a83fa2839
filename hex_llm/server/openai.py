"""OpenAI's routes: /v1/completions, /v1/chat/completions and /v1/models.

Here a request's fields become sampling parameters, and an output becomes a reply; the rest is the backend's.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from hex_llm.errors import HexError, InvalidRequest
from hex_llm.sampling_params import SamplingParams
from hex_llm.server import logprobs
from hex_llm.server.schemas import ChatRequest, CompletionRequest, Sampling
from hex_llm.text.chat import encode_chat
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import CompletionOutput, FinishReason, RequestOutput

T = TypeVar("T")


class Backend(Protocol):
    """The engine as the server sees it. Only `ready` and `model_name` may be asked for before it is ready."""

    @property
    def ready(self) -> bool: ...
    @property
    def model_name(self) -> str: ...
    @property
    def max_len(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    async def complete(
        self, prompt: str | Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> RequestOutput:
        """InvalidRequest: this request is at fault; QueueFull: there are too many; others: the engine is.

        When the caller is cancelled, so is the request.
        """


async def answer(
    backend: Backend, prompt: str | list[int], request: Sampling, params: SamplingParams
) -> RequestOutput:
    output = await backend.complete(prompt, params, priority=request.priority, cache_salt=request.cache_salt)
    for choice in output.outputs:
        if choice.finish_reason is FinishReason.ERROR:
            # A fault of the request may show only when the engine is at it, as one in a grammar does.
            at_fault = choice.error_param
            raise HexError(choice.error) if at_fault is None else InvalidRequest(choice.error, at_fault)
    return output


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


async def together(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All of the results; when one job fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def unless_gone(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """The work's result as a reply. If the client leaves first, the work is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_client_leaves(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        # Nobody reads the 499; nginx gives this case the same number.
        return JSONResponse(task.result()) if task.done() else Response(status_code=499)
    finally:
        task.cancel()
        gone.cancel()


async def _client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
