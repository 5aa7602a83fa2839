"""What OpenAI's replies have in common, completions and chats, whole or in chunks: ids, usage, their frame.

Not known here: what a choice says.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hex_llm import __version__
from hex_llm.config import ServerConfig
from hex_llm.errors import InvalidRequest
from hex_llm.frontend.requests import Generation
from hex_llm.sampling_params import SamplingParams
from hex_llm.server.common.backend import Backend, Beginning, adapter_of, answer, served_name
from hex_llm.server.common.beams import beam_search
from hex_llm.server.common.replies import DONE, encode, event
from hex_llm.server.common.streams import ReplyStream, StreamDelta, refuse_best_of
from hex_llm.server.openai.schemas import OpenAIRequest, StreamOptions
from hex_llm.types import CompletionOutput, RequestOutput
from hex_llm.weights.adapter_source import unknown

Fields = dict[str, Any]
NULL = b"null"
# Of a whole reply: what clients may read. TGI's own insists on a fingerprint.
UNSAID = {"service_tier": None, "system_fingerprint": f"hex_llm-{__version__}", "kv_transfer_params": None}


def check_model(backend: Backend, config: ServerConfig, model: str) -> None:
    """Who names no model means the one that there is."""
    adapter = adapter_of(backend, model)
    if adapter is None and config.strict_model_name and model and model != backend.model_name:
        raise unknown(model)


async def answered(
    backend: Backend, prompt: str | list[int], request: OpenAIRequest, params: SamplingParams
) -> RequestOutput:
    if request.use_beam_search:
        return await beam_search(backend, prompt, request, params, request.length_penalty)
    return await answer(backend, prompt, request, params)


def head_of(backend: Backend, request: OpenAIRequest, prefix: str, kind: str) -> Fields:
    return {
        "id": f"{prefix}-{request.request_id or uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": served_name(backend, request),
    }


def whole(head: Fields, outputs: Sequence[RequestOutput], choices: Iterable[Fields]) -> Fields:
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    prompts = [output.prompt_token_ids for output in outputs]
    return {
        **head,
        "choices": [{"index": i, **choice} for i, choice in enumerate(choices)],
        **UNSAID,
        "usage": usage(prompts, num_output, sum(output.num_cached_tokens for output in outputs)),
    }


def usage(prompts: Iterable[Sequence[int]], num_output: int, num_cached: int) -> Fields:
    num_prompt = sum(map(len, prompts))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def given(fields: Mapping[str, Any]) -> Fields:
    return {name: value for name, value in fields.items() if value is not None}


def end_of(choice: CompletionOutput) -> Fields:
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}


# ---- chunks


# What the next chunks of a choice say; nothing, where the news has nothing that a client could use.
Telling = Callable[[StreamDelta], Iterable[Fields]]


class ChunkStream(ReplyStream):
    """A reply in chunks, then DONE; the first chunk may tell the ids of the prompt.

    `usage_at_end`: the chunk that ends the last choice tells the usage, unless a chunk of its own will; with
    it `num_thought`, the tokens of reasoning so far.
    """

    def __init__(
        self,
        beginnings: Sequence[Beginning],
        params: SamplingParams,
        request: OpenAIRequest,
        head: Fields,
        new_choice: Callable[[], Telling],
        *,
        tells_prompt_ids: bool = False,
        usage_at_end: bool = False,
        num_thought: Callable[[], int] | None = None,
    ) -> None:
        options = request.stream_options or StreamOptions()
        refuse_best_of(params)
        if request.use_beam_search:
            raise InvalidRequest.at("use_beam_search", "not together with stream")
        if params.prompt_logprobs is not None:
            raise InvalidRequest.at("prompt_logprobs", "not together with stream")
        super().__init__(beginnings, self._chunks_of)
        self._n = params.n
        self._choices = [new_choice() for _ in range(len(beginnings) * params.n)]
        self._head = head
        self._start = b'data: %b,"choices":[{"index":' % encode(head)[:-1]  # the same for all: made once
        self._tells_prompt_ids = tells_prompt_ids
        self._every_chunk_counts = options.include_usage and options.continuous_usage_stats
        self._last_chunk_counts = usage_at_end and not options.include_usage
        self._has_usage_chunk = options.include_usage
        self._num_open = len(self._choices)
        self._num_output = 0
        self._num_thought = num_thought
        self._generations: dict[int, Generation] = {}  # by their numbers

    def _chunks_of(self, news: StreamDelta) -> bytes:
        delta, piece, more = news.delta, b"", b""
        self._generations[news.number] = news.generation
        self._num_output += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._num_open -= 1
        index = news.number * self._n + delta.index
        for choice in self._choices[index](news):
            if self._tells_prompt_ids:
                self._tells_prompt_ids = False
                more = b',"prompt_token_ids":%b' % encode(news.generation.collector.request.prompt_ids)
            piece += self._chunk(index, choice, more)
            more = b""
        return piece if self._num_open else piece + self._end()

    def _chunk(self, index: int, choice: Fields, more: bytes) -> bytes:
        """`more` is JSON of further fields of the chunk, behind a comma."""
        is_last = self._num_open == 0 and choice["finish_reason"] is not None
        counts = self._every_chunk_counts or (self._last_chunk_counts and is_last)
        used = NULL
        if counts:  # a chunk that only says who speaks says nothing of tokens
            used = encode(self._usage(0 if "role" in choice.get("delta", ()) else self._num_output))
        return b'%b%d,%b],"usage":%b%b}\n\n' % (self._start, index, encode(choice)[1:], used, more)

    def _end(self) -> bytes:
        if not self._has_usage_chunk:
            return DONE
        return event({**self._head, "choices": [], "usage": self._usage(self._num_output)}) + DONE

    def _usage(self, num_output: int) -> Fields:
        collectors = [generation.collector for generation in self._generations.values()]
        num_cached = sum(collector.num_cached for collector in collectors)
        used = usage((one.request.prompt_ids for one in collectors), num_output, num_cached)
        if self._num_thought is not None:
            used["completion_tokens_details"] = {"reasoning_tokens": self._num_thought()}
        return used
