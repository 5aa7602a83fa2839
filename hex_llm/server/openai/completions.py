"""OpenAI's /v1/completions.

A request's fields become sampling parameters, and an output becomes a reply; the rest is the backend's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from hex_llm.config import ServerConfig
from hex_llm.frontend.beside import read
from hex_llm.frontend.outputs import Named
from hex_llm.sampling_params import SamplingParams
from hex_llm.server.common.backend import Backend, begin, size_of, together
from hex_llm.server.common.body_route import BodyRoute
from hex_llm.server.common.replies import Listed, Whole, encode
from hex_llm.server.common.streams import ReplyStream, StreamDelta, streamed, unless_gone
from hex_llm.server.openai import logprobs
from hex_llm.server.openai.replies import ChunkStream, Fields, answered, check_model, end_of, head_of, whole
from hex_llm.server.openai.schemas import CompletionRequest
from hex_llm.types import CompletionOutput, Logprobs, RequestOutput

KIND = ("cmpl", "text_completion")


async def complete(backend: Backend, request: CompletionRequest) -> Whole:
    params = request.params(_defaults(backend))
    prompts = await _prompts(backend, request, params)
    outputs = await together(answered(backend, prompt, request, params) for prompt in prompts)
    head = head_of(backend, request, *KIND)
    return Whole(size_of(*outputs), partial(_reply, backend, request, params, head, outputs))


def _reply(
    backend: Backend,
    request: CompletionRequest,
    params: SamplingParams,
    head: Fields,
    outputs: Sequence[RequestOutput],
) -> Fields:
    as_ids, skip = request.return_tokens_as_token_ids, params.skip_special_tokens
    written = params.truncate_prompt_tokens is None  # as it was sent, if that was a text

    def choice_of(output: RequestOutput, one: CompletionOutput) -> Fields:
        of_tokens = logprobs.of_completion(
            backend.tokenizer, output, one, skip_special=skip, as_ids=as_ids, written=written
        )
        ids = Listed(one.token_ids) if _wants_ids(backend, request) else None
        return {"text": one.text, "logprobs": of_tokens, **end_of(one), "token_ids": ids}

    choices = []
    for output in outputs:
        of_prompt: Fields = {"prompt_logprobs": None, "prompt_token_ids": None}
        if params.prompt_logprobs is not None:  # the same for each choice
            of_prompt["prompt_logprobs"] = msgspec.Raw(encode(logprobs.of_prompt(output)))
        if request.return_token_ids:
            of_prompt["prompt_token_ids"] = Listed(output.prompt_token_ids)
        choices += [choice_of(output, one) | of_prompt for one in output.outputs]
    return whole(head, outputs, choices)


async def stream_completion(backend: Backend, request: CompletionRequest) -> ReplyStream:
    params = request.params(_defaults(backend))
    prompts = await _prompts(backend, request, params)
    beginnings = [begin(backend, prompt, request, params) for prompt in prompts]
    head = head_of(backend, request, *KIND)
    return ChunkStream(beginnings, params, request, head, lambda: GrowingText(backend, request, params).add)


async def _prompts(
    backend: Backend, request: CompletionRequest, params: SamplingParams
) -> Sequence[str | list[int]]:
    """The backend encodes texts with special tokens around them; so others are encoded here."""
    prompts, tokenizer = request.prompts(), backend.tokenizer
    backend.check_room(len(prompts) * params.num_choices)
    if request.add_special_tokens or tokenizer is None:
        return prompts
    encode_text = partial(tokenizer.encode, add_special_tokens=False)
    return [
        await read(len(prompt), partial(encode_text, prompt)) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


def _defaults(backend: Backend) -> Fields:
    """Completions have a length of their own."""
    return {name: value for name, value in backend.sampling_defaults.items() if name != "max_tokens"}


def _wants_ids(backend: Backend, request: CompletionRequest) -> bool:
    """Without a tokenizer the ids are all there is to answer with."""
    return request.return_token_ids or backend.tokenizer is None


class GrowingText:
    """One choice of a completion, for the chunks of a stream."""

    def __init__(self, backend: Backend, request: CompletionRequest, params: SamplingParams) -> None:
        self._wants_ids = _wants_ids(backend, request)
        self._wants_prompt_ids = request.return_token_ids
        self._params = params
        self._logprobs = logprobs.CompletionLogprobs(
            backend.tokenizer,
            skip_special=params.skip_special_tokens,
            as_ids=request.return_tokens_as_token_ids,
        )
        self._text = ""
        self._begun = False

    def add(self, news: StreamDelta) -> Iterable[Fields]:
        delta, ended = news.delta, news.delta.finish_reason is not None
        if not delta.token_ids and not ended:  # an echo, whose log-probabilities may not all be known yet
            self._text += delta.text
            return ()
        text = delta.text if self._begun else self._text + delta.text
        if not (text or ended or delta.logprobs or self._wants_ids):
            return ()
        fields: Fields = {"text": text, "logprobs": None, "finish_reason": delta.finish_reason}
        if ended:
            fields["stop_reason"] = delta.stop_reason
        if delta.logprobs is not None:
            fields["logprobs"] = self._logprobs_of(news, text, delta.logprobs, ended)
        if self._wants_ids:
            fields["token_ids"] = delta.token_ids
        if self._wants_prompt_ids and not self._begun:
            fields["prompt_token_ids"] = news.generation.collector.request.prompt_ids
        self._begun = True
        return (fields,)

    def _logprobs_of(self, news: StreamDelta, text: str, each: Sequence[Logprobs], ended: bool) -> Fields:
        ids, num_echoed = news.delta.token_ids, 0
        if self._begun:
            self._text += text
        else:
            self._text = text
            if self._params.echo:
                assert self._params.logprobs is not None
                collector = news.generation.collector
                assert isinstance(each, Named)
                num_echoed = len(collector.request.prompt_ids) if collector.decodes_prompt else 0
                ids = [*collector.request.prompt_ids, *ids]
                each = collector.prompt_logprobs(collector.request.params.logprobs or 0, {}) + each
        return self._logprobs.add(ids, each, self._text, ended=ended, num_echoed=num_echoed)


async def completion_reply(
    backend: Backend, request: Request, body: CompletionRequest, config: ServerConfig
) -> Response:
    check_model(backend, config, body.model)
    body.follow(config)
    if body.stream:
        return await streamed(request, await stream_completion(backend, body))
    return await unless_gone(request, complete(backend, body))


def routes(backend: Backend, config: ServerConfig) -> APIRouter:
    router = APIRouter(prefix="/v1", route_class=BodyRoute)

    @router.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await completion_reply(backend, request, body, config)

    return router
