"""The nouns that requests and answers are made of; plain data, no jax.

Quantities have one vocabulary throughout the project: `num_*` counts, `max_*` limits, `*_ids` lists of
token ids; a *block* is the unit of KV memory that the user sees; a *sequence* is one request's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import NamedTuple

from hex_llm.errors import InvalidRequest


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens or the model's length limit
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. Greedy search only, until the sampler is built."""

    temperature: float = 0.0
    max_tokens: int | None = 16  # None: up to the model's length limit
    stop_token_ids: tuple[int, ...] = field(default_factory=tuple)
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.temperature != 0:
            raise InvalidRequest("temperature: only 0 (greedy) is built yet", "temperature")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {self.max_tokens}", "max_tokens")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> SamplingParams:
        """From request fields; a field that is not built is refused by its name."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidRequest(f"{name}: not a sampling parameter that is built yet", name)
        return cls(**values)  # type: ignore[arg-type]


@dataclass
class CompletionOutput:
    """One generated continuation."""

    index: int
    token_ids: list[int]
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: None = None


@dataclass
class RequestOutput:
    """Everything that came of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt: str | None = None
    finished: bool = True


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence that a step takes in."""

    token_ids: tuple[int, ...]
    position: int  # of the first of them
    blocks: tuple[int, ...]  # the sequence's KV blocks, in order of position
    span: int  # the length of sequence that rope frequencies are made for


class StepPlan(NamedTuple):
    """One step of the model; its rows are the decodes, then the prefills."""

    decodes: tuple[Chunk, ...] = ()  # one token each
    prefills: tuple[Chunk, ...] = ()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.decodes + self.prefills
