"""Products of many rows on TPUs: one Pallas kernel, which makes gates of what it multiplies on the way.

XLA norms the rows, and applies the activation, in each tile of a product anew, which is more than its units
can do beside multiplying. And tables whose rows are no whole lanes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.experts import Activation
from hex_llm.kernels.matrix import FusedMatrix, PlainMatrix
from hex_llm.kernels.tpu_sinks import LANES

MANY_ROWS = 512  # fewer are bound by the reading of weights
MAX_INPUTS = 32768  # of which a block of the matrix fits into vector memory
TILE_ROWS = 16  # rows that lie together, of bfloat16
# Columns of a block of the matrix, and rows that meet it at a time. The units are fast from 256 columns on.
MIN_COLUMNS, MAX_COLUMNS, MAX_PART = 256, 1024, 1024
COLUMN_BYTES, PART_BYTES, ROWS_BYTES = 4 << 20, 8 << 20, 16 << 20  # of these, and of all rows that stay
MARGIN = 12 << 20  # for what the compiler keeps. What is not asked for holds tokens between kernels
SUMMED = (((1,), (1,)), ((), ()))


def can_multiply(shape: tuple[int, ...]) -> bool:
    """Of a part [C, N, K] on each device."""
    _, num_outputs, num_inputs = shape
    return num_outputs % LANES == num_inputs % LANES == 0 and num_inputs <= MAX_INPUTS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseRows(FusedMatrix):
    """A Matrix (models/linear.py) [*outputs, *inputs]. C is 2 for gates and ups [F, 2, D], else 1."""

    array: Any  # [C, N, K]
    outputs: tuple[int, ...] = field(metadata={"static": True})

    def products(self, x: Array) -> Array:
        if len(x) < MANY_ROWS:
            return jnp.einsum("tk,cnk->ctn", x, self.array, preferred_element_type=x.dtype)
        return multiply(x, self.array)

    def gated(self, x: Array, activation: Activation, bias: Array | None = None) -> Array:
        if bias is None and len(x) >= MANY_ROWS:
            return multiply(x, self.array, activation)[0]
        return super().gated(x, activation, bias)

    def rows(self, which: Array) -> Array:
        return self.array[0][which]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FilledTable(PlainMatrix):
    """A Matrix [V, D] whose rows are filled up to whole lanes. Others XLA lays column by column, and writes
    all of one anew wherever some of its rows are read."""

    array: Any  # [V, D or more]
    num_inputs: int = field(metadata={"static": True})

    def matmul(self, x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, self.array.shape[1] - self.num_inputs)))
        return lax.dot_general(x, self.array, SUMMED, preferred_element_type=x.dtype)

    def rows(self, which: Array) -> Array:
        return self.array[which][:, : self.num_inputs]


def to_table(array: Array) -> FilledTable:
    num_inputs = array.shape[1]
    return FilledTable(jnp.pad(array, ((0, 0), (0, -num_inputs % LANES))), num_inputs)


def to_rows(array: Array, *, num_output_axes: int) -> DenseRows:
    """Of a matrix [*outputs, *inputs]."""
    outputs = array.shape[:num_output_axes]
    fused = 2 if num_output_axes == 2 else 1
    return DenseRows(array.reshape(math.prod(outputs) // fused, fused, -1).swapaxes(0, 1), outputs)


def multiply(x: Array, array: Array, activation: Activation | None = None) -> Array:
    """x [T, K] with [C, N, K] -> [C, T, N]; with an activation gates and ups become one."""
    (num_rows, num_inputs), (fused, num_outputs, _) = x.shape, array.shape
    row_bytes, made = num_inputs * x.dtype.itemsize, 1 if activation else fused
    columns = _columns(num_outputs, COLUMN_BYTES // row_bytes)
    num_parts = pl.cdiv(num_rows, min(PART_BYTES // row_bytes, MAX_PART))
    part = pl.cdiv(num_rows, num_parts * TILE_ROWS) * TILE_ROWS
    held = max(
        n for n in range(1, num_parts + 1) if num_parts % n == 0 and n * part * row_bytes <= ROWS_BYTES
    )
    x = jnp.pad(x, ((0, num_parts * part - num_rows), (0, 0)))
    # Of the rows, of a block and what it gives, with the next and the last ones, and of sums.
    taken = held * part * row_bytes + 2 * fused * columns * (row_bytes + part * (x.dtype.itemsize + 2))
    out: Array = pl.pallas_call(
        partial(_kernel, activation=activation),
        grid=(num_parts // held, num_outputs // columns, held),
        in_specs=[
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec((fused, columns, num_inputs), lambda r, j, i: (0, j, 0)),
        ],
        out_specs=pl.BlockSpec((made, part, columns), lambda r, j, i: (0, r * held + i, j)),
        scratch_shapes=[
            pltpu.VMEM((held, part, num_inputs), x.dtype),
            pltpu.SemaphoreType.DMA((held,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=taken + MARGIN
        ),
        out_shape=jax.ShapeDtypeStruct((made, len(x), num_outputs), x.dtype),
        name="product_of_many_rows",
    )(x, array)
    return out[:, :num_rows]


def _kernel(x: Any, block: Any, out: Any, held: Any, arrived: Any, *, activation: Activation | None) -> None:
    """`block`: some columns of the matrix. Parts of the rows, which stay while all columns come by, are all
    sent for when the first is wanted."""
    first, column, i = pl.program_id(0) * len(held), pl.program_id(1), pl.program_id(2)
    rows = held.shape[1]

    def copy(i: Any) -> Any:
        source = x.at[pl.ds((first + i) * rows, rows)]
        return pltpu.make_async_copy(source, held.at[i], arrived.at[i])

    @pl.when((column == 0) & (i == 0))
    def _() -> None:
        for each in range(len(held)):
            copy(each).start()

    @pl.when(column == 0)
    def _() -> None:
        copy(i).wait()

    made = [
        lax.dot_general(held[i], block[c], SUMMED, preferred_element_type=jnp.float32)
        for c in range(len(block))
    ]
    if activation is not None:
        made = [activation(made[0]) * made[1]]
    for c, one in enumerate(made):
        out[c] = one.astype(out.dtype)


def _columns(num_outputs: int, most: int) -> int:
    """Of a block: the most that divide, and rather a multiple of MIN_COLUMNS."""
    sizes = range(LANES, min(num_outputs, max(min(most, MAX_COLUMNS), MIN_COLUMNS)) + 1, LANES)
    return max(
        (size for size in sizes if num_outputs % size == 0), key=lambda size: (size % MIN_COLUMNS == 0, size)
    )
