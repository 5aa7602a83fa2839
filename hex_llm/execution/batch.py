"""From a StepPlan to one padded int32 array, and back to fields inside the compiled step.

What a step costs depends on how many tokens it takes in, whoever they belong to. So that number alone is its
shape, and who they belong to is data. The sizes that can occur are a closed set, drawn from the flags alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hex_llm.config import EngineConfig
from hex_llm.kernels.attention import Batch
from hex_llm.scheduling.limits import COARSE, UNIT, StepLimits, sizes
from hex_llm.types import Chunk, StepPlan

Ints = npt.NDArray[np.int32]

MAX_ALONE = 256  # decodes that have programs of their own; of more a launch for chunks is a small part


class StepShape(NamedTuple):
    """What a compiled step is specialised on."""

    num_tokens: int
    num_rows: int  # sequences, at most
    max_chunks: int  # of prompts; 0: every token can attend by itself (kernels/attention.py: Batch)
    adapted: bool = False  # some rows have adapters (models/adapters.py)

    @property
    def gives_logits(self) -> bool:
        """Where all tokens may be decodes; otherwise few are the last of their rows, and another program
        (programs.Logits) is for these."""
        return self.max_chunks == 0 and self.num_tokens <= min(self.num_rows, MAX_ALONE)

    @property
    def packed_size(self) -> int:
        return sum(map(math.prod, packed_shapes(self)))


class Packed(NamedTuple):
    """Parts of the packed array: their shapes, views of them on the host, or slices in the compiled step."""

    positions: Any
    rope_lengths: Any
    rows: Any
    kv_slots: Any
    last_tokens: Any  # the token of each row whose logits are wanted
    slots: Any  # where the row's sequence is remembered
    chosen_slots: Any  # the same, or padding's if the row does not choose a token
    num_decodes: Any


def packed_shapes(shape: StepShape) -> Packed:
    """The one place that says what is packed, in the order of Packed's fields."""
    token, row = (shape.num_tokens,), (shape.num_rows,)
    return Packed(
        positions=token,
        rope_lengths=token,
        rows=token,
        kv_slots=token,
        last_tokens=row,
        slots=row,
        chosen_slots=row,
        num_decodes=(),
    )


def parts_of(packed: Any, shape: StepShape) -> Packed:
    """On the host and in the compiled step alike."""
    parts, start = [], 0
    for part in packed_shapes(shape):
        end = start + math.prod(part)
        parts.append(packed[start:end].reshape(part))
        start = end
    return Packed(*parts)


def batch_of(parts: Packed, tables: Any, shape: StepShape) -> Batch:
    """As kernels see it, with the block tables [R, B] of its rows."""
    return Batch(parts.positions, parts.rows, parts.kv_slots, tables, parts.num_decodes, shape.max_chunks)


class Paddings:
    """Rounds the sizes of a step up to the closed set."""

    def __init__(self, config: EngineConfig, limits: StepLimits, max_len: int, max_single: int) -> None:
        """`max_single`: a step of so many tokens is as fast if each attends by itself, chunk or not."""
        self.config, self.limits, self.max_len, self.max_single = config, limits, max_len, max_single
        self.max_chunks = padded(limits.max_prefill_seqs, config.prefill_seqs_padding or 1)
        self.table_width = padded(-(-max_len // config.block_size), config.decode_blocks_padding or 1)
        # Of which logits are computed beside a step: that takes so little of it that few sizes will do.
        coarse = sizes(limits.max_decode_seqs, UNIT, COARSE)
        self.all_num_rows = limits.decode_sizes if config.decode_seqs_padding else coarse

    def shape(self, plan: StepPlan) -> StepShape:
        return self._shape(sum(chunk.num_tokens for chunk in plan.chunks), bool(plan.prefills))

    def all_shapes(self) -> list[StepShape]:
        """Every shape that `shape` can give."""
        shapes = {self._shape(n, True) for n in self.limits.step_sizes}
        return sorted(shapes | {self._shape(n, False) for n in self.limits.decode_sizes})

    def num_rows(self, num_rows: int) -> int:
        """Rows of which logits are computed, for so many."""
        return _next(self.all_num_rows, num_rows)

    @property
    def max_choices(self) -> int:
        return num_choices(self.limits.max_decode_seqs)

    def _shape(self, num_tokens: int, has_prefills: bool) -> StepShape:
        alone = not has_prefills and num_tokens <= MAX_ALONE
        size = _next(self.limits.decode_sizes if alone else self.limits.step_sizes, num_tokens)
        has_chunks = not alone and size > self.max_single
        return StepShape(size, min(size, self.limits.max_decode_seqs), self.max_chunks if has_chunks else 0)


def num_choices(num_rows: int) -> int:
    """Rows that tokens are chosen for: 1, 8, 16, 32 and so on, so that few programs do it."""
    return 1 if num_rows == 1 else max(1 << (num_rows - 1).bit_length(), 8)


def padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _next(sizes: Sequence[int], n: int) -> int:
    return sizes[bisect_left(sizes, n)]


def pack(plan: StepPlan, shape: StepShape, block_size: int) -> Ints:
    """Padding is zeros: it writes to block 0 and slot 0, and what it computes is not read."""
    packed = np.zeros(shape.packed_size, np.int32)
    parts = parts_of(packed, shape)
    num_decodes = len(plan.decodes)
    parts.num_decodes[...] = num_decodes
    if num_decodes:
        _pack_decodes(parts, plan.decodes, block_size)
    start = num_decodes
    for row, chunk in enumerate(plan.prefills, num_decodes):
        _pack_chunk(parts, row, start, chunk, block_size)
        start += chunk.num_tokens
    return packed


def _pack_decodes(parts: Packed, decodes: tuple[Chunk, ...], block_size: int) -> None:
    """All at once: there are many, and in every step."""
    fields = [
        (c.slot, c.position, c.blocks[c.position // block_size], c.rope_length, c.samples) for c in decodes
    ]
    slots, positions, blocks, rope_lengths, samples = np.array(fields, np.int32).T
    num = len(decodes)
    parts.positions[:num], parts.rope_lengths[:num] = positions, np.maximum(rope_lengths, positions + 1)
    parts.rows[:num] = parts.last_tokens[:num] = np.arange(num)
    parts.kv_slots[:num] = blocks * block_size + positions % block_size
    parts.slots[:num], parts.chosen_slots[:num] = slots, slots * samples


def _pack_chunk(parts: Packed, row: int, start: int, chunk: Chunk, block_size: int) -> None:
    end, places = start + chunk.num_tokens, np.arange(chunk.position, chunk.end)
    parts.positions[start:end], parts.rows[start:end] = places, row
    parts.rope_lengths[start:end] = np.maximum(chunk.rope_length, places + 1)
    blocks = np.array(chunk.blocks[: -(-chunk.end // block_size)], np.int32)
    parts.kv_slots[start:end] = blocks[places // block_size] * block_size + places % block_size
    parts.last_tokens[row], parts.slots[row] = end - 1, chunk.slot
    parts.chosen_slots[row] = chunk.slot if chunk.samples else 0
