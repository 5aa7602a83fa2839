"""Rows of activations as floats of 8 bits, each with a scale of its own, and how XLA makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

FLOAT8_MAX = 448.0
FLOAT8_ROWS = 16  # cuBLAS multiplies only multiples of it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounded:
    """What stands for x [T, K]. A row with a number that is not finite has none in its product either."""

    codes: Array  # float8_e4m3fn [T, filled up to a multiple of FLOAT8_ROWS; K]
    scales: Array  # float32 [T, 1]
    dtype: Any = field(metadata={"static": True})  # x's, which products have too


def round_rows(x: Array) -> Rounded:
    peaks = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1, keepdims=True)
    scales = jnp.where(peaks == 0, 1, peaks * (1 / FLOAT8_MAX))
    codes = (x / scales).astype(jnp.float8_e4m3fn)
    return Rounded(jnp.pad(codes, ((0, -len(x) % FLOAT8_ROWS), (0, 0))), scales, x.dtype)
