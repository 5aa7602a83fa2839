"""The scheduler on random traffic: nothing is lost, held twice or left behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hex_llm.errors import InvalidRequest
from hex_llm.scheduling.blocks import PADDING_BLOCK, BlockPool
from hex_llm.scheduling.scheduler import Scheduler
from hex_llm.scheduling.sequence import Sequence
from hex_llm.types import FinishReason, SamplingParams

REQUEST = st.tuples(st.integers(1, 40), st.integers(1, 30))


def sequence(name: str, num_prompt: int, max_tokens: int, recompute_len: int | None = None) -> Sequence:
    ids = list(range(num_prompt))
    return Sequence(name, ids, SamplingParams(), frozenset(), num_prompt + max_tokens, recompute_len)


def check(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    held = [block for s in scheduler.running for block in s.blocks]
    assert len(held) == len(set(held)), "a block has two holders"
    assert PADDING_BLOCK not in held
    assert not set(held) & set(pool._free)
    assert len(held) + pool.num_free == pool.num_usable


@settings(max_examples=150, deadline=None)
@given(
    st.lists(REQUEST, min_size=1, max_size=20),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([8, 16]),
    st.sampled_from([None, 20]),
)
def test_random_traffic(
    requests: list[tuple[int, int]], prefills: int, decodes: int, block_size: int, recompute_len: int | None
) -> None:
    scheduler = Scheduler(BlockPool(12, block_size), prefills, decodes)
    sequences = [sequence(str(i), *request, recompute_len) for i, request in enumerate(requests)]
    for s in sequences:
        scheduler.check_fits(s)
        scheduler.add(s)
    first_seen: list[str] = []
    for _ in range(5000):
        plan, rows = scheduler.schedule()
        if not rows:
            break
        assert len(plan.prefills) <= prefills
        assert len(plan.decodes) <= decodes
        assert not (plan.prefills and plan.decodes)
        for chunk, s in zip(plan.chunks, rows, strict=True):
            end = chunk.position + len(chunk.token_ids)
            assert s.token_ids[chunk.position : end] == list(chunk.token_ids)
            assert len(chunk.blocks) == -(-end // block_size)
            if s.request_id not in first_seen:
                first_seen.append(s.request_id)
            s.append(7)
            if s.finish_reason:
                scheduler.finish(s)
        check(scheduler)
    assert all(s.finish_reason is FinishReason.LENGTH for s in sequences)
    assert [len(s.output_ids) for s in sequences] == [max_tokens for _, max_tokens in requests]
    assert first_seen == [s.request_id for s in sequences], "first come, first served"
    assert scheduler.pool.num_free == scheduler.pool.num_usable


def test_growing_past_the_switch_is_prefilled_anew() -> None:
    """Longrope: past its original length all keys need other frequencies."""
    scheduler = Scheduler(BlockPool(12, 8), 1, 4)
    s = sequence("a", 6, 10, recompute_len=8)
    scheduler.add(s)
    kinds = []
    while not s.finish_reason:
        plan, _ = scheduler.schedule()
        [chunk] = plan.chunks
        kinds.append((len(chunk.token_ids), chunk.span))
        s.append(1)
    assert kinds == [(6, 6), (1, 7), (1, 8), (9, 9), (1, 10), (1, 11), (1, 12), (1, 13), (1, 14), (1, 15)]


def test_what_never_fits_is_refused() -> None:
    scheduler = Scheduler(BlockPool(4, 8), 1, 4)
    scheduler.check_fits(sequence("fits", 20, 4))
    with pytest.raises(InvalidRequest, match="need 4 KV blocks of 8 tokens, but there are only 3"):
        scheduler.check_fits(sequence("never", 20, 5))


def test_a_stop_token_wins_over_the_length() -> None:
    s = Sequence("a", [1], SamplingParams(), frozenset({9}), 2)
    s.append(9)
    assert s.finish_reason is FinishReason.STOP
