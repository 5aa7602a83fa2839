"""The closed set of shapes, and the one array that carries a step's metadata."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hex_llm.config import EngineConfig
from hex_llm.execution.batch import Paddings, pack, padded, unpack
from hex_llm.types import Chunk, StepPlan


def test_padded() -> None:
    assert [padded(n, 8) for n in (1, 2, 3, 5, 8, 9, 16, 17)] == [1, 2, 4, 8, 8, 16, 16, 24]
    assert padded(20, 512) == 32, "a short prompt does not pay for a long one"
    assert padded(513, 512) == 1024


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from([8, 32]),
    st.integers(1, 9),
    st.integers(1, 64),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([None, 9, 50, 1000]),
)
def test_no_step_leaves_the_set(
    max_len: int,
    decodes: int,
    prefills: int,
    block: int,
    seqs_pad: int,
    len_pad: int,
    blocks_pad: int,
    chunked: bool,
    budget: int | None,
) -> None:
    config = EngineConfig(
        max_decode_seqs=decodes,
        max_prefill_seqs=prefills,
        block_size=block,
        decode_seqs_padding=seqs_pad,
        prefill_seqs_padding=seqs_pad,
        prefill_len_padding=len_pad,
        decode_blocks_padding=blocks_pad,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=budget,
    )
    paddings = Paddings(config, max_len)
    shapes = set(paddings.all_shapes())
    most = config.max_step_tokens(max_len)

    def check(plan: StepPlan) -> None:
        shape = paddings.shape(plan)
        assert shape in shapes
        assert shape.num_decodes >= len(plan.decodes)
        assert shape.num_prefills >= len(plan.prefills)
        assert shape.num_prefill_tokens >= sum(chunk.num_tokens for chunk in plan.prefills)
        assert shape.num_blocks >= max(-(-chunk.end // block) for chunk in plan.chunks)

    for length in {1, 2, max_len // 2 + 1, max_len}:
        for n in range(1, decodes + 1):
            check(StepPlan(decodes=(chunk(length - 1, 1),) * n))
            if chunked and most > n:
                check(StepPlan((chunk(length - 1, 1),) * n, (chunk(0, min(length, most - n)),)))
        for n in range(1, prefills + 1):
            if n == 1 or n * length <= most:
                check(StepPlan(prefills=(chunk(0, min(length, most) if chunked else length),) * n))


def chunk(position: int, num_tokens: int) -> Chunk:
    return Chunk(1, position, num_tokens, range(1, 400), 1, True)


def test_pack_and_unpack() -> None:
    decodes = (Chunk(1, 9, 1, (3, 4, 99), 4, True), Chunk(2, 0, 1, (5,), 1, True))
    prefills = (Chunk(3, 7, 3, (6, 7), 10, False), Chunk(4, 0, 1, (8,), 20, True))
    config = EngineConfig(block_size=8, max_decode_seqs=4, max_prefill_seqs=4, enable_chunked_prefill=True)
    for plan in (StepPlan(decodes), StepPlan(prefills=prefills), StepPlan(decodes, prefills)):
        shape = Paddings(config, 64).shape(plan)
        inputs = unpack(pack(plan, shape, 8), shape)  # type: ignore[arg-type]
        batch = inputs.batch
        tables = np.concatenate([batch.decode_tables, batch.prefill_tables])
        starts = [*range(len(plan.decodes)), *[shape.num_decodes + n for n in (0, 3)][: len(plan.prefills)]]
        rows = [*range(len(plan.decodes)), *[shape.num_decodes + n for n in (0, 1)][: len(plan.prefills)]]
        used = np.zeros(shape.num_tokens, bool)
        for row, start, one in zip(rows, starts, plan.chunks, strict=True):
            end, reached = start + one.num_tokens, -(-one.end // 8)
            places = np.arange(one.position, one.end)
            used[start:end] = True
            np.testing.assert_array_equal(batch.positions[start:end], places)
            np.testing.assert_array_equal(batch.sequences[start:end], row)
            np.testing.assert_array_equal(
                inputs.rope_lengths[start:end], np.maximum(one.rope_length, places + 1)
            )
            np.testing.assert_array_equal(tables[row, :reached], one.blocks[:reached])
            assert not tables[row, reached:].any(), "what it does not reach is padding"
            blocks = np.array(one.blocks)[places // 8]
            np.testing.assert_array_equal(batch.kv_slots[start:end], blocks * 8 + places % 8)
            assert inputs.last_tokens[row] == end - 1
            assert inputs.slots[row] == one.slot
            assert inputs.chosen_slots[row] == (one.slot if one.samples else 0)
        assert not batch.kv_slots[~used].any(), "padding writes to block 0"
