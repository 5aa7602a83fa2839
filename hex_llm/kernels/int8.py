"""A product of activations with a matrix of 8-bit integers. It knows nothing of layers or checkpoints.

Nothing in the product uses it yet: weights of 8 bits are to come, and this is the product that they need.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LARGEST = 127  # -128 is left out, so that a sign changes nothing


def int8_matmul(x: jax.Array, weight: jax.Array, scales: jax.Array) -> jax.Array:
    """x [T, in] times weight [out, in] int8, whose rows stand for themselves times scales [out] -> [T, out].

    Each row of x is rounded to 8 bits with a scale of its own. Sums are of integers and exact, so that a row
    does not depend on its neighbours.
    """
    rows, row_scales = quantized_rows(x)
    contract = (((1,), (1,)), ((), ()))
    sums = jax.lax.dot_general(rows, weight, contract, preferred_element_type=jnp.int32)
    return (sums.astype(jnp.float32) * row_scales * scales).astype(x.dtype)


def quantized_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [R, C] -> int8 [R, C] and scales [R, 1], float32: the largest of each row becomes 127 or -127."""
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / LARGEST
    return jnp.round(x / jnp.where(scales > 0, scales, 1)).astype(jnp.int8), scales
