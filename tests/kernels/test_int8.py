"""The product with a matrix of 8-bit integers: exact where it can be, near a float's elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels.int8 import int8_matmul, quantized_rows

RNG = np.random.default_rng(0)
WEIGHT = RNG.integers(-127, 128, (96, 4096), np.int8)
SCALES = RNG.uniform(0.001, 0.01, 96).astype(np.float32)


def test_integers_are_multiplied_exactly() -> None:
    """Rows whose largest is 127 keep their integers; the sums pass what a float32 could add up."""
    x = RNG.integers(-127, 128, (5, 4096)).astype(np.float32)
    x[:, 7] = 127
    weight = WEIGHT.copy()
    x[4], weight[3] = 127, 127
    out = jax.jit(int8_matmul)(x, weight, np.ones(96, np.float32))
    exact = x.astype(np.int64) @ weight.astype(np.int64).T
    assert exact.max() == 4096 * 127**2
    np.testing.assert_array_equal(out, exact.astype(np.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_near_the_product_of_floats(dtype: jnp.dtype) -> None:
    x = jnp.asarray(RNG.standard_normal((16, 4096)), dtype)
    out = jax.jit(int8_matmul)(x, WEIGHT, SCALES)
    expected = np.asarray(x, np.float64) @ (WEIGHT * SCALES[:, None]).T.astype(np.float64)
    assert out.dtype == dtype
    difference = np.linalg.norm(np.asarray(out, np.float64) - expected) / np.linalg.norm(expected)
    assert difference < 0.01, "rounding to 8 bits alone"


def test_a_row_depends_on_itself_alone() -> None:
    x = RNG.standard_normal((3, 4096)).astype(np.float32)
    loud = x * np.array([[1], [1000], [0]], np.float32)
    ours, others = (jax.jit(int8_matmul)(rows, WEIGHT, SCALES) for rows in (x, loud))
    np.testing.assert_array_equal(ours[0], others[0])
    assert not np.asarray(others[2]).any(), "zeros stay zeros"


def test_what_a_row_is_rounded_to() -> None:
    rows, scales = quantized_rows(jnp.array([[-254.0, 2.0, 1.1], [0, 0, 0]]))
    assert rows.tolist() == [[-127, 1, 1], [0, 0, 0]]
    assert scales.tolist() == [[2.0], [0.0]]


def test_lowers_for_tpus_as_a_product_of_integers() -> None:
    shapes = [((64, 4096), jnp.bfloat16), ((96, 4096), jnp.int8), ((96,), jnp.float32)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    module = jax.export.export(jax.jit(int8_matmul), platforms=["tpu"])(*arguments).mlir_module()
    assert "(tensor<64x4096xi8>, tensor<96x4096xi8>) -> tensor<64x96xi32>" in module
