"""The numbers that an engine tells of itself, and what its front end makes of them for who watches it.

Plain data, no jax. Durations only: the clocks of two processes need not agree.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

import msgspec


class EngineState(Enum):
    """Whether an engine serves; each value is what those are told who ask for it."""

    LOADING = "the model is being loaded"
    SERVING = ""
    FAILED = "the engine has failed"
    RESTARTING = "the engine has failed and is being restarted"
    GIVEN_UP = "the engine has failed too often; it is not started again"
    SHUTTING_DOWN = "the server is shutting down"
    STOPPED = "the engine was stopped"


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
    num_flops: float = 0.0  # of each device, as work.py estimates them
    # Of this step:
    num_tokens: int = 0  # prefilled and decoded
    schedule_s: float = 0.0
    dispatch_s: float = 0.0
    wait_s: float = 0.0  # for the step before it
    rest_s: float = 0.0  # took commands in, told what the step before it had brought, made and sent reports
    waited: list[tuple[str, float]] = []  # requests that run for the first time, and seconds in the queue


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

    def add_tokens(self, index: int, num_tokens: int, now: float) -> float | None:
        """How long the choice has waited for them; None: they are its first."""
        before = self.last.get(index)
        self.last[index] = now
        self.num_generated += num_tokens
        return None if before is None else now - before

    @property
    def begun(self) -> float:
        """When the engine took it out of the queue."""
        return self.sent + self.queued_s

    @property
    def latest(self) -> float:
        return max(self.last.values(), default=self.first)


@dataclass
class EngineStatus:
    """How an engine is; its client keeps this."""

    state: EngineState = EngineState.LOADING
    progress: str = "starting"  # of loading
    memory: str = ""  # where it goes, in words
    stats: Stats = field(default_factory=Stats)
    num_steps: int = 0
    num_pending: int = 0  # requests whose end the engine has not told yet, also those that nobody waits for
    progressed: float = 0.0  # when it last did something, or was at it in good time, or got something to do

    @property
    def stalled_s(self) -> float:
        """How long there has been work and no step, nor one under way that may take so long."""
        return time.monotonic() - self.progressed if self.num_pending else 0.0


class Observer:
    """Is told what happens to requests. This one does not care."""

    def began(self, timeline: Timeline) -> None:
        """Called by the task that asks for it."""

    def got_first_token(self, timeline: Timeline) -> None: ...

    def stepped(self, stats: Stats, num_tokens: int, pauses: list[float]) -> None:
        """`num_tokens` came of it, for requests that are read; choices had waited so long for their next."""

    def ended(self, timeline: Timeline, reasons: list[str]) -> None:
        """Once, with the reason of each choice that was not told before."""
