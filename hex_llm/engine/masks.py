"""Following grammars beside the engine's thread: a choice's tokens, then the mask of what may come next."""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import count

from hex_llm.engine.constraints import Matcher
from hex_llm.errors import HexError
from hex_llm.execution.batch import Ints
from hex_llm.text.grammar import give_way

NICENESS = 5  # steps come first
NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))


class NotFollowed(HexError):
    """The model chose a token that the grammar does not allow."""


def next_mask(matcher: Matcher, token_ids: Sequence[int]) -> Ints | None:
    """After these tokens; None: nothing may follow."""
    for token_id in token_ids:
        if not matcher.accept(token_id):
            raise NotFollowed(f"token {token_id} does not follow the grammar")
    return None if matcher.stopped else matcher.mask()


class MaskPool:
    """Threads, which start with the first work. Who has taken the least time so far goes first, so that one
    grammar which takes long to follow holds up others once for each thread, not once for each token."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._num_threads = num_threads
        self._queue: list[tuple[float, int, Future[Ints | None], Matcher, Sequence[int]]] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def submit(self, matcher: Matcher, token_ids: Sequence[int]) -> Future[Ints | None]:
        """`next_mask`, later."""
        done: Future[Ints | None] = Future()
        with self._changed:
            while len(self._threads) < self._num_threads:
                self._threads.append(threading.Thread(target=self._run, name="masks", daemon=True))
                self._threads[-1].start()
            taken = matcher.budget.seconds_taken
            heapq.heappush(self._queue, (taken, next(self._numbers), done, matcher, token_ids))
            self._changed.notify()
        return done

    def _run(self) -> None:
        give_way(NICENESS)
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                _, _, done, matcher, token_ids = heapq.heappop(self._queue)
            if done.cancelled():
                continue
            with suppress(InvalidStateError):  # cancelled meanwhile
                try:
                    done.set_result(next_mask(matcher, token_ids))
                except Exception as error:
                    done.set_exception(error)
