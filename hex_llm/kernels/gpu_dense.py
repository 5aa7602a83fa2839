"""Products of some rows in 16 bits, or of codes of 8, on an NVIDIA GPU, by Pallas-Triton kernels.

cuBLAS leaves the activation of gates and ups to a kernel behind it; and in a CUDA graph the GPU waits before
and after its calls, which XLA records anew whenever an address has changed.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels import gpu_launch
from hex_llm.kernels.adapters import Norm
from hex_llm.kernels.experts import Activation
from hex_llm.kernels.gpu_launch import (
    HOPPER,
    MIN_DOT,
    Place,
    both,
    capability,
    dot,
    index_grid,
    launched,
    load_rows,
    next_power,
    places,
    read_place,
    read_tile,
    row_warps,
    store_joined,
    store_row,
)

SHORT = jnp.bfloat16, jnp.float16
FEW_ROWS = range(2, 65)  # of one XLA makes a reduction
FEW_CODES_ROWS = 16  # as many as fewer are filled up to (float8.py); of more cuBLAS is faster
GATED_ROWS = range(2, 129)
MIN_PROGRAMS = 120  # nearly one on each multiprocessor
MIN_PARTS = 80  # programs of a product, likewise, which read further ahead
MAX_SPLITS = 4


class Tiling(NamedTuple):
    outputs: int  # of a program
    depth: int  # inputs at a time
    warps: int
    stages: int


FEW, FEW_CODES = Tiling(64, 128, 4, 6), Tiling(64, 256, 4, 5)


def can_multiply(x: Array, matrix: Array) -> bool:
    """Whether the kernel is for such rows [T, D] and a matrix [N, D]; on which GPUs, was measured."""
    few = len(x) in FEW_ROWS if x.dtype in SHORT else len(x) == FEW_CODES_ROWS
    if not few or x.dtype not in (*SHORT, jnp.float8_e4m3fn) or capability() != HOPPER:
        return False
    num_tiles, rest = divmod(len(matrix), FEW.outputs)
    is_whole = rest == 0 and x.shape[1] % (MAX_SPLITS * _few_of(x).depth) == 0
    return is_whole and num_tiles * MAX_SPLITS >= MIN_PARTS


def can_join_row(x: Array) -> bool:
    """Whether what XLA multiplies one row with is joined: it would norm a row in two kernels."""
    return len(x) == 1 and x.dtype in SHORT and capability() == HOPPER


def _few_of(x: Array) -> Tiling:
    return FEW if x.dtype in SHORT else FEW_CODES


def num_splits(num_outputs: int) -> int:
    """Programs that share the inputs, where there are few outputs."""
    return next(n for n in (1, 2, MAX_SPLITS) if n * (num_outputs // FEW.outputs) >= MIN_PARTS)


def product(x: Array, matrix: Array, dtype: Any, scales: tuple[Array, Array] | None = None) -> Array:
    """x [T or more, D], matrix [N, D] -> [splits, T, N], to be summed: of several, in floats of 32 bits. If
    there is one, it may be multiplied by `scales`, of rows [T] and of outputs [N]."""
    splits, tiling, num_rows = num_splits(len(matrix)), _few_of(x), len(x if scales is None else scales[0])
    kernel = partial(_product_kernel, rows=max(next_power(num_rows), MIN_DOT), tiling=tiling)
    out = jax.ShapeDtypeStruct((splits, num_rows, len(matrix)), dtype if splits == 1 else jnp.float32)
    call = launched(kernel, (len(matrix) // tiling.outputs, splits), out, tiling.warps, tiling.stages)
    parts: Array = call(x, matrix, scales)
    return parts


def join(around: Array, parts: Array, norm: Norm) -> tuple[Array, Array]:
    """Tokens [T, D] with a product [splits, T, D], and that as the norm leaves it."""
    kernel = partial(_join_kernel, eps=norm.eps, offset=norm.offset)
    call = launched(kernel, (len(around),), [around, around], row_warps(around.shape[1]), 1)
    joined, normed = call(around, parts, norm.weight)
    return joined, normed


def _product_kernel(
    x_ref: Any, matrix_ref: Any, scales: tuple[Any, Any] | None, out_ref: Any, *, rows: int, tiling: Tiling
) -> None:
    """The matrix is the first factor: it has whole tiles of rows for the tensor cores."""
    splits, num_rows, _ = out_ref.shape
    row, size, share = lax.iota(jnp.int32, rows), tiling.outputs, x_ref.shape[1] // splits
    split = pl.program_id(1)
    there = None if rows == num_rows else row < num_rows
    given = there if len(x_ref) < rows else None  # codes are filled up with zeros
    output = pl.program_id(0) * size + lax.iota(jnp.int32, size)

    def add(i: Array, total: Array) -> Array:
        deep = split * share + i * tiling.depth + lax.iota(jnp.int32, tiling.depth)
        x = load_rows(x_ref, row, deep[None, :], given, None)
        return total + dot(read_tile(matrix_ref, (), output, deep, None), x.T)

    total = lax.fori_loop(0, share // tiling.depth, add, jnp.zeros((size, rows), jnp.float32)).T
    if scales is not None:
        of_rows, of_outputs = scales
        total *= read_place(of_rows, (row, there))[:, None] * read_place(of_outputs, (output, None))[None, :]
    out = total.astype(out_ref.dtype)
    plgpu.store(out_ref.at[split, *index_grid(row, output[None, :])], out, mask=both(there, None, out.shape))


def _join_kernel(
    around_ref: Any,
    parts_ref: Any,
    weight_ref: Any,
    out_ref: Any,
    normed_ref: Any,
    *,
    eps: float,
    offset: float,
) -> None:
    row, all_places = pl.program_id(0), places(out_ref.shape[1])

    def joined(place: Place) -> Array:
        parts = [read_place(parts_ref, place, split, row) for split in range(len(parts_ref))]
        both = [one.astype(jnp.float32) for one in (read_place(around_ref, place, row), *parts)]
        return reduce(jnp.add, both).astype(out_ref.dtype).astype(jnp.float32)

    total = [joined(place) for place in all_places]
    normed = store_joined(total, row, all_places, weight_ref, out_ref, eps, offset)
    store_row(normed_ref, row, all_places, normed)


def can_gate(x: Array, matrix: Array) -> bool:
    """Whether the kernel is for such rows [T, D] and gates and ups [F, 2, D]."""
    if len(x) not in GATED_ROWS or x.dtype not in SHORT or capability() != HOPPER:
        return False
    tiling, num_outputs = tiling_for(len(x)), 2 * len(matrix)
    is_whole = num_outputs % tiling.outputs == 0 and x.shape[1] % tiling.depth == 0
    return is_whole and num_outputs // tiling.outputs >= MIN_PROGRAMS


def tiling_for(num_rows: int) -> Tiling:
    return Tiling(128, 64, 4, 4) if num_rows <= 64 else Tiling(128, 64, 8, 3)


def gated(x: Array, matrix: Array, activation: Activation) -> Array:
    """x [T, D], gates and ups [F, 2, D] -> [T, F], the activation of the gates times the ups."""
    tiling, width = tiling_for(len(x)), len(matrix)
    kernel = partial(
        _gated_kernel, rows=max(next_power(len(x)), MIN_DOT), tiling=tiling, activation=activation
    )
    out = jax.ShapeDtypeStruct((len(x), width), x.dtype)
    call = launched(kernel, (2 * width // tiling.outputs,), out, tiling.warps, tiling.stages)
    result: Array = call(x, matrix.reshape(2 * width, -1))
    return result


def _gated_kernel(
    x_ref: Any, matrix_ref: Any, out_ref: Any, *, rows: int, tiling: Tiling, activation: Activation
) -> None:
    num_rows, num_inputs = x_ref.shape
    row, size = lax.iota(jnp.int32, rows), tiling.outputs
    there = None if rows == num_rows else row < num_rows
    output = pl.program_id(0) * size + lax.iota(jnp.int32, size)

    def add(i: Array, total: Array) -> Array:
        deep = i * tiling.depth + lax.iota(jnp.int32, tiling.depth)
        x = load_rows(x_ref, row, deep[None, :], there, None)
        return total + dot(x, read_tile(matrix_ref, (), output, deep, None).T)

    total = lax.fori_loop(0, num_inputs // tiling.depth, add, jnp.zeros((rows, size), jnp.float32))
    out = gpu_launch.gated(total, activation, out_ref.dtype).astype(out_ref.dtype)
    column = pl.program_id(0) * (size // 2) + lax.iota(jnp.int32, size // 2)
    plgpu.store(out_ref.at[index_grid(row, column[None, :])], out, mask=both(there, None, out.shape))
