"""Every way in which `linear` multiplies, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.models.linear import FEW_ROWS, Dense, linear
from tests.kernels.lowering import lowered_for_gpus


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, FEW_ROWS[-1], FEW_ROWS[-1] + 1])
@pytest.mark.parametrize("equal_rows", [False, True])
def test_products_equal_float64(rows: int, equal_rows: bool) -> None:
    """Equal rows come as a broadcast: XLA's CPU backend has summed a broadcast of a broadcast wrongly."""
    rng = np.random.default_rng(0)
    weight = Dense(jnp.asarray(rng.standard_normal((96, 2, 64), dtype=np.float32)), num_outputs=2)
    bias = rng.standard_normal((96, 2), dtype=np.float32)
    x = rng.standard_normal((1 if equal_rows else rows, 64), dtype=np.float32)
    spread = lambda x: jax.lax.optimization_barrier(jnp.broadcast_to(x, (rows, 64)))  # noqa: E731
    expected = (
        np.einsum("td,fcd->tfc", np.broadcast_to(x, (rows, 64)).astype(np.float64), weight.array) + bias
    )
    out = jax.jit(lambda x: linear(spread(x), weight, bias))(x)
    gated, ups = (jax.jit(lambda x, f=f: weight.gated(spread(x), f, bias))(x) for f in (abs, jnp.ones_like))
    np.testing.assert_allclose(out, expected, atol=1e-4)
    np.testing.assert_allclose(ups, expected[..., 1], atol=1e-4)
    np.testing.assert_allclose(gated, abs(expected[..., 0]) * expected[..., 1], atol=1e-3)


def test_products_of_bfloat16_are_summed_in_float32() -> None:
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((5, 512), (96, 512)))
    out = jax.jit(linear)(x, Dense(weight))
    assert out.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=2**-8, atol=1e-4)  # rounded once


@pytest.mark.parametrize(("rows", "is_product"), [(1, False), (2, True)])
def test_one_row_is_a_reduction_on_gpus(rows: int, is_product: bool) -> None:
    """XLA reads a matrix faster for it than for a product."""
    weight = Dense(jnp.zeros((96, 64), jnp.bfloat16))
    text = lowered_for_gpus(weight.matmul, jnp.zeros((rows, 64), jnp.bfloat16))
    assert ("dot_general" in text) == is_product
