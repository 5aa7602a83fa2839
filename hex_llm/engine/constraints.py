"""Which tokens a sequence may take next: all that its request asks for, as one bit for each token.

Host side, numpy only. The words it makes are what a slot remembers (`slots.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hex_llm.engine.batch import Ints
from hex_llm.types import Request


class Matcher(Protocol):
    """What follows a grammar; `text/grammar.py` makes them."""

    def mask(self) -> Ints: ...
    def accept(self, token_id: int) -> bool: ...
    @property
    def stopped(self) -> bool: ...


class Constraint:
    def __init__(
        self, request: Request, stop_ids: Iterable[int], vocab_size: int, matcher: Matcher | None = None
    ) -> None:
        self._request, self._stop_ids, self._vocab_size = request, frozenset(stop_ids), vocab_size
        self._long_bad_words = [ids for ids in request.bad_word_ids if len(ids) > 1]
        # What may end it comes from there on.
        self._not_before = len(request.prompt_ids) + request.params.min_tokens
        self._was_early = True
        self.matcher = matcher

    @property
    def is_needed(self) -> bool:
        """Most requests limit nothing, and their words are never made."""
        params = self._request.params
        limits_all = params.allowed_token_ids is not None or self._request.bad_word_ids or self.matcher
        return bool(limits_all or (params.min_tokens > 0 and self._stop_ids))

    @cached_property
    def _words(self) -> Ints:
        """What may stand anywhere, whatever comes before it."""
        allowed = self._request.params.allowed_token_ids
        words = _bits(np.arange(self._vocab_size) if allowed is None else allowed, self._vocab_size)
        bad = [ids[0] for ids in self._request.bad_word_ids if len(ids) == 1]
        return words & ~_bits(bad, self._vocab_size)

    @cached_property
    def _not_stop(self) -> Ints:
        return ~_bits(list(self._stop_ids), self._vocab_size)

    @property
    def follows_tokens(self) -> bool:
        """Each word depends on the tokens before it, so the host must have read them."""
        return self.matcher is not None or bool(self._long_bad_words)

    def words(self, token_ids: list[int], position: int) -> Ints:
        """What may stand at `position`, after these tokens (which may be known only in part if the words do
        not follow them)."""
        self._was_early = position < self._not_before
        words = self._words
        ends = [ids[-1] for ids in self._long_bad_words if token_ids[1 - len(ids) :] == ids[:-1]]
        if ends:
            words = words & ~_bits(ends, 32 * len(words))
        if self.matcher is not None:
            words = words & self.matcher.mask()
        if not self._was_early:
            return words
        early = words & self._not_stop
        # A text that is complete by its grammar ends before min_tokens: nothing else may follow.
        return words if self.matcher is not None and not early.any() else early

    def changed_words(self, token_ids: list[int], position: int) -> Ints | None:
        """None: the same as when they were last asked for."""
        if not self.follows_tokens and self._was_early == (position < self._not_before):
            return None
        return self.words(token_ids, position)


def _bits(token_ids: npt.ArrayLike, vocab_size: int) -> Ints:
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
