"""The closed set of shapes, and the one array that carries a step's metadata."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hex_llm.config import EngineConfig
from hex_llm.execution.batch import Paddings, StepShape, num_choices, pack, parts_of
from hex_llm.scheduling.limits import STEPS, UNIT, StepLimits, sizes
from hex_llm.types import Chunk, StepPlan


def test_sizes() -> None:
    assert sizes(40, 8, STEPS) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert sizes(200, 8, STEPS)[7:] == (40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 200)
    assert sizes(1000, 512) == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), "as Hex-LLM pads prompts"
    assert sizes(20, 6, STEPS) == (1, 2, 4, 6, 12, 18, 20)


def test_little_is_padded() -> None:
    found = sizes(8192, UNIT, STEPS)
    padding = [found[bisect_left(found, n)] / n - 1 for n in range(1, 1025)]
    assert sum(padding) / len(padding) < 0.1
    assert max(padding[64:]) < 0.25
    assert len(found) < 50


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from([8, 32]),
    st.sampled_from([None, 1, 7, 8]),
    st.sampled_from([None, 5, 64]),
    st.booleans(),
    st.sampled_from([None, 50, 1000]),
    st.sampled_from([0, 32, 10_000]),
)
def test_no_step_leaves_the_set(
    max_len: int,
    decodes: int,
    prefills: int,
    block: int,
    seqs_pad: int | None,
    len_pad: int | None,
    chunked: bool,
    budget: int | None,
    max_single: int,
) -> None:
    config = EngineConfig(
        max_decode_seqs=decodes,
        max_prefill_seqs=prefills,
        block_size=block,
        decode_seqs_padding=seqs_pad,
        prefill_seqs_padding=seqs_pad,
        prefill_len_padding=len_pad,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=budget,
    )
    limits = StepLimits.of(config, max_len, "cpu", None)
    paddings = Paddings(config, limits, max_len, max_single)
    shapes = set(paddings.all_shapes())
    chosen_for = {num_choices(n) for n in paddings.all_num_rows}
    assert {num_choices(shape.num_rows) for shape in shapes if shape.gives_logits} <= chosen_for

    def check(plan: StepPlan) -> None:
        shape, num_tokens = paddings.shape(plan), sum(chunk.num_tokens for chunk in plan.chunks)
        assert shape in shapes
        assert shape.num_tokens >= num_tokens
        assert shape.num_rows >= len(plan.chunks)
        assert shape.max_chunks >= len(plan.prefills) or shape.num_tokens <= max_single
        assert len(plan.chunks) <= paddings.num_rows(len(plan.chunks)) <= paddings.max_choices

    for length in {1, min(2, max_len), max_len // 2 + 1, max_len}:
        for n in range(1, decodes + 1):
            check(StepPlan(decodes=(chunk(length - 1, 1),) * n))
            if chunked and limits.max_tokens > n and n < decodes:
                prompt = chunk(0, min(length, limits.max_tokens - n))
                check(StepPlan((chunk(length - 1, 1),) * n, (prompt,)))
        for n in range(1, min(prefills, decodes) + 1):
            if n == 1 or n * length <= limits.max_tokens:
                check(
                    StepPlan(prefills=(chunk(0, min(length, limits.max_tokens) if chunked else length),) * n)
                )


def chunk(position: int, num_tokens: int) -> Chunk:
    return Chunk(1, position, num_tokens, range(1, 400), 1, True)


def test_pack() -> None:
    decodes = (Chunk(1, 9, 1, (3, 4, 99), 4, True), Chunk(2, 0, 1, (5,), 1, True))
    prefills = (Chunk(3, 7, 3, (6, 7), 10, False), Chunk(4, 0, 1, (8,), 20, True))
    for plan in (StepPlan(decodes), StepPlan(prefills=prefills), StepPlan(decodes, prefills)):
        shape = StepShape(9, 5, 2)
        parts = parts_of(pack(plan, shape, 8), shape)
        assert parts.num_decodes == len(plan.decodes)
        start = 0
        for row, one in enumerate(plan.chunks):
            end, places = start + one.num_tokens, np.arange(one.position, one.end)
            np.testing.assert_array_equal(parts.positions[start:end], places)
            np.testing.assert_array_equal(parts.rows[start:end], row)
            np.testing.assert_array_equal(
                parts.rope_lengths[start:end], np.maximum(one.rope_length, places + 1)
            )
            blocks = np.array(one.blocks)[places // 8]
            np.testing.assert_array_equal(parts.kv_slots[start:end], blocks * 8 + places % 8)
            assert parts.last_tokens[row] == end - 1
            assert parts.slots[row] == one.slot
            assert parts.chosen_slots[row] == (one.slot if one.samples else 0)
            start = end
        assert not parts.kv_slots[start:].any(), "padding writes to block 0"
        assert not parts.chosen_slots[len(plan.chunks) :].any(), "and to slot 0"
