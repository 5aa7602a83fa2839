"""The one place where activations meet weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [T, *in] times weight [*out, *in] -> [T, *out]; weights lie as in the checkpoint, outputs first.

    Axes are merged first: XLA's CPU backend runs a product of matrices a hundred times faster than one of
    tensors. An axis that is split over devices leads its group, so merging moves nothing between them.
    """
    outputs = weight.shape[: weight.ndim - (x.ndim - 1)]
    flat = x.reshape(len(x), -1)
    matrix = weight.reshape(-1, flat.shape[1])
    out = jax.lax.dot_general(flat, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    out = out.astype(x.dtype).reshape(len(x), *outputs)
    return out if bias is None else out + bias
