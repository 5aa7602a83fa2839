"""The engine as the server sees it, and what routes of every kind do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response

from hex_llm.config import ServerConfig
from hex_llm.errors import HexError, InvalidRequest, QueueFull, UnknownModel
from hex_llm.frontend.outputs import Delta
from hex_llm.frontend.requests import Generation
from hex_llm.sampling_params import SamplingParams
from hex_llm.server.common.body import shown
from hex_llm.server.common.encoding import Whole, reply_of
from hex_llm.server.common.sampling_fields import Sampling
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import CompletionOutput, FinishReason, Logprobs, RequestOutput

T = TypeVar("T")


class Backend(Protocol):
    """Only `ready` and `model_name` may be asked for before it is ready.

    InvalidRequest: this request is at fault; QueueFull: there are too many; others: the engine is.
    """

    @property
    def ready(self) -> bool: ...
    @property
    def model_name(self) -> str: ...
    @property
    def max_len(self) -> int: ...
    @property
    def max_sequences(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def check_room(self, num_sequences: int) -> None:
        """To be asked before anything is made for a request's choices: raises InvalidRequest, if so many can
        never be taken together, or QueueFull. Each that is generated is counted then."""

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> AbstractAsyncContextManager[Generation]:
        """A request under way, to be read while it grows; leaving it before its end aborts it."""

    async def complete(
        self, prompt: str | Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> RequestOutput:
        """All of it; when the caller is cancelled, so is the request."""


def check_model(backend: Backend, config: ServerConfig, named: str) -> None:
    """Who names no model means the one that there is."""
    if config.strict_model_name and named and named != backend.model_name:
        raise UnknownModel(f"The model `{shown(named)}` does not exist.", "model")


async def answer(
    backend: Backend, prompt: str | list[int], request: Sampling, params: SamplingParams
) -> RequestOutput:
    output = await backend.complete(prompt, params, priority=request.priority, cache_salt=request.cache_salt)
    for choice in output.outputs:
        raise_failure(choice)
    return output


def raise_failure(choice: CompletionOutput | Delta) -> None:
    """A fault of the request may show only when the engine is at it, as one in a grammar does."""
    if choice.finish_reason is FinishReason.ERROR:
        if choice.error_is_busy:
            raise QueueFull(choice.error)
        at_fault = choice.error_param
        raise HexError(choice.error) if at_fault is None else InvalidRequest(choice.error, at_fault)


def size_of(*outputs: RequestOutput) -> int:
    """Tokens and log-probabilities that a reply tells."""
    return sum(
        len(output.prompt_token_ids)
        + num_logprobs(output.prompt_logprobs)
        + sum(len(one.token_ids) + num_logprobs(one.logprobs) for one in output.outputs)
        for output in outputs
    )


def num_logprobs(known: Sequence[Logprobs | None] | None) -> int:
    return len(known) * len(known[-1] or ()) if known else 0


async def together(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All of the results; when one job fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def unless_gone(request: Request, work: Coroutine[Any, Any, Whole]) -> Response:
    """The work's result as a reply. If the client leaves first, the work is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(client_leaves(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        # Nobody reads the 499; nginx gives this case the same number.
        return await reply_of(task.result()) if task.done() else Response(status_code=499)
    finally:
        task.cancel()
        gone.cancel()


async def client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
