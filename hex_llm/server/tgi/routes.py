"""TGI's routes: /generate with `inputs` (handed over by vertex.py), /generate_stream, /, /info, /invocations.

Replies, events, headers and errors are TGI's. Unlike there, no parameter is dropped: each acts or is refused
by its name. What a request asks of the engine, tgi_schemas knows.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError

from hex_llm import __version__
from hex_llm.config import ServerConfig
from hex_llm.errors import HexError, InvalidRequest, QueueFull, TimedOut
from hex_llm.frontend.beside import shaped
from hex_llm.frontend.outputs import Delta, raise_failure
from hex_llm.frontend.requests import Generation
from hex_llm.sampling_params import MAX_CHOICES, SamplingParams
from hex_llm.server.common.backend import Backend, adapter_of, size_of
from hex_llm.server.common.body import MAX_PROMPTS, parse
from hex_llm.server.common.body_route import BodyRoute, checked
from hex_llm.server.common.replies import Listed, Whole, error_reply, event, ours
from hex_llm.server.common.streams import Pieces, delta_size, streamed, unless_gone
from hex_llm.server.openai.chat import chat_reply
from hex_llm.server.openai.completions import completion_reply
from hex_llm.server.openai.logprobs import finite
from hex_llm.server.openai.schemas import ChatRequest, CompletionRequest
from hex_llm.server.tgi.schemas import MAX_NEW_TOKENS, MAX_SEED, MAX_STOPS, GenerateRequest, in_their_words
from hex_llm.text.detokenize import Detokenizer
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import CompletionOutput, FinishReason, Logprobs, RequestOutput

COMPUTE_TYPE = "xla+optimized"
Json = dict[str, Any]


class Incomplete(HexError):
    """The engine ended a choice before its end."""


# ---- errors


def problem_of(error: Exception) -> tuple[int, Json]:
    """The HTTP status and the body; an error that is none of ours tells clients nothing."""
    error = ours(error)
    match error:
        case InvalidRequest():
            status, kind, message = 422, "validation", f"Input validation error: {in_their_words(error)}"
        case QueueFull():
            status, kind, message = 429, "overloaded", "Model is overloaded"
        case TimedOut():
            status, kind, message = 504, "timeout", str(error)
        case Incomplete():
            status, kind, message = 500, "incomplete_generation", "Incomplete generation"
        case HexError():
            status, kind, message = 424, "generation", f"Request failed during generation: {error}"
        case _:
            status, kind, message = 500, "internal", "internal error; the server's log tells more"
    return status, {"error": message, "error_type": kind}


async def in_their_shape(work: Awaitable[Response]) -> Response:
    try:
        return await work
    except (HexError, RequestValidationError) as error:
        return error_reply(*problem_of(error))


class TgiRoute(BodyRoute):
    """A route that tells its errors as TGI does."""

    problem_reply = staticmethod(problem_of)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handled(request: Request) -> Response:
            return await in_their_shape(handler(request))

        return handled


# ---- one request


@asynccontextmanager
async def _started(
    backend: Backend, request: GenerateRequest, params: SamplingParams
) -> AsyncIterator[tuple[Generation, Tokenizer]]:
    tokenizer = backend.tokenizer
    if tokenizer is None:
        raise InvalidRequest.at("inputs", "this server has no tokenizer (--skip_tokenizer_init)")
    if not request.inputs:
        raise InvalidRequest("`inputs` cannot be empty", "inputs")
    adapter = adapter_of(backend, "", request.parameters.adapter_id or "")
    async with backend.generate(request.inputs, params, adapter=adapter) as generation:
        num_input, num_new = len(generation.collector.request.prompt_ids), request.parameters.max_new_tokens
        if num_new is not None and num_input + num_new > backend.max_len:
            raise InvalidRequest(
                f"`inputs` tokens + `max_new_tokens` must be <= {backend.max_len}. "
                f"Given: {num_input} `inputs` tokens and {num_new} `max_new_tokens`",
                "max_new_tokens",
            )
        yield generation, tokenizer


def _check_end(output: RequestOutput) -> None:
    for choice in output.outputs:
        raise_failure(choice)
        if choice.finish_reason is FinishReason.ABORT:
            raise Incomplete


async def generate(
    backend: Backend, request: GenerateRequest, *, full: bool = False, max_tokens: int | None = MAX_NEW_TOKENS
) -> tuple[Whole, dict[str, str]]:
    """And the reply's headers. `full`: the text begins with the prompt, if the request does not object."""
    begun = time.monotonic()
    params = request.parameters.params(max_tokens=max_tokens)
    async with _started(backend, request, params) as (generation, tokenizer):
        queued = time.monotonic()
        await generation.until_end()
    output = generation.output()
    _check_end(output)
    choices = _best_first(output.outputs)
    describe = _Describer(tokenizer, params, request.parameters.top_n_tokens, output)
    reply = Whole(size_of(output), partial(_body, describe, request, choices, full))
    return reply, _headers(request, output, choices[0], begun, queued)


def _body(
    describe: _Describer, request: GenerateRequest, choices: list[CompletionOutput], full: bool
) -> Json:
    best, *others = choices
    body: Json = {"generated_text": _text(request, best, full)}
    if request.parameters.details or request.parameters.decoder_input_details:
        body["details"] = describe.choice(best)
        if others:
            body["details"]["best_of_sequences"] = [
                {"generated_text": _text(request, one, full), **describe.choice(one)} for one in others
            ]
    return body


def _best_first(choices: list[CompletionOutput]) -> list[CompletionOutput]:
    """The choice with the likeliest mean token, then the others as they are."""
    best = max(choices, key=lambda one: (one.cumulative_logprob or 0.0) / max(len(one.token_ids), 1))
    return [best, *(one for one in choices if one is not best)]


def _text(request: GenerateRequest, choice: CompletionOutput, full: bool) -> str:
    return_full = request.parameters.return_full_text
    return (request.inputs if (full if return_full is None else return_full) else "") + choice.text


def _headers(
    request: GenerateRequest, output: RequestOutput, choice: CompletionOutput, begun: float, queued: float
) -> dict[str, str]:
    """In milliseconds, but for x-compute-time. The wait in the engine's queue counts as inference."""
    now = time.monotonic()
    num_tokens = len(choice.token_ids)
    times = {"total": now - begun, "validation": queued - begun, "queue": 0.0, "inference": now - queued}
    return {
        **_first_headers(request),
        "x-compute-time": str(now - begun),
        **{f"x-{name}-time": str(int(seconds * 1000)) for name, seconds in times.items()},
        "x-time-per-token": str(int((now - queued) * 1000 / max(num_tokens, 1))),
        "x-prompt-tokens": str(len(output.prompt_token_ids)),
        "x-generated-tokens": str(num_tokens),
    }


def _first_headers(request: GenerateRequest) -> dict[str, str]:
    return {"x-compute-type": COMPUTE_TYPE, "x-compute-characters": str(len(request.inputs))}


# ---- details


def _finish_reason(choice: CompletionOutput) -> str:
    if choice.finish_reason is FinishReason.LENGTH:
        return "length"
    return "stop_sequence" if isinstance(choice.stop_reason, str) else "eos_token"


@dataclass(frozen=True)
class _Describer:
    """Tokens and choices of one request in TGI's shape."""

    tokenizer: Tokenizer
    params: SamplingParams
    num_top: int
    output: RequestOutput

    def texts(self) -> Callable[[int, bool], str]:
        """What each next token adds to the text, special or not; half a character adds nothing yet."""
        shown = Detokenizer(
            self.tokenizer, SamplingParams(skip_special_tokens=False), self.output.prompt_token_ids
        )
        return lambda token_id, ended: shown.add([token_id], ended=ended)

    def token(self, token_id: int, text: str, logprob: float) -> Json:
        data = self.tokenizer.codec.token_bytes
        special = not data(token_id, True) and bool(data(token_id, False))
        return {"id": token_id, "text": text, "logprob": finite(logprob), "special": special}

    def likeliest(self, candidates: Logprobs) -> list[Json]:
        ranked = sorted((one.rank, i, one) for i, one in candidates.items() if one.rank <= self.num_top)
        return [self.token(i, one.decoded_token or "", one.logprob) for _, i, one in ranked]

    def choice(self, choice: CompletionOutput) -> Json:
        assert choice.logprobs is not None
        details: Json = {
            **self.end(choice),
            "prefill": Listed(self.prefill()),
            "tokens": Listed(self.tokens(choice.token_ids, choice.logprobs)),
        }
        if self.num_top:
            details["top_tokens"] = Listed(map(self.likeliest, choice.logprobs))
        return details

    def tokens(self, token_ids: list[int], logprobs: list[Logprobs]) -> Iterator[Json]:
        text_of, last = self.texts(), len(token_ids) - 1
        for i, (token_id, candidates) in enumerate(zip(token_ids, logprobs, strict=True)):
            yield self.token(token_id, text_of(token_id, i == last), candidates[token_id].logprob)

    def end(self, choice: CompletionOutput) -> Json:
        assert self.params.seed is not None
        # The engine gives the i-th choice the seed plus i, so each can be repeated alone.
        seed = (self.params.seed + choice.index) % MAX_SEED if self.params.temperature > 0 else None
        num_tokens = len(choice.token_ids)
        return {"finish_reason": _finish_reason(choice), "generated_tokens": num_tokens, "seed": seed}

    def prefill(self) -> Iterator[Json]:
        """Nothing precedes the first token, so it has no log-probability."""
        for i, candidates in zip(
            self.output.prompt_token_ids, self.output.prompt_logprobs or (), strict=False
        ):
            logprob = None if candidates is None else finite(candidates[i].logprob)
            yield {"id": i, "text": self.tokenizer.shown(i), "logprob": logprob}


# ---- streams


async def events(backend: Backend, request: GenerateRequest, *, full: bool = False) -> Pieces:
    params = request.parameters.params(streamed=True)
    async with _started(backend, request, params) as (generation, tokenizer):
        describe = _Describer(tokenizer, params, request.parameters.top_n_tokens, generation.output())
        text_of, index = describe.texts(), 0
        async for delta in generation:
            end = NOT_ENDED
            if delta.finish_reason is not None:
                end = _end(describe, request, generation.output(), full)
            work = partial(_told, describe, text_of, delta, index, end)
            if piece := await shaped(delta_size(delta), work):
                yield piece
            index += len(delta.token_ids)


def _told(
    describe: _Describer, text_of: Callable[[int, bool], str], delta: Delta, index: int, end: Json
) -> bytes:
    """The events of tokens, of which `index` came before."""
    assert delta.logprobs is not None
    last = -1 if end is NOT_ENDED else len(delta.token_ids) - 1
    events = []
    for i, (token_id, candidates) in enumerate(zip(delta.token_ids, delta.logprobs, strict=True)):
        token = describe.token(token_id, text_of(token_id, i == last), candidates[token_id].logprob)
        top = {"top_tokens": describe.likeliest(candidates)} if describe.num_top else {}
        ended = end if i == last else NOT_ENDED
        events.append(event({"index": index + i + 1, "token": token, **top, **ended}))
    if end is not NOT_ENDED and last < 0:  # ended without a token, but an event must bear one
        events.append(event({"index": index + 1, "token": NO_TOKEN, **end}))
    return b"".join(events)


NOT_ENDED: Json = {"generated_text": None, "details": None}
NO_TOKEN: Json = {"id": 0, "text": "", "logprob": 0.0, "special": True}


def _end(describe: _Describer, request: GenerateRequest, output: RequestOutput, full: bool) -> Json:
    _check_end(output)
    (choice,) = output.outputs
    details = {**describe.end(choice), "input_length": len(output.prompt_token_ids)}
    text = _text(request, choice, full)
    return {"generated_text": text, "details": details if request.parameters.details else None}


async def streamed_reply(
    backend: Backend, request: Request, body: GenerateRequest, *, full: bool = False
) -> Response:
    pieces = events(backend, body, full=full)
    reply = await streamed(request, pieces, broken=lambda error: event(problem_of(error)[1]))
    reply.headers.update(_first_headers(body))
    return reply


async def whole_reply(
    backend: Backend, request: Request, body: GenerateRequest, *, full: bool = False
) -> Response:
    """`full`: also in a list."""
    headers: dict[str, str] = {}

    async def work() -> Whole:
        (size, make), more = await generate(backend, body, full=full)
        headers.update(more)
        return Whole(size, lambda: [make()] if full else make())

    reply = await unless_gone(request, work())
    reply.headers.update(headers)
    return reply


async def respond(backend: Backend, request: Request, values: Any, *, full: bool = False) -> Response:
    """To a body with `inputs`; raises what is wrong."""
    body = parse(GenerateRequest, values)
    return await (streamed_reply if body.stream else whole_reply)(backend, request, body, full=full)


# ---- routes


def routes(backend: Backend, config: ServerConfig) -> APIRouter:
    router = APIRouter(route_class=TgiRoute)

    @router.get("/info")
    async def tgi_info() -> Json:
        return {
            "model_id": backend.model_name,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": backend.max_sequences,
            "max_best_of": MAX_CHOICES,
            "max_stop_sequences": MAX_STOPS,
            "max_input_tokens": backend.max_len - 1,
            "max_total_tokens": backend.max_len,
            "validation_workers": 1,
            "max_client_batch_size": MAX_PROMPTS,
            "router": "hex_llm",
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }

    @router.post("/generate_stream")
    async def generate_stream(body: GenerateRequest, request: Request) -> Response:
        return await streamed_reply(backend, request, body)

    @router.post("/")
    async def compatible(body: GenerateRequest, request: Request) -> Response:
        """As the older inference API did, it begins with the prompt and wraps the reply in a list."""
        return await respond(backend, request, body, full=True)

    @router.post("/invocations")
    async def sagemaker(body: Json, request: Request) -> Response:
        if "messages" in body:
            chat = await checked(request, partial(parse, ChatRequest, body))
            return await chat_reply(backend, request, chat, config)
        if "prompt" in body:
            completion = await checked(request, partial(parse, CompletionRequest, body))
            return await completion_reply(backend, request, completion, config)
        return await respond(backend, request, body, full=True)

    return router
