"""Gates and ups of some rows in 16 bits on an NVIDIA GPU, by a Pallas-Triton kernel that multiplies and makes
of them what goes on. cuBLAS streams the matrix no faster, and leaves the activation to a kernel behind it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels import gpu_launch
from hex_llm.kernels.experts import Activation
from hex_llm.kernels.gpu_launch import (
    HOPPER,
    MIN_DOT,
    both,
    capability,
    dot,
    index_grid,
    launched,
    load_rows,
    next_power,
    read_tile,
)

ROWS = range(2, 129)  # of one XLA makes a reduction, of more cuBLAS is as fast
MIN_PROGRAMS = 120  # nearly one on each multiprocessor


class Tiling(NamedTuple):
    outputs: int  # gates and ups of a program
    depth: int  # inputs at a time
    warps: int
    stages: int


def can_gate(x: Array, matrix: Array) -> bool:
    """Whether the kernel is for such rows [T, D] and gates and ups [F, 2, D]; on which GPUs, was measured."""
    if len(x) not in ROWS or x.dtype not in (jnp.bfloat16, jnp.float16) or capability() != HOPPER:
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
