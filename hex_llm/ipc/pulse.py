"""Time as whoever looks on has seen it pass, and what an engine's beats tell by it. No jax."""

from __future__ import annotations

import time
from typing import Protocol

BEAT_S = 0.5  # between two beats of an engine


class Watch:
    """For who looks every `tick_s`. A pause of his own (a signal, a laptop that is shut) counts as two ticks:
    whoever he looks at may have been stopped with him, and is not to be blamed for that time."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._looked = time.monotonic()

    def look(self) -> float:
        """Seconds since the last look."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        return min(passed, 2 * self._tick_s)


class Compiling(Protocol):
    @property
    def is_compiling(self) -> bool: ...


class Pulse:
    """How long an engine is at its present round, in which it takes commands in and steps. Its thread tells
    of rounds; the one that beats looks on."""

    def __init__(self) -> None:
        self._watch = Watch(BEAT_S)
        self._engine: Compiling | None = None  # None: it waits for work, or there is none yet
        self._num_rounds = self._num_seen = 0
        self._seconds = 0.0

    def begin(self, engine: Compiling) -> None:
        """A round, and the end of the one before."""
        self._engine = engine
        self._num_rounds += 1

    def rest(self) -> None:
        self._engine = None

    def look(self) -> tuple[bool, float]:
        """Whether it is at one, and for how many seconds, less those that it compiled."""
        passed, num_rounds, engine = self._watch.look(), self._num_rounds, self._engine
        if engine is None or num_rounds != self._num_seen:
            self._num_seen, self._seconds = num_rounds, 0.0
        elif not engine.is_compiling:
            self._seconds += passed
        return engine is not None, self._seconds
