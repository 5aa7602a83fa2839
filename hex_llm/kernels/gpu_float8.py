"""Rows rounded to floats of 8 bits on an NVIDIA GPU, by a Pallas-Triton kernel.

XLA reads a row for its largest number, and again for its codes; gates and ups a third time before. Here a
program has a row, keeps it in registers, and so reads it once.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels.experts import Activation
from hex_llm.kernels.float8 import FLOAT8_MAX, FLOAT8_ROWS, Rounded
from hex_llm.kernels.gpu_launch import interpreted, launched, next_power, quick

MIN_FLOAT8 = 8.9  # of a GPU's compute capability
COLUMNS, WARPS = 4096, 16  # read at a time; of a row that is so wide
WARP_COLUMNS = COLUMNS // WARPS


def can_round() -> bool:
    return interpreted() or float(jax.local_devices()[0].compute_capability) >= MIN_FLOAT8


def round_rows(x: Array) -> Rounded:
    """See float8.round_rows."""
    return _launch(x, len(x), x.shape[1])


def round_gated(
    product: Array, row_scales: Array, scales: Array, bias: Array | None, activation: Activation
) -> Rounded:
    """The activation of the gates times the ups: of a product of codes [T or more, F * 2], the scales of its
    rows [T, 1] and outputs [F, 2], and what is added to these [F, 2]. It is rounded to the product's type
    first."""
    of_columns = scales.reshape(-1), None if bias is None else bias.reshape(-1)
    return _launch(product, len(row_scales), len(scales), (row_scales, *of_columns), activation)


def _launch(
    x: Array, num_rows: int, width: int, gates: Any = None, activation: Activation | None = None
) -> Rounded:
    filled = pl.cdiv(num_rows, FLOAT8_ROWS) * FLOAT8_ROWS
    out = [
        jax.ShapeDtypeStruct((filled, width), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((num_rows, 1), jnp.float32),
    ]
    warps = min(max(next_power(x.shape[1]) // WARP_COLUMNS, 1), WARPS)
    call = launched(partial(_row_kernel, activation=activation), (filled,), out, warps, 1)
    codes, scales = call(x, gates)
    return Rounded(codes, scales, x.dtype)


def _row_kernel(
    x_ref: Any, gate_refs: Any, codes_ref: Any, scales_ref: Any, *, activation: Activation | None
) -> None:
    """Rows that only fill up are the last one once more."""
    row, width = pl.program_id(0), codes_ref.shape[1]
    source = jnp.minimum(row, len(scales_ref) - 1)
    parts = 1 if gate_refs is None else 2
    size = min(next_power(width), COLUMNS // parts)
    starts = range(0, width, size)

    def place(start: int, parts: int) -> tuple[Array, Array | None]:
        """Columns in the order of memory, and which of them are there."""
        column = parts * start + lax.iota(jnp.int32, parts * size)
        return column, None if start + size <= width else column < parts * width

    def read(ref: Any, start: int, *row: Array) -> Array:
        column, mask = place(start, parts)
        return plgpu.load(ref.at[(*row, column)], mask=mask, other=None if mask is None else 0)

    def gated(both: Array, start: int, activation: Activation) -> Array:
        row_scales_ref, scales_ref, bias_ref = gate_refs
        both = both.astype(jnp.float32) * row_scales_ref[source, 0] * read(scales_ref, start)
        both = both if bias_ref is None else both + read(bias_ref, start).astype(jnp.float32)
        gate, up = jnp.unstack(both.reshape(size, 2), axis=1)
        return (quick(activation)(gate) * up).astype(x_ref.dtype)

    held = [read(x_ref, start, source) for start in starts]
    if activation is not None:
        held = [gated(both, start, activation) for both, start in zip(held, starts, strict=True)]
    sizes = [jnp.abs(x.astype(jnp.float32)) for x in held]
    # A GPU's maximum passes over what is no number.
    peak = jnp.max(reduce(jnp.maximum, [jnp.where(one < jnp.inf, one, jnp.inf) for one in sizes]))
    scale = jnp.where(peak < jnp.inf, jnp.where(peak == 0, 1, peak * (1 / FLOAT8_MAX)), jnp.nan)
    for x, start in zip(held, starts, strict=True):
        column, mask = place(start, 1)
        # Divided, as by XLA: multiplied by the inverse, what lies between two codes could go to the other.
        codes = (x.astype(jnp.float32) / scale).astype(codes_ref.dtype)
        plgpu.store(codes_ref.at[row, column], codes, mask=mask)
    scales_ref[source, 0] = scale
