"""From a StepPlan to one padded int32 array, and back to fields inside the compiled step.

The shapes that can occur are a closed set, drawn from the flags alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from hex_llm.config import EngineConfig
from hex_llm.kernels.attention import Batch
from hex_llm.types import Chunk, StepPlan

Ints = npt.NDArray[np.int32]

MIN_PREFILL_TOKENS = 32  # fewer cost nearly as much, so they share this shape
FINE_SIZES = 8  # multiples of decode_seqs_padding; past them, four sizes for each doubling
MIXED_STEP = 4  # sizes of steps that decode and prefill are powers of it: two sizes multiply


class StepShape(NamedTuple):
    """What a compiled step is specialised on."""

    num_decodes: int
    num_prefills: int
    num_prefill_tokens: int
    num_blocks: int  # width of the block tables

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_prefills

    @property
    def num_choices(self) -> int:
        """Rows that tokens are chosen for: the next power of two, so that few programs do it."""
        return 1 << (self.num_rows - 1).bit_length()

    @property
    def packed_size(self) -> int:
        return sum(map(math.prod, packed_shapes(self)))


class Packed(NamedTuple):
    """Parts of the packed array: their shapes, views of them on the host, or slices in the compiled step."""

    positions: Any
    rope_lengths: Any
    rows: Any
    kv_slots: Any
    tables: Any
    last_tokens: Any
    slots: Any
    chosen_slots: Any


def packed_shapes(shape: StepShape) -> Packed:
    """The one place that says what is packed, in the order of Packed's fields."""
    token, row = (shape.num_tokens,), (shape.num_rows,)
    return Packed(
        positions=token,
        rope_lengths=token,
        rows=token,
        kv_slots=token,
        tables=(shape.num_rows, shape.num_blocks),
        last_tokens=row,
        slots=row,
        chosen_slots=row,
    )


def parts_of(packed: Any, shape: StepShape) -> Packed:
    """On the host and in the compiled step alike."""
    parts, start = [], 0
    for part in packed_shapes(shape):
        end = start + math.prod(part)
        parts.append(packed[start:end].reshape(part))
        start = end
    return Packed(*parts)


class StepInputs(NamedTuple):
    rope_lengths: jax.Array  # [T]
    batch: Batch
    last_tokens: jax.Array  # [R] the token of each row whose logits are wanted
    slots: jax.Array  # [R] where the row's sequence is remembered
    chosen_slots: jax.Array  # [R] the same, or padding's if the row does not choose a token


class Paddings:
    """Rounds the sizes of a step up to the closed set."""

    def __init__(self, config: EngineConfig, max_len: int) -> None:
        self.config = config
        self.max_len = max_len
        most = config.max_prefill_seqs * max_len
        budget = min(config.max_step_tokens(max_len), most)
        self.max_prefill_tokens = budget if config.enable_chunked_prefill else max(budget, max_len)

    def shape(self, plan: StepPlan) -> StepShape:
        num_tokens = sum(chunk.num_tokens for chunk in plan.prefills)
        if plan.decodes and plan.prefills:
            return self._mixed_shape(len(plan.decodes), len(plan.prefills), num_tokens)
        if plan.prefills:
            return self._prefill_shape(len(plan.prefills), num_tokens)
        return self._decode_shape(len(plan.decodes), max(self._blocks(chunk.end) for chunk in plan.decodes))

    def all_shapes(self) -> list[StepShape]:
        """Every shape that `shape` can give."""
        c = self.config
        seqs = range(1, c.max_decode_seqs + 1)
        prefill_seqs = range(1, c.max_prefill_seqs + 1, c.prefill_seqs_padding)
        widths = _sizes(self._blocks(self.max_len), c.decode_blocks_padding)
        tokens = _sizes(self.max_prefill_tokens, c.prefill_len_padding)
        shapes = {self._decode_shape(n, b) for n in seqs for b in widths}
        shapes |= {self._prefill_shape(n, t) for n in prefill_seqs for t in tokens}
        if c.enable_chunked_prefill:
            shapes |= {self._mixed_shape(n, p, t) for n in seqs for p in prefill_seqs for t in tokens}
        return sorted(shapes)

    def _decode_shape(self, num_seqs: int, num_blocks: int) -> StepShape:
        c = self.config
        unit = c.decode_seqs_padding
        while num_seqs > FINE_SIZES * unit:  # there, rows cost less than shapes, which take long to compile
            unit *= 2
        seqs = min(padded(num_seqs, unit), c.max_decode_seqs)
        # Attention follows the tokens that are there, so a wide table costs only its own transfer.
        width = min(_up(num_blocks, c.decode_blocks_padding), self._blocks(self.max_len))
        return StepShape(seqs, 0, 0, width)

    def _prefill_shape(self, num_seqs: int, num_tokens: int) -> StepShape:
        c = self.config
        tokens = padded(max(num_tokens, MIN_PREFILL_TOKENS), c.prefill_len_padding)
        # A row that is not there costs next to nothing beside the tokens, so there are no powers of two.
        seqs = min(_up(num_seqs, c.prefill_seqs_padding), c.max_prefill_seqs)
        return StepShape(0, seqs, tokens, self._blocks(self.max_len))

    def _mixed_shape(self, num_decodes: int, num_prefills: int, num_tokens: int) -> StepShape:
        c = self.config
        seqs = min(_power(num_decodes), c.max_decode_seqs)
        largest = self._prefill_shape(num_prefills, self.max_prefill_tokens)
        tokens = min(max(_power(num_tokens), MIN_PREFILL_TOKENS), largest.num_prefill_tokens)
        return largest._replace(num_decodes=seqs, num_prefill_tokens=tokens)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)


def padded(n: int, multiple: int) -> int:
    """The next multiple; below one multiple the next power of two."""
    return _up(n, multiple) if n >= multiple else min(1 << (n - 1).bit_length(), multiple)


def _sizes(largest: int, multiple: int) -> set[int]:
    """What `padded` gives for 1 to `largest`."""
    powers = (1 << i for i in range(min(largest, multiple).bit_length()))
    return {padded(n, multiple) for n in (largest, *powers, *range(multiple, largest + 1, multiple))}


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _power(n: int) -> int:
    """The next power of MIXED_STEP."""
    power = 1
    while power < n:
        power *= MIXED_STEP
    return power


def pack(plan: StepPlan, shape: StepShape, block_size: int) -> Ints:
    """Padding is zeros: it writes to block 0 and slot 0, and what it computes is not read."""
    packed = np.zeros(shape.packed_size, np.int32)
    parts = parts_of(packed, shape)
    for row, chunk in enumerate(plan.decodes):
        _pack_chunk(parts, row, row, chunk, block_size)
    start = shape.num_decodes
    for row, chunk in enumerate(plan.prefills, shape.num_decodes):
        _pack_chunk(parts, row, start, chunk, block_size)
        start += chunk.num_tokens
    return packed


def _pack_chunk(parts: Packed, row: int, start: int, chunk: Chunk, block_size: int) -> None:
    end = start + chunk.num_tokens
    reached = -(-chunk.end // block_size)
    parts.tables[row, :reached] = chunk.blocks[:reached]
    if chunk.num_tokens == 1:  # most are, and plain numbers are several times faster than arrays
        place = chunk.position
        parts.positions[start], parts.rows[start] = place, row
        parts.rope_lengths[start] = max(chunk.rope_length, place + 1)
        parts.kv_slots[start] = chunk.blocks[place // block_size] * block_size + place % block_size
    else:
        places = np.arange(chunk.position, chunk.end)
        parts.positions[start:end] = places
        parts.rope_lengths[start:end] = np.maximum(chunk.rope_length, places + 1)
        parts.rows[start:end] = row
        parts.kv_slots[start:end] = parts.tables[row, places // block_size] * block_size + places % block_size
    parts.last_tokens[row], parts.slots[row] = end - 1, chunk.slot
    parts.chosen_slots[row] = chunk.slot if chunk.samples else 0


def unpack(packed: jax.Array, shape: StepShape) -> StepInputs:
    parts, num_decodes = parts_of(packed, shape), shape.num_decodes
    decodes, prefills = parts.tables[:num_decodes], parts.tables[num_decodes:]
    batch = Batch(parts.positions, parts.rows, parts.kv_slots, decodes, prefills)
    return StepInputs(parts.rope_lengths, batch, parts.last_tokens, parts.slots, parts.chosen_slots)
