"""Which tokens a sequence may take next: all that its request asks for, as one bit for each token.

Host side, numpy only. The words it makes are what a slot remembers (`slots.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hex_llm.execution.batch import Ints
from hex_llm.text.bad_words import BadWords
from hex_llm.text.grammar import Matcher
from hex_llm.types import Request


class TokenRules:
    """What a request asks of the tokens of all its choices, whatever comes before them."""

    def __init__(self, request: Request, stop_ids: Iterable[int], vocab_size: int) -> None:
        self._request, self._stop_ids, self._vocab_size = request, frozenset(stop_ids), vocab_size
        self._long_bad_words = [ids for ids in request.bad_word_ids if len(ids) > 1]
        # What may end it comes from there on.
        self.not_before = len(request.prompt_ids) + request.params.min_tokens

    @property
    def are_any(self) -> bool:
        """Most requests limit nothing."""
        params = self._request.params
        limits_all = params.allowed_token_ids is not None or self._request.bad_word_ids
        return bool(limits_all or (params.min_tokens > 0 and self._stop_ids))

    @cached_property
    def words(self) -> Ints:
        """What may stand anywhere."""
        allowed = self._request.params.allowed_token_ids
        words = _bits(np.arange(self._vocab_size) if allowed is None else allowed, self._vocab_size)
        bad = [ids[0] for ids in self._request.bad_word_ids if len(ids) == 1]
        return words & ~_bits(bad, self._vocab_size)

    @cached_property
    def not_stop(self) -> Ints:
        return ~_bits(list(self._stop_ids), self._vocab_size)

    @cached_property
    def bad_words(self) -> BadWords | None:
        """Those of several tokens."""
        return BadWords(self._long_bad_words) if self._long_bad_words else None

    @cached_property
    def longest_bad_word(self) -> int:
        return max(map(len, self._long_bad_words), default=0)


class Constraint:
    """One choice's. The masks of its grammar are made elsewhere and put here: that may take long."""

    def __init__(self, rules: TokenRules, matcher: Matcher | None = None) -> None:
        self.rules, self.matcher = rules, matcher
        self.is_needed = matcher is not None or rules.are_any  # where it is not, words are never made
        self._mask, self._num_masks = None if matcher is None else matcher.mask(), 0
        self._num_seen, self._bad_state = 0, 0  # tokens that the state of its bad words is of
        self._made_of: object = None  # what the words that were last asked for follow from

    @property
    def follows_tokens(self) -> bool:
        """Each word depends on the tokens before it, so the host must have read them."""
        return self.matcher is not None or self.rules.bad_words is not None

    def put_mask(self, mask: Ints) -> None:
        """Of its grammar, after all of its tokens."""
        self._mask, self._num_masks = mask, self._num_masks + 1

    def words(self, token_ids: list[int], position: int) -> Ints:
        """What may stand at `position`, after these tokens (which may be known only in part if the words do
        not follow them)."""
        self._made_of = self._makes(token_ids, position)
        words = self.rules.words
        if forbidden := self._forbidden(token_ids):
            words = words.copy()
            for token_id in forbidden:
                words.view(np.uint32)[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        if self._mask is not None:
            words = words & self._mask
        if position >= self.rules.not_before:
            return words
        early = words & self.rules.not_stop
        # A text that is complete by its grammar ends before min_tokens: nothing else may follow.
        return words if self.matcher is not None and not early.any() else early

    def changed_words(self, token_ids: list[int], position: int) -> Ints | None:
        """None: the same as when they were last asked for."""
        same = self._made_of == self._makes(token_ids, position)
        return None if same else self.words(token_ids, position)

    def _makes(self, token_ids: list[int], position: int) -> object:
        return position < self.rules.not_before, self._forbidden(token_ids), self._num_masks

    def _forbidden(self, token_ids: list[int]) -> frozenset[int]:
        """Tokens that would complete a bad word here."""
        bad = self.rules.bad_words
        if bad is None:
            return frozenset()
        # No word reaches further back than it is long.
        for i in range(max(self._num_seen, len(token_ids) - self.rules.longest_bad_word), len(token_ids)):
            self._bad_state = bad.after(self._bad_state, token_ids[i])
        self._num_seen = len(token_ids)
        return bad.forbidden(self._bad_state)


def _bits(token_ids: npt.ArrayLike, vocab_size: int) -> Ints:
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
