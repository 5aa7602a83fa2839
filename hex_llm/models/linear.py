"""The one place where activations meet weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hex_llm.kernels import cpu
from hex_llm.kernels.cpu import Panels

FEW_ROWS = range(2, 65)


def linear(x: jax.Array, weight: jax.Array | Panels, bias: jax.Array | None = None) -> jax.Array:
    """x [T, *in] times weight [*out, *in] -> [T, *out]; weights lie as in the checkpoint, outputs first.

    Axes are merged first: XLA's CPU backend runs a product of matrices several times faster than one of
    tensors. An axis that is split over devices leads its group, so merging moves nothing between them.
    """
    flat = x.reshape(len(x), -1)
    if isinstance(weight, Panels):
        out = cpu.matmul(flat, weight)
    else:
        outputs = weight.shape[: weight.ndim - (x.ndim - 1)]
        matrix = weight.reshape(-1, flat.shape[1])
        out = _any_product(flat, matrix).reshape(len(x), *outputs)
    return out if bias is None else out + bias


def linear_columns(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`linear` with tokens as the last axis: x [in, T] times weight [*out, in] -> [*out, T]."""
    out = _weight_first(x.T, weight.reshape(-1, len(x))).T.astype(x.dtype)
    out = out.reshape(*weight.shape[:-1], x.shape[1])
    return out if bias is None else out + bias[..., None]


def rows_of(weight: jax.Array | Panels, which: jax.Array) -> jax.Array:
    """[V, D] and [T] -> [T, D]."""
    return weight.rows(which) if isinstance(weight, Panels) else weight[which]


def _any_product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """In x's type, summed in float32."""
    if x.dtype != jnp.float32:
        return jax.lax.platform_dependent(x, matrix, cpu=_rounded_product, default=_narrow_product)
    if len(x) in FEW_ROWS:
        return jax.lax.platform_dependent(x, matrix, cpu=_weight_first, default=_product)
    return _product(x, matrix)


def _product(x: jax.Array, matrix: jax.Array, out: DTypeLike = jnp.float32) -> jax.Array:
    return jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=out)


def _rounded_product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return _product(x, matrix).astype(x.dtype)


def _narrow_product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Accelerators sum in float32 whatever comes out; asked for float32, GPUs write it to memory first."""
    return _product(x, matrix, x.dtype)


def _weight_first(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """On CPUs a product copies its second factor into another layout: let that be the smaller one. The
    barrier keeps the order, which the compiler would turn round."""
    return jax.lax.optimization_barrier(_product(matrix, x)).T
