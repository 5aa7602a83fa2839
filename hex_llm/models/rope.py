"""Rotary position embedding: angles from positions, rotation of heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hex_llm.models.spec import Rope


def rope_table(rope: Rope, positions: jax.Array, rope_lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, [T, pairs] each. `rope_lengths` [T]: the length that a token's frequencies are for."""
    angles = positions[:, None].astype(jnp.float32) * _frequencies(rope, rope_lengths)
    return jnp.cos(angles) * rope.magnitude, jnp.sin(angles) * rope.magnitude


def _frequencies(rope: Rope, rope_lengths: jax.Array) -> jax.Array:
    plain = jnp.array(rope.inv_freq, jnp.float32)
    is_long = rope_lengths[:, None] > rope.original_len
    if rope.long_inv_freq is not None:
        return jnp.where(is_long, jnp.array(rope.long_inv_freq, jnp.float32), plain)
    if rope.ntk is not None:
        return jnp.where(is_long, _ntk_frequencies(rope, rope_lengths[:, None].astype(jnp.float32)), plain)
    return plain


def _ntk_frequencies(rope: Rope, rope_lengths: jax.Array) -> jax.Array:
    assert rope.ntk is not None
    theta, factor = rope.ntk
    dim = 2 * len(rope.inv_freq)
    stretch = factor * rope_lengths / rope.original_len - (factor - 1)
    base = theta * stretch ** (dim / (dim - 2))
    return 1.0 / base ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool) -> jax.Array:
    """x [T, ..., H]; the first 2 * pairs dimensions of H are rotated."""
    pairs = cos.shape[-1]
    turned, passed = x[..., : 2 * pairs].astype(jnp.float32), x[..., 2 * pairs :]
    # (a, b) -> (a cos - b sin, b cos + a sin), as the pair times cos plus the swapped pair times (-sin, sin).
    axis, split = (-1, (pairs, 2)) if interleaved else (-2, (2, pairs))
    shape = (len(x), *(1,) * (x.ndim - 2), *split)
    cos, sin = (jnp.stack(both, axis=axis).reshape(shape) for both in ((cos, cos), (-sin, sin)))
    turned = turned.reshape(*turned.shape[:-1], *split)
    out = (turned * cos + jnp.flip(turned, axis) * sin).reshape(*x.shape[:-1], 2 * pairs).astype(x.dtype)
    return jnp.concatenate([out, passed], axis=-1) if passed.shape[-1] else out
