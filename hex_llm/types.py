"""The nouns that requests, steps and answers are made of; plain data, no jax.

Quantities have one vocabulary throughout the project: `num_*` counts, `max_*` limits, `*_ids` lists of
token ids; a *block* is the unit of KV memory that the user sees; a *sequence* is one choice of one request;
a *slot* is where the device remembers a running sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypedDict

import msgspec

from hex_llm.sampling_params import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's length limit
    ABORT = "abort"
    ERROR = "error"


# ---- what goes into the engine, and what comes out


class AdapterRef(NamedTuple):
    """An adapter that a request names."""

    name: str  # as it is told
    source: str  # where its files are: gs://..., a hub's id, or a folder


@dataclass(frozen=True)
class Request:
    """One prompt, as the engine takes it."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    bad_word_ids: list[list[int]] = field(default_factory=list)  # params.bad_words as token ids
    # What else changes KV, by the position from which on: an adapter at 0, an image at its place.
    extra_keys: dict[int, str] = field(default_factory=dict)
    adapter: AdapterRef | None = None


class RequestOptions(TypedDict, total=False):
    """Those fields of a request that front ends pass on as they are."""

    priority: int
    cache_salt: str
    adapter: AdapterRef | None


class TokenLogprobs(NamedTuple):
    """Of one position: the token that stands there, and the likeliest, in order."""

    logprob: float
    rank: int  # 1: the likeliest
    top_ids: list[int]
    top_logprobs: list[float]


class Update(msgspec.Struct, array_like=True):
    """What one step brought for one choice of a request. The one with a finish_reason is its last.

    There is one for each token, so it is made to be sent quickly.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []  # one for each token, if wanted
    prompt_logprobs: list[TokenLogprobs] = []  # from the second token on, if wanted
    num_cached: int = 0  # prompt tokens that the prefix cache held
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the one of params.stop_token_ids that ended it
    error: str = ""  # what went wrong, with FinishReason.ERROR
    param: str | None = None  # the field of the request that is at fault, if one is
    kind: str = ""  # the name of the error's class, where that says more than `param` does
    pooled: bytes = b""  # float32s: the vector that params.pooling asks for
    num_preempted: int = 0  # in all, with a finish_reason
    num_published: int = 0  # tokens, from the first on, that the prefix cache holds now


# ---- what the public API returns, under the names that vLLM's users know


@dataclass
class Logprob:
    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # token id -> ...: the chosen token and the likeliest


@dataclass
class CompletionOutput:
    """One generated continuation."""

    index: int
    token_ids: list[int]
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string; None: the end token, or none
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    error: str = ""
    error_param: str | None = None  # the field of the request that caused it, if one did
    error_kind: str = ""  # the name of its class, where that says more than the field does


@dataclass
class RequestOutput:
    """Everything that came of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt: str | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = True
    pooled: bytes = b""  # as Update's
    num_cache_creation_tokens: int = 0  # of the prompt, that the prefix cache has got by this request


@dataclass
class EmbeddingOutput:
    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    """A prompt's embedding."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(frozen=True)
class Pooling:
    """How a model's hidden states become an embedding, or the score of a text."""

    kind: str = "last"  # one of POOLINGS
    normalize: bool = True
    size: int = 0  # of an embedding
    token_ids: tuple[int, ...] = ()  # of the words for no and yes, by which a reranker scores
    problem: str = ""  # why this server makes none


# ---- what one step of the model does


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence that a step takes in; the tokens themselves are in its slot."""

    slot: int
    position: int  # of the first of them
    num_tokens: int
    blocks: ListLike[int]  # the sequence's KV blocks, in order of position; maybe more than it reaches
    rope_length: int  # rope frequencies are made for a sequence of at least this length
    samples: bool  # the chunk ends with the sequence's last token, so the next one is chosen

    @property
    def end(self) -> int:
        return self.position + self.num_tokens


class StepPlan(NamedTuple):
    """One step of the model; its rows are the decodes, then the prefills."""

    decodes: tuple[Chunk, ...] = ()  # one token each
    prefills: tuple[Chunk, ...] = ()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.decodes + self.prefills
