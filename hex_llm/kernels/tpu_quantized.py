"""Products with quantized matrices on TPUs: one Pallas kernel, which expands them in vector memory.

XLA would write the scales of all inputs to memory, and with them the matrix as floats. A matrix lies with its
inputs first, so that a scale is beside that of the next output, and what inputs share is one row.
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

from hex_llm.kernels.experts import Activation, GatedMatrix
from hex_llm.kernels.tpu_sinks import LANES

CHUNK = 128  # inputs that are expanded at a time, where they share a scale
TABLE_ROWS = 8  # else groups, since tables are read by so many rows, or by one
MAX_COLUMNS, MAX_ROWS, MIN_ROWS = 512, 256, 16  # of a block
FEW_ROWS = 128  # with many more, sums take longer to scale than weights
# Inputs of a product whose sums are scaled, and how many of these one waits for while others are prepared.
MAX_STEP, STEPS_AT_ONCE = 512, 16
MATRIX_BYTES, ROWS_BYTES = 8 << 20, 4 << 20  # of the expanded block, and of that of rows, at most
VECTOR_MEMORY = 64 << 20  # of 128 MiB: these, and what is read ahead
CENTRE = 8  # of codes of 4 bits, which the chips know with a sign


def can_multiply(codes: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    """Of these shapes on each device."""
    _, num_inputs, num_outputs = codes
    group = num_inputs // scales[1]
    return num_inputs % _chunk(group) == num_outputs % LANES == 0 and group % TABLE_ROWS == 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedColumns(GatedMatrix):
    """A Matrix (models/linear.py) [*outputs, *inputs]: a weight is code * scale + offset. C is 2 for gates
    and ups [F, 2, D], else 1."""

    codes: Any  # int4, int8 or float8_e4m3fn [C, K, N]
    scales: Any  # float32 [C, groups, N]
    offsets: Any | None  # likewise
    outputs: tuple[int, ...] = field(metadata={"static": True})

    def matmul(self, x: Array) -> Array:
        return jnp.moveaxis(_multiply(x, self), 0, -1).reshape(len(x), *self.outputs)

    def gated(self, x: Array, activation: Activation, bias: Array | None = None) -> Array:
        gates, ups = _multiply(x, self)
        if bias is not None:
            gates, ups = gates + bias[:, 0], ups + bias[:, 1]
        return activation(gates) * ups

    def rows(self, which: Array) -> Array:
        codes, scales = self.codes[0][:, which], self.scales[0][:, which]
        values = codes.astype(jnp.float32).reshape(len(scales), -1, len(which)) * scales[:, None]
        values = values if self.offsets is None else values + self.offsets[0][:, None, which]
        return values.reshape(-1, len(which)).T


def to_columns(
    codes: Array, scales: Array, offsets: Array | None, *, num_output_axes: int, bits: int, zero: int
) -> QuantizedColumns:
    """Codes are one in each place."""
    outputs = codes.shape[:num_output_axes]
    fused = 2 if num_output_axes == 2 else 1

    def turned(array: Array) -> Array:
        return array.reshape(-1, fused, array.size // math.prod(outputs)).transpose(1, 2, 0)

    if bits == 4:
        codes, zero = (codes.astype(jnp.int8) - CENTRE).astype(jnp.int4), zero - CENTRE
    if zero:
        offsets = (0 if offsets is None else offsets) - zero * scales
    offsets = None if offsets is None else turned(offsets)
    return QuantizedColumns(turned(codes), turned(scales), offsets, outputs)


def _multiply(x: Array, matrix: QuantizedColumns) -> Array:
    """x [T, K] -> [C, T, N]."""
    codes, scales, offsets = matrix.codes, matrix.scales, matrix.offsets
    (num_rows, num_inputs), (fused, _, num_outputs) = x.shape, codes.shape
    group = num_inputs // scales.shape[1]
    most = _multiple(min(MATRIX_BYTES // (num_inputs * x.dtype.itemsize), MAX_COLUMNS), LANES)
    width = next(n for n in range(most, 0, -LANES) if num_outputs % n == 0)
    # Of few rows it takes less to scale a group's sums than its weights.
    few = num_rows <= FEW_ROWS and group % CHUNK == 0
    most_rows = min(MAX_ROWS, _multiple(ROWS_BYTES // (num_inputs * x.dtype.itemsize), MIN_ROWS))
    rows = num_rows if few else min(num_rows, most_rows)
    table = pl.BlockSpec((None, scales.shape[1], width), lambda c, i, j: (c, 0, i))
    arrays = [x, codes, scales]
    specs = [
        pl.BlockSpec((rows, num_inputs), lambda c, i, j: (j, 0)),
        pl.BlockSpec((None, num_inputs, width), lambda c, i, j: (c, 0, i)),
        table,
    ]
    if offsets is not None:
        arrays, specs = [*arrays, offsets], [*specs, table]
    if few and offsets is not None:  # each adds the sum of its group's inputs
        sums = x.astype(jnp.float32).reshape(num_rows, -1, group).sum(axis=-1)
        arrays, specs = [*arrays, sums], [*specs, pl.BlockSpec(sums.shape, lambda c, i, j: (j, 0))]
    out: Array = pl.pallas_call(
        partial(_few_kernel if few else _kernel, group=group),
        grid=(fused, num_outputs // width, pl.cdiv(num_rows, rows)),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, rows, width), lambda c, i, j: (c, j, i)),
        scratch_shapes=[] if few else [pltpu.VMEM((num_inputs, width), x.dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=VECTOR_MEMORY
        ),
        out_shape=jax.ShapeDtypeStruct((fused, num_rows, num_outputs), x.dtype),
        name="quantized_product",
    )(*arrays)
    return out


def _kernel(x: Any, codes: Any, *refs: Any, group: int) -> None:
    *tables, out, matrix = refs
    chunk = _chunk(group)
    num_groups = max(chunk // group, 1)

    def expand(i: Array, _: None) -> None:
        inputs = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
        groups = pl.ds(pl.multiple_of(i * chunk // group, num_groups), num_groups)
        scales, *offsets = (table[groups, :][:, None] for table in tables)
        values = codes[inputs, :].astype(jnp.float32).reshape(num_groups, -1, matrix.shape[1]) * scales
        values = sum(offsets, values)
        matrix[inputs, :] = values.reshape(chunk, -1).astype(matrix.dtype)

    # The blocks of rows come one after the other, with the same matrix.
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        lax.fori_loop(0, len(matrix) // chunk, expand, None)

    product = jnp.dot(x[...], matrix[...], preferred_element_type=jnp.float32)
    out[...] = product.astype(out.dtype)


def _few_kernel(x: Any, codes: Any, scales: Any, *refs: Any, group: int) -> None:
    *shared, out = refs
    step = math.gcd(group, MAX_STEP)
    at_once = math.gcd(len(codes) // step, STEPS_AT_ONCE)

    def add(i: Array, total: Array) -> Array:
        for j in range(at_once):
            first = (i * at_once + j) * step
            inputs = pl.ds(pl.multiple_of(first, step), step)
            numbers = codes[inputs, :].astype(jnp.float32).astype(x.dtype)  # exact, of 8 bits too
            sums = jnp.dot(x[:, inputs], numbers, preferred_element_type=jnp.float32)
            total = total + sums * scales[pl.ds(first // group, 1), :]
        return total

    total = jnp.zeros(out.shape, jnp.float32)
    if shared:
        offsets, sums = shared
        total = jnp.dot(sums[...], offsets[...], precision=lax.Precision.HIGHEST)
    out[...] = lax.fori_loop(0, len(codes) // (at_once * step), add, total).astype(out.dtype)


def _chunk(group: int) -> int:
    return CHUNK if group % CHUNK == 0 else TABLE_ROWS * group


def _multiple(size: int, of: int) -> int:
    return max(size // of, 1) * of
