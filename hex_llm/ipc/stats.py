"""The numbers that an engine tells of itself, and what its front end makes of them for who watches it.

Plain data, no jax. Durations only: the clocks of two processes need not agree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from hex_llm.admission import Limits


class EngineState(Enum):
    """Whether an engine serves; each value is what those are told who ask for it. In the order in which they
    will serve."""

    SERVING = ""
    DRAINING = "the engine finishes its requests and is then restarted"
    LOADING = "the model is being loaded"
    RESTARTING = "the engine has failed and is being restarted"
    FAILED = "the engine has failed"
    GIVEN_UP = "the engine has failed too often; it is not started again"
    SHUTTING_DOWN = "the server is shutting down"
    STOPPED = "the engine was stopped"


class Stats(msgspec.Struct, array_like=True, kw_only=True):
    """An engine after one of its steps."""

    # Now:
    num_running: int = 0  # sequences
    num_waiting: int = 0
    num_prefilling: int = 0  # of those that run, at workers that do nothing else (--disagg_topo)
    num_blocks: int = 0  # that sequences may hold
    num_free_blocks: int = 0
    num_cached_blocks: int = 0  # that can be found by the prefix which they hold, free or not
    # Since its start:
    num_prefix_queries: int = 0  # tokens that were looked for in the prefix cache
    num_prefix_hits: int = 0  # tokens that were there
    num_preemptions: int = 0
    num_late_compiles: int = 0
    num_padding: int = 0  # tokens that steps wasted on padding
    num_flops: float = 0.0  # of each device, as flops.py estimates them
    # Of this step:
    num_tokens: int = 0  # prefilled and decoded
    schedule_s: float = 0.0
    dispatch_s: float = 0.0
    wait_s: float = 0.0  # for the step before it
    rest_s: float = 0.0  # took commands in, told what the step before it had brought, made and sent reports
    running_adapters: list[str] = []  # names
    waiting_adapters: list[str] = []
    waited: list[tuple[str, float]] = []  # requests that run for the first time, and seconds in the queue


@dataclass
class EngineStatus:
    """How an engine is; its client keeps this."""

    state: EngineState = EngineState.LOADING
    host: int = 0  # where it is
    progress: str = "starting"  # of loading
    memory: str = ""  # where it goes, in words
    stats: Stats = field(default_factory=Stats)
    limits: Limits | None = None
    num_steps: int = 0
    num_pending: int = 0  # requests whose end the engine has not told yet, also those that nobody waits for
    progressed: float = 0.0  # when it last did something, or was at it in good time, or got something to do

    @property
    def stalled_s(self) -> float:
        """How long there has been work and no step, nor one under way that may take so long."""
        return time.monotonic() - self.progressed if self.num_pending else 0.0


def leading(engines: Sequence[EngineStatus]) -> EngineStatus:
    """The one that will serve first, if none does."""
    return min(engines, key=lambda one: [*EngineState].index(one.state))


def total(engines: Sequence[EngineStatus]) -> Stats:
    """The numbers of all of them as those of one."""
    return summed([one.stats for one in engines])


def summed(each: Sequence[Stats]) -> Stats:
    names = [name for name in Stats.__struct_fields__ if name.startswith("num_")]
    return Stats(**{name: sum(getattr(one, name) for one in each) for name in names})
