"""The engine as the server sees it, and what routes of every kind do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar, Unpack

from hex_llm.frontend.outputs import Named, raise_failure
from hex_llm.frontend.requests import Generation
from hex_llm.sampling_params import SamplingParams
from hex_llm.server.common.body import EngineRequest
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import AdapterRef, Logprobs, Pooling, RequestOptions, RequestOutput
from hex_llm.weights.adapter_source import AdapterNames

T = TypeVar("T")
Beginning = AbstractAsyncContextManager[Generation]  # entered, a request is under way; left, it is aborted


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
    @property
    def pooling(self) -> Pooling: ...
    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Of SamplingParams, for what a request does not say."""
        ...

    @property
    def adapters(self) -> AdapterNames: ...

    def restart(self) -> None:
        """Begins to restart its replicas one after another; InvalidRequest: it cannot."""

    def check_room(self, num_sequences: int) -> None:
        """To be asked before anything is made for a request's choices: raises InvalidRequest, if so many can
        never be taken together, or QueueFull. Each that is generated is counted then."""

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> Beginning:
        """A request under way, to be read while it grows; leaving it before its end aborts it."""


def adapter_of(backend: Backend, model: str, dynamic_lora: str = "") -> AdapterRef | None:
    """The adapter that these name; None: the model itself. Where requests can have adapters, a name that is
    none is refused (AdapterNames.resolve): it must not get the model's own answer."""
    names = backend.adapters
    if dynamic_lora:
        return names.resolve(dynamic_lora)
    return names.resolve(model) if names.is_on and model not in ("", backend.model_name) else None


def served_name(backend: Backend, request: EngineRequest) -> str:
    """Of what answers, as a reply tells it."""
    adapter = adapter_of(backend, request.model, request.dynamic_lora)
    return backend.model_name if adapter is None else adapter.name


def begin(
    backend: Backend, prompt: str | list[int], request: EngineRequest, params: SamplingParams
) -> Beginning:
    """As `Backend.generate`, with what the request says besides."""
    adapter = adapter_of(backend, request.model, request.dynamic_lora)
    options = RequestOptions(priority=request.priority, cache_salt=request.cache_salt, adapter=adapter)
    return backend.generate(prompt, params, **options)


async def answer(
    backend: Backend, prompt: str | list[int], request: EngineRequest, params: SamplingParams
) -> RequestOutput:
    """All of it; when the caller is cancelled, so is the request."""
    async with begin(backend, prompt, request, params) as generation:
        await generation.until_end()
    output = generation.output()
    for choice in output.outputs:
        raise_failure(choice)
    return output


def size_of(*outputs: RequestOutput) -> int:
    """Tokens and log-probabilities that a reply tells."""
    return sum(
        len(output.prompt_token_ids)
        + num_logprobs(output.prompt_logprobs)
        + sum(len(one.token_ids) + num_logprobs(one.logprobs) for one in output.outputs)
        for output in outputs
    )


def num_logprobs(logprobs: Sequence[Logprobs | None] | None) -> int:
    if not logprobs:
        return 0
    return logprobs.size if isinstance(logprobs, Named) else len(logprobs) * len(logprobs[-1] or ())


async def together(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All of the results; when one job fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
