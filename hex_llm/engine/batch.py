"""From a StepPlan to one padded int32 array, and back to fields inside the compiled step.

The shapes that can occur are a closed set, drawn from the padding flags alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from hex_llm.config import EngineConfig
from hex_llm.kernels.attention import Batch
from hex_llm.types import StepPlan

Ints = npt.NDArray[np.int32]

PER_TOKEN = 5  # numbers: its id, position, span, sequence and slot
MIN_PREFILL_TOKENS = 16  # fewer cost as much, so they share this shape


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
    def packed_size(self) -> int:
        return PER_TOKEN * self.num_tokens + self.num_rows * (self.num_blocks + 1)


class StepInputs(NamedTuple):
    token_ids: jax.Array  # [T]
    spans: jax.Array  # [T]
    batch: Batch
    last_tokens: jax.Array  # [rows] the token of each row whose logits are wanted


class Paddings:
    """Rounds the sizes of a step up to the closed set."""

    def __init__(self, config: EngineConfig, max_len: int) -> None:
        self.config = config
        self.max_len = max_len

    def shape(self, plan: StepPlan) -> StepShape:
        if plan.prefills:
            return self._prefill_shape(
                len(plan.prefills), sum(len(chunk.token_ids) for chunk in plan.prefills)
            )
        return self._decode_shape(len(plan.decodes), max(len(chunk.blocks) for chunk in plan.decodes))

    def all_shapes(self) -> list[StepShape]:
        """Every shape that `shape` can give."""
        c = self.config
        decodes = {
            self._decode_shape(n, b)
            for n in _sizes(c.max_decode_seqs, c.decode_seqs_padding)
            for b in _sizes(self._blocks(self.max_len), c.decode_blocks_padding)
        }
        prefills = {
            self._prefill_shape(n, t)
            for n in _sizes(c.max_prefill_seqs, c.prefill_seqs_padding)
            for t in _sizes(c.max_prefill_seqs * self.max_len, c.prefill_len_padding)
        }
        return sorted(decodes | prefills)

    def _decode_shape(self, num_seqs: int, num_blocks: int) -> StepShape:
        c = self.config
        seqs = min(padded(num_seqs, c.decode_seqs_padding), c.max_decode_seqs)
        return StepShape(seqs, 0, 0, self._width(num_blocks))

    def _prefill_shape(self, num_seqs: int, num_tokens: int) -> StepShape:
        """A prompt starts at position 0, so its tokens alone say how many blocks they reach."""
        c = self.config
        tokens = padded(max(num_tokens, MIN_PREFILL_TOKENS), c.prefill_len_padding)
        seqs = min(padded(num_seqs, c.prefill_seqs_padding), c.max_prefill_seqs)
        return StepShape(0, seqs, tokens, self._width(self._blocks(tokens)))

    def _width(self, num_blocks: int) -> int:
        """Attention follows the tokens that are there, so a wide table costs only its own transfer."""
        return min(_up(num_blocks, self.config.decode_blocks_padding), self._blocks(self.max_len))

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


def pack(plan: StepPlan, shape: StepShape, block_size: int) -> Ints:
    """Padding is zeros: it writes to block 0, and what it computes is not read."""
    packed = np.zeros(shape.packed_size, np.int32)
    token_ids, positions, spans, sequences, slots, tables, last_tokens = _fields(packed, shape)
    first = len(plan.decodes)
    rows = [*range(first), *range(shape.num_decodes, shape.num_decodes + len(plan.prefills))]
    end = 0
    for i, (row, chunk) in enumerate(zip(rows, plan.chunks, strict=True)):
        start = shape.num_decodes if i == first else end
        end = start + len(chunk.token_ids)
        places = np.arange(chunk.position, chunk.position + len(chunk.token_ids))
        tables[row, : len(chunk.blocks)] = chunk.blocks
        token_ids[start:end] = chunk.token_ids
        positions[start:end] = places
        spans[start:end] = chunk.span
        sequences[start:end] = row
        slots[start:end] = tables[row, places // block_size] * block_size + places % block_size
        last_tokens[row] = end - 1
    return packed


def unpack(packed: jax.Array, shape: StepShape) -> StepInputs:
    token_ids, positions, spans, sequences, slots, tables, last_tokens = _fields(packed, shape)
    batch = Batch(positions, sequences, slots, tables[: shape.num_decodes], tables[shape.num_decodes :])
    return StepInputs(token_ids, spans, batch, last_tokens)


def _fields(packed: Any, shape: StepShape) -> tuple[Any, ...]:
    """Views of the packed array, on the host and in the compiled step alike."""
    tokens, rows, width = shape.num_tokens, shape.num_rows, shape.num_blocks
    per_token = [packed[i * tokens : (i + 1) * tokens] for i in range(PER_TOKEN)]
    tables_start, tables_end = PER_TOKEN * tokens, PER_TOKEN * tokens + rows * width
    tables = packed[tables_start:tables_end].reshape(rows, width)
    return (*per_token, tables, packed[tables_end:])
