"""Rows rounded to floats of 8 bits on an NVIDIA GPU, by a Pallas-Triton kernel.

XLA reads a row for its largest number, and again for its codes; gates and ups a third time before, and what
is added to tokens for their norm. Here a program has a row, keeps it in registers, and so reads it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels import gpu_launch
from hex_llm.kernels.adapters import Norm
from hex_llm.kernels.experts import Activation
from hex_llm.kernels.float8 import FLOAT8_MAX, FLOAT8_ROWS, Rounded
from hex_llm.kernels.gpu_launch import (
    ROW_COLUMNS,
    Place,
    launched,
    places,
    quick,
    read_place,
    row_warps,
    store_joined,
)

MIN_FLOAT8 = 8.9  # of a GPU's compute capability


def can_round() -> bool:
    return gpu_launch.capability() >= MIN_FLOAT8


def round_rows(x: Array) -> Rounded:
    """See float8.round_rows."""
    codes, scales = _launched(_row_kernel, len(x), x.shape[1])(x)
    return Rounded(codes, scales, x.dtype)


def round_gated(
    product: Array, row_scales: Array, scales: Array, bias: Array | None, activation: Activation
) -> Rounded:
    """The activation of the gates times the ups: of a product of codes [T or more, F * 2], the scales of its
    rows [T, 1] and outputs [F, 2], and what is added to these [F, 2]. It is rounded to the product's type
    first."""
    bias = None if bias is None else bias.reshape(-1)
    call = _launched(partial(_gated_kernel, activation=activation), len(row_scales), len(scales))
    codes, row_scales = call(product, row_scales, scales.reshape(-1), bias)
    return Rounded(codes, row_scales, product.dtype)


def join_rows(
    around: Array, product: Array, row_scales: Array, scales: Array, bias: Array | None, norm: Norm
) -> tuple[Array, Rounded]:
    """Tokens [T, D] with a product of codes, in parts [splits, T or more, D], the scales of its rows [T, 1]
    and outputs [D], and what is added to these [D]; and as the norm leaves them, rounded."""
    kernel = partial(_join_kernel, eps=norm.eps, offset=norm.offset)
    call = _launched(kernel, len(around), around.shape[1], [around])
    joined, codes, row_scales = call(around, product, row_scales, scales, bias, norm.weight)
    return joined, Rounded(codes, row_scales, around.dtype)


def _launched(kernel: Any, num_rows: int, width: int, others: Sequence[Array] = ()) -> Callable[..., Any]:
    """With a program for each row, which leaves it rounded behind what it leaves besides."""
    filled = pl.cdiv(num_rows, FLOAT8_ROWS) * FLOAT8_ROWS
    out = [
        *others,
        jax.ShapeDtypeStruct((filled, width), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((num_rows, 1), jnp.float32),
    ]
    return launched(kernel, (filled,), out, row_warps(width), 1)


def _row_kernel(x_ref: Any, codes_ref: Any, scales_ref: Any) -> None:
    source = _source(scales_ref)
    held = [read_place(x_ref, place, source) for place in places(codes_ref.shape[1])]
    _round(held, codes_ref, scales_ref)


def _gated_kernel(
    x_ref: Any,
    row_scales_ref: Any,
    outputs_ref: Any,
    bias_ref: Any,
    codes_ref: Any,
    scales_ref: Any,
    *,
    activation: Activation,
) -> None:
    source, all_places = _source(scales_ref), places(codes_ref.shape[1], ROW_COLUMNS // 2, 2)

    def gated(both: Array, place: Place) -> Array:
        both = both.astype(jnp.float32) * row_scales_ref[source, 0] * read_place(outputs_ref, place)
        both = both if bias_ref is None else both + read_place(bias_ref, place).astype(jnp.float32)
        gate, up = jnp.unstack(both.reshape(-1, 2), axis=1)
        return (quick(activation)(gate) * up).astype(x_ref.dtype)

    held = [read_place(x_ref, place, source) for place in all_places]
    _round([gated(both, place) for both, place in zip(held, all_places, strict=True)], codes_ref, scales_ref)


def _join_kernel(
    around_ref: Any,
    product_ref: Any,
    row_scales_ref: Any,
    outputs_ref: Any,
    bias_ref: Any,
    weight_ref: Any,
    out_ref: Any,
    codes_ref: Any,
    scales_ref: Any,
    *,
    eps: float,
    offset: float,
) -> None:
    source, all_places = _source(scales_ref), places(codes_ref.shape[1])

    def joined(place: Place) -> Array:
        """In the type of a product, as it would be without the kernel."""
        parts = [read_place(product_ref, place, split, source) for split in range(len(product_ref))]
        added = reduce(jnp.add, [part.astype(jnp.float32) for part in parts]) * row_scales_ref[source, 0]
        added *= read_place(outputs_ref, place)
        added = added if bias_ref is None else added + read_place(bias_ref, place).astype(jnp.float32)
        around = read_place(around_ref, place, source).astype(jnp.float32)
        return (around + added).astype(out_ref.dtype).astype(jnp.float32)

    total = [joined(place) for place in all_places]
    normed = store_joined(total, source, all_places, weight_ref, out_ref, eps, offset)
    _round(normed, codes_ref, scales_ref)


def _source(scales_ref: Any) -> Array:
    """The program's row; those that only fill up are the last one once more."""
    return jnp.minimum(pl.program_id(0), len(scales_ref) - 1)


def _round(held: list[Array], codes_ref: Any, scales_ref: Any) -> None:
    sizes = [jnp.abs(x.astype(jnp.float32)) for x in held]
    # A GPU's maximum passes over what is no number.
    peak = jnp.max(reduce(jnp.maximum, [jnp.where(one < jnp.inf, one, jnp.inf) for one in sizes]))
    scale = jnp.where(peak < jnp.inf, jnp.where(peak == 0, 1, peak * (1 / FLOAT8_MAX)), jnp.nan)
    for x, (column, mask) in zip(held, places(codes_ref.shape[1], len(held[0])), strict=True):
        # Divided, as by XLA: multiplied by the inverse, what lies between two codes could go to the other.
        codes = (x.astype(jnp.float32) / scale).astype(codes_ref.dtype)
        plgpu.store(codes_ref.at[pl.program_id(0), column], codes, mask=mask)
    scales_ref[_source(scales_ref), 0] = scale
