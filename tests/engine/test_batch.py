"""The closed set of shapes, and the one array that carries a step's metadata."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hex_llm.config import EngineConfig
from hex_llm.engine.batch import Paddings, pack, padded, unpack
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
)
def test_no_step_leaves_the_set(
    max_len: int, decodes: int, prefills: int, block: int, seqs_pad: int, len_pad: int, blocks_pad: int
) -> None:
    config = EngineConfig(
        max_decode_seqs=decodes,
        max_prefill_seqs=prefills,
        block_size=block,
        decode_seqs_padding=seqs_pad,
        prefill_len_padding=len_pad,
        decode_blocks_padding=blocks_pad,
    )
    paddings = Paddings(config, max_len)
    shapes = set(paddings.all_shapes())
    for num_tokens in {1, 2, max_len // 2 + 1, max_len}:
        blocks = tuple(range(-(-num_tokens // block)))
        for n in range(1, decodes + 1):
            assert paddings.shape(StepPlan(decodes=(Chunk((1,), 0, blocks, 1),) * n)) in shapes
        for n in range(1, prefills + 1):
            shape = paddings.shape(StepPlan(prefills=(Chunk((1,) * num_tokens, 0, blocks, 1),) * n))
            assert shape in shapes
            assert shape.num_prefill_tokens >= n * num_tokens
            assert shape.num_blocks >= len(blocks)


def test_pack_and_unpack() -> None:
    decodes = (Chunk((11,), 9, (3, 4), 10), Chunk((12,), 0, (5,), 1))
    prefills = (Chunk((21, 22, 23), 7, (6, 7), 10), Chunk((31,), 0, (8,), 1))
    config = EngineConfig(block_size=8, max_decode_seqs=4, max_prefill_seqs=4)
    plan = StepPlan(prefills=prefills)
    for part in (StepPlan(decodes=decodes), plan):
        shape = Paddings(config, 64).shape(part)
        inputs = unpack(pack(part, shape, 8), shape)
        batch = inputs.batch
        offset = 0
        for row, chunk in enumerate(part.chunks):
            end = offset + len(chunk.token_ids)
            places = np.arange(chunk.position, chunk.position + len(chunk.token_ids))
            tables = batch.decode_tables if part.decodes else batch.prefill_tables
            np.testing.assert_array_equal(inputs.token_ids[offset:end], chunk.token_ids)
            np.testing.assert_array_equal(batch.positions[offset:end], places)
            np.testing.assert_array_equal(batch.sequences[offset:end], row)
            np.testing.assert_array_equal(inputs.spans[offset:end], chunk.span)
            np.testing.assert_array_equal(tables[row, : len(chunk.blocks)], chunk.blocks)
            blocks = np.array(chunk.blocks)[places // 8]
            np.testing.assert_array_equal(batch.slots[offset:end], blocks * 8 + places % 8)
            assert inputs.last_tokens[row] == end - 1
            offset = end
        assert not batch.slots[offset:].any(), "padding writes to block 0"
