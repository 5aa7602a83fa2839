"""Following grammars beside the engine's thread: a choice's tokens, then the mask of what may come next."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import count
from queue import PriorityQueue

from hex_llm.errors import HexError
from hex_llm.execution.batch import Ints
from hex_llm.text.grammar import Matcher, give_way

NICENESS = 5  # steps come first
NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))


class NotFollowed(HexError):
    """The model chose a token that the grammar does not allow."""


def next_mask(matcher: Matcher, token_ids: list[int]) -> Ints | None:
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
        self._queue: PriorityQueue[tuple[float, int, Future[Ints | None], Matcher, list[int]]] = (
            PriorityQueue()
        )
        self._numbers = count()  # no two entries are alike
        self._threads: list[threading.Thread] = []

    def submit(self, matcher: Matcher, token_ids: list[int]) -> Future[Ints | None]:
        """`next_mask`, later."""
        while len(self._threads) < self._num_threads:
            self._threads.append(threading.Thread(target=self._run, name="masks", daemon=True))
            self._threads[-1].start()
        done: Future[Ints | None] = Future()
        self._queue.put((matcher.budget.seconds_taken, next(self._numbers), done, matcher, token_ids))
        return done

    def _run(self) -> None:
        give_way(NICENESS)
        while True:
            _, _, done, matcher, token_ids = self._queue.get()
            if done.cancelled():
                continue
            with suppress(InvalidStateError):  # cancelled meanwhile
                try:
                    done.set_result(next_mask(matcher, token_ids))
                except Exception as error:
                    done.set_exception(error)
