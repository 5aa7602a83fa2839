"""The numbers that an engine tells of itself, and what its front end makes of them for who watches it.

Plain data, no jax. Durations only: the clocks of two processes need not agree.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hex_llm.types import Chunk

if TYPE_CHECKING:  # it would bring jax along
    from hex_llm.models.spec import Layer, ModelSpec


class Stats(msgspec.Struct, array_like=True, kw_only=True):
    """An engine after one of its steps."""

    # Now:
    num_running: int = 0  # sequences
    num_waiting: int = 0
    num_blocks: int = 0  # that sequences may hold
    num_free_blocks: int = 0
    num_cached_blocks: int = 0  # that can be found by the prefix which they hold, free or not
    # Since its start:
    num_prefix_queries: int = 0  # tokens that were looked for in the prefix cache
    num_prefix_hits: int = 0  # tokens that were there
    num_preemptions: int = 0
    num_late_compiles: int = 0
    num_padding: int = 0  # tokens that steps computed in vain
    num_flops: float = 0.0  # of each device, as Work estimates them
    # Of this step:
    num_tokens: int = 0  # prefilled and decoded
    schedule_s: float = 0.0
    dispatch_s: float = 0.0
    wait_s: float = 0.0  # for the step before it
    waited: list[tuple[str, float]] = []  # requests that run for the first time, and seconds in the queue


class Work(NamedTuple):
    """The floating point operations that a model's shape asks for: of its matrices and of attention, two for
    each product that is added up. What padding costs is not among them."""

    per_token: int
    per_choice: int  # of the head, where a token is chosen
    per_pair: dict[float, int]  # how far back layers look: of a token with each that it sees, in all of them

    @classmethod
    def of(cls, spec: ModelSpec) -> Work:
        in_heads = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
        in_layers = sum(in_heads + spec.hidden_size * _ffn_width(layer) for layer in spec.layers)
        masks = (layer.mask for layer in spec.layers)
        depths = Counter(float(mask.window or mask.chunk or "inf") for mask in masks)
        per_pair = {far: 4 * spec.num_heads * spec.head_dim * num for far, num in depths.items()}
        return cls(2 * in_layers, 2 * spec.hidden_size * spec.vocab_size, per_pair)

    def in_step(self, chunks: Sequence[Chunk]) -> float:
        """There may be hundreds of them, so this is done in few passes."""
        _, positions, sizes, _, _, samples = zip(*chunks, strict=True)
        total = float(sum(sizes) * self.per_token + sum(samples) * self.per_choice)
        seen = [at + (size + 1) / 2 for at, size in zip(positions, sizes, strict=True)]  # on average
        for far, each in self.per_pair.items():
            pairs = [size * (num if num < far else far) for size, num in zip(sizes, seen, strict=True)]
            total += each * sum(pairs)
        return total


def _ffn_width(layer: Layer) -> int:
    """What each hidden value is multiplied with, for one token."""
    experts = layer.experts
    if experts is None:
        return 3 * layer.ffn_size
    return 3 * (experts.num_per_token * experts.size + (experts.shared_size or 0)) + experts.num


@dataclass
class Timeline:
    """One request's life in its front end, in seconds of time.monotonic, and its tokens."""

    num_choices: int = 1
    max_tokens: int | None = None
    arrived: float = field(default_factory=time.monotonic)
    sent: float = 0.0  # to the engine
    queued_s: float = 0.0  # there
    first: float = 0.0  # token; 0: none has come
    last: dict[int, float] = field(default_factory=dict)  # tokens of the choices
    ended: float = 0.0
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0

    @property
    def begun(self) -> float:
        """When the engine took it out of the queue."""
        return self.sent + self.queued_s

    @property
    def latest(self) -> float:
        return max(self.last.values(), default=self.first)


@dataclass
class Vitals:
    """How an engine is; its client keeps this."""

    progress: str = "starting"  # of loading
    memory: str = ""  # where it goes, in words
    stats: Stats = field(default_factory=Stats)
    num_steps: int = 0
    num_pending: int = 0  # requests whose end the engine has not told yet, also those that nobody waits for
    progressed: float = 0.0  # when it last did something, or got something to do

    @property
    def stalled_s(self) -> float:
        """How long there has been work and no step."""
        return time.monotonic() - self.progressed if self.num_pending else 0.0


class Observer:
    """Is told what happens to requests. This one does not care."""

    def began(self, timeline: Timeline) -> None:
        """Called by the task that asks for it."""

    def stepped(self, stats: Stats) -> None: ...

    def got_tokens(self, timeline: Timeline, index: int, num_tokens: int, now: float) -> None:
        """Before `timeline` knows of them."""

    def ended(self, timeline: Timeline, reasons: list[str]) -> None:
        """Once, with the reason of each choice that was not told before."""
