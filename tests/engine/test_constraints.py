"""Which tokens may come next, by all that a request asks for at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from hex_llm.engine.constraints import Constraint, Matcher, TokenRules
from hex_llm.sampling_params import SamplingParams
from hex_llm.text.grammar import Budget
from hex_llm.types import Request

PROMPT, EOS, STOP, NUM_TOKENS = [5, 6], 2, 9, 70


class OnlyThese:
    """A grammar after which only these tokens may follow."""

    stopped = False
    budget = Budget()

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.token_ids = set(token_ids)

    def mask(self) -> np.ndarray:
        flags = np.isin(np.arange(96), list(self.token_ids)).astype(np.uint8)
        return np.packbits(flags, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        return token_id in self.token_ids

    def copy(self) -> OnlyThese:
        return self


def allowed(
    params: SamplingParams, matcher: Matcher | None, num_generated: int, bad: tuple[list[int], ...] = ()
) -> set[int]:
    request = Request("r", PROMPT, params, bad_word_ids=list(bad))
    words = Constraint(TokenRules(request, (EOS, STOP), NUM_TOKENS), matcher).words(
        [*PROMPT, *[7] * num_generated], len(PROMPT) + num_generated
    )
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


AT_LEAST_3 = SamplingParams(min_tokens=3)


def test_nothing_ends_before_min_tokens() -> None:
    assert allowed(AT_LEAST_3, None, 2) == set(range(NUM_TOKENS)) - {EOS, STOP}
    assert allowed(AT_LEAST_3, None, 3) == set(range(NUM_TOKENS))


@pytest.mark.parametrize(
    ("follow", "num_generated", "left"),
    [
        ({EOS, 7, 8}, 2, {7, 8}),
        ({EOS, 7, 8}, 3, {EOS, 7, 8}),
        ({EOS}, 0, {EOS}),
        ({EOS}, 2, {EOS}),
        ({EOS, STOP}, 2, {EOS, STOP}),
        (set(), 2, set()),
    ],
)
def test_a_complete_grammar_ends_before_min_tokens(
    follow: set[int], num_generated: int, left: set[int]
) -> None:
    assert allowed(AT_LEAST_3, OnlyThese(follow), num_generated) == left


def test_what_is_forbidden_for_good_does_not_come_back() -> None:
    only_ends = SamplingParams(min_tokens=3, allowed_token_ids=(EOS,))
    assert allowed(only_ends, None, 2) == set()
    assert allowed(AT_LEAST_3, OnlyThese({EOS, 8}), 2, bad=([7, 8],)) == {EOS}
    assert allowed(AT_LEAST_3, OnlyThese({8}), 2, bad=([7, 8],)) == set()
