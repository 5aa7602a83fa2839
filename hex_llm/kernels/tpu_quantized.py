"""Products with quantized matrices on TPUs: one Pallas kernel, which expands them in vector memory.

XLA would write the scales of all inputs to memory, and with them the matrix as floats. A matrix lies with its
inputs first, so that a scale is beside that of the next output, and what inputs share is one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.matrix import FusedMatrix
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
class QuantizedColumns(FusedMatrix):
    """A Matrix (models/linear.py) [*outputs, *inputs]: a weight is code * scale + offset. C is 2 for gates
    and ups [F, 2, D], else 1."""

    codes: Any  # int4, int8 or float8_e4m3fn [C, K, N]
    scales: Any  # float32 [C, groups, N]
    offsets: Any | None  # likewise
    outputs: tuple[int, ...] = field(metadata={"static": True})

    def products(self, x: Array) -> Array:
        return _multiply(x, self)

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
    few = is_summed_first(num_rows, group)
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
        partial(scale_sums if few else _kernel, group=group),
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


def _kernel(*refs: Any, group: int) -> None:
    # The blocks of rows come one after the other, with the same matrix.
    multiply_expanded(*refs, group=group, is_new=pl.program_id(2) == 0)


def multiply_expanded(x: Any, codes: Any, *refs: Any, group: int, is_new: Any, is_e2m1: bool = False) -> None:
    """refs: scales, offsets if there are, what comes out, and the expanded matrix, made anew if `is_new`."""
    *tables, out, matrix = refs
    chunk = _chunk(group)

    def expand(first: Any, size: int, columns: Any) -> None:
        num_groups = max(size // group, 1)
        inputs, groups = _at(first, size), _at(first // group, num_groups)
        scales, *offsets = (table[groups, columns][:, None] for table in tables)
        numbers = whole_numbers(codes[inputs, columns], jnp.float32, is_e2m1)
        values = numbers.reshape(num_groups, -1, columns.size) * scales
        values = sum(offsets, values)
        matrix[inputs, columns] = values.reshape(size, -1).astype(matrix.dtype)

    def multiply(columns: Any) -> None:
        @pl.when(is_new)
        def _() -> None:
            def expand_chunk(i: Array, _: None) -> None:
                expand(i * chunk, chunk, columns)

            rounds, rest = divmod(len(matrix), chunk)
            lax.fori_loop(0, rounds, expand_chunk, None)
            if rest:
                expand(rounds * chunk, rest, columns)

        product = jnp.dot(x[...], matrix[:, columns], preferred_element_type=jnp.float32)
        out[:, columns] = product.astype(out.dtype)

    _each_stretch(out.shape[1], multiply)


def scale_sums(x: Any, codes: Any, scales: Any, *refs: Any, group: int, is_e2m1: bool = False) -> None:
    """refs: if there are offsets, these and the sums of each group's inputs; and what comes out. Of groups
    that are less than a step, each has rows of its own with zeros for the inputs of others."""
    *shared, out = refs
    num_rows, step = len(x), math.gcd(max(group, CHUNK), MAX_STEP)
    num_groups = max(step // group, 1)
    rounds, rest = divmod(len(codes) // step, STEPS_AT_ONCE)

    def add(i: Any, total: Array, columns: Any, num_steps: int = STEPS_AT_ONCE) -> Array:
        for j in range(num_steps):
            first = (i * STEPS_AT_ONCE + j) * step
            inputs = _at(first, step)
            rows = x[:, inputs]
            if num_groups > 1:
                which = lax.broadcasted_iota(jnp.int32, rows.shape, 1) // group
                rows = jnp.concatenate([jnp.where(which == g, rows, 0) for g in range(num_groups)])
            numbers = whole_numbers(codes[inputs, columns], x.dtype, is_e2m1)
            sums = jnp.dot(rows, numbers, preferred_element_type=jnp.float32)
            for g in range(num_groups):
                scale = scales[pl.ds(first // group + g, 1), columns]
                total = total + sums[g * num_rows : (g + 1) * num_rows] * scale
        return total

    def multiply(columns: Any) -> None:
        total = jnp.zeros((num_rows, columns.size), jnp.float32)
        if shared:
            offsets, sums = shared
            total = jnp.dot(sums[...], offsets[:, columns], precision=lax.Precision.HIGHEST)
        total = lax.fori_loop(0, rounds, partial(add, columns=columns), total)
        out[:, columns] = add(rounds, total, columns, rest).astype(out.dtype)

    _each_stretch(out.shape[1], multiply, together=max(STEPS_AT_ONCE // (len(codes) // step), 1))


def whole_numbers(codes: Array, dtype: Any, is_e2m1: bool) -> Array:
    """Exact, also as bfloat16. Of doubled floats of 4 bits, 5 and 7 stand for 8 and 12: they alone among the
    codes have the second bit of a mantissa, and with it added three times more they become these."""
    numbers = codes.astype(jnp.float32).astype(dtype)
    if not is_e2m1:
        return numbers
    bits = pltpu.bitcast(numbers, jnp.int32)  # of bfloat16, two numbers in each
    odd = bits & (0x200000 if numbers.dtype == jnp.float32 else 0x200020)
    return pltpu.bitcast(bits + odd + (odd << 1), numbers.dtype)


def is_summed_first(num_rows: int, group: int) -> bool:
    """Whether it takes less to scale a group's sums than its weights. Where groups have rows of their own,
    these are whole tiles."""
    fits = group % CHUNK == 0 or (CHUNK % group == 0 and num_rows % MIN_ROWS == 0)
    return fits and num_rows * max(CHUNK // group, 1) <= FEW_ROWS


def _at(first: Any, size: int) -> Any:
    """A multiple of `size`."""
    return pl.ds(first if isinstance(first, int) else pl.multiple_of(first, size), size)


def _each_stretch(width: int, multiply: Callable[[Any], None], together: int = 1) -> None:
    """Of columns whose sums stay in registers; up to so many are in one round, so that none is waited for.
    The last may begin before the end of the one before."""
    num = pl.cdiv(width, MAX_COLUMNS)
    rounds = pl.cdiv(num, together)
    together = pl.cdiv(num, rounds)
    if num == 1:
        multiply(pl.ds(0, width))
        return
    size = pl.cdiv(pl.cdiv(width, num), LANES) * LANES

    def some(i: Array, _: None) -> None:
        for j in range(together):
            first = jnp.minimum((i * together + j) * size, width - size)
            multiply(pl.ds(pl.multiple_of(first, LANES), size))

    lax.fori_loop(0, rounds, some, None)


def _chunk(group: int) -> int:
    return CHUNK if group % CHUNK == 0 else TABLE_ROWS * group


def _multiple(size: int, of: int) -> int:
    return max(size // of, 1) * of
