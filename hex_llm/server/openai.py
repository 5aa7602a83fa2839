"""OpenAI's routes: /v1/completions, /v1/chat/completions and /v1/models.

Here a request becomes token ids and token ids become an answer; which tokens, only the backend knows.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from hex_llm.errors import InvalidRequest
from hex_llm.server.schemas import ChatRequest, CompletionRequest
from hex_llm.text.chat import encode_chat
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import CompletionOutput, FinishReason, SamplingParams

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
    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> CompletionOutput:
        """The tokens, without text. InvalidRequest: this request is at fault; other errors: the engine is.

        When the caller is cancelled, so is the request.
        """


@dataclass(frozen=True)
class Answer:
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    num_prompt_tokens: int


async def answer(backend: Backend, prompt: str | list[int], params: SamplingParams) -> Answer:
    if isinstance(prompt, str):
        tokenizer = tokenizer_of(backend, "prompt")
        prompt = await asyncio.to_thread(tokenizer.encode, prompt)
    output = await backend.generate(prompt, params)
    text = await asyncio.to_thread(_text, backend.tokenizer, output, params) if backend.tokenizer else ""
    return Answer(text, output.token_ids, output.finish_reason, len(prompt))


def _text(tokenizer: Tokenizer, output: CompletionOutput, params: SamplingParams) -> str:
    """What stopped the output is no part of its text."""
    stopped = output.finish_reason is FinishReason.STOP
    ids = output.token_ids[:-1] if stopped else output.token_ids
    return tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)


def tokenizer_of(backend: Backend, param: str) -> Tokenizer:
    if backend.tokenizer is None:
        raise InvalidRequest(
            f"{param}: this server has no tokenizer (--skip_tokenizer_init); send token ids to "
            "/v1/completions",
            param,
        )
    return backend.tokenizer


async def complete(backend: Backend, request: CompletionRequest) -> dict[str, Any]:
    params = request.params()
    answers = await together(answer(backend, prompt, params) for prompt in request.prompts())
    choices = [{"text": a.text, "logprobs": None, **_ids(backend, a)} for a in answers]
    return _reply(backend, "cmpl", "text_completion", answers, choices)


async def chat(backend: Backend, request: ChatRequest) -> dict[str, Any]:
    tokenizer, params = tokenizer_of(backend, "messages"), request.params()
    messages = [message.plain() for message in request.messages]
    _, prompt_ids = await asyncio.to_thread(encode_chat, tokenizer, messages)
    one = await answer(backend, prompt_ids, params)
    choice = {"message": {"role": "assistant", "content": one.text}, "logprobs": None}
    return _reply(backend, "chatcmpl", "chat.completion", [one], [choice])


def _ids(backend: Backend, one: Answer) -> dict[str, Any]:
    """Without a tokenizer the ids are all there is to answer with."""
    return {"token_ids": one.token_ids} if backend.tokenizer is None else {}


def _reply(
    backend: Backend, prefix: str, kind: str, answers: Sequence[Answer], choices: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    num_prompt = sum(a.num_prompt_tokens for a in answers)
    num_output = sum(len(a.token_ids) for a in answers)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": backend.model_name,
        "choices": [
            {"index": i, **choice, "finish_reason": a.finish_reason}
            for i, (a, choice) in enumerate(zip(answers, choices, strict=True))
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
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
