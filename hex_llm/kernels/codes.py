"""What the codes of quantized weights stand for, where no kernel's own form knows it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

E2M1_GROUP = 32  # inputs that share a scale in all files with floats of 4 bits


def doubled_e2m1(codes: Array) -> Array:
    """Floats of 4 bits, doubled, which makes them whole numbers: int8."""
    exponent, fraction = (codes >> 1 & 3).astype(jnp.int8), (codes & 1).astype(jnp.int8)
    size = jnp.where(exponent == 0, fraction, (2 + fraction) << jnp.maximum(exponent - 1, 0))
    return jnp.where(codes >= 8, -size, size)
