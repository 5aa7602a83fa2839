"""Rows rounded to floats of 8 bits by the GPU's kernel, interpreted where there is none, beside XLA's."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import float8, gpu_float8
from hex_llm.kernels.adapters import Norm
from hex_llm.kernels.float8 import FLOAT8_ROWS, Rounded
from hex_llm.models import decoder
from hex_llm.models.decoder import ACTIVATIONS
from tests.kernels.lowering import lowered_for_gpus

# A whole read, less than one, several, and some that the last does not fill.
WIDTHS = [4096, 96, 7 * 96, 7 * 2048, 9000]
DTYPES = [jnp.bfloat16, jnp.float32]


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape[-1]).standard_normal(shape, np.float32), dtype)


def divided(x: Any, dtype: Any) -> Rounded:
    """Divided exactly; XLA's CPU backend multiplies by the inverse, which can give a neighbouring code."""
    x = np.asarray(x.astype(dtype)).astype(np.float32)
    peaks = np.abs(x).max(1, keepdims=True)
    scales = np.where(peaks == 0, np.float32(1), peaks * np.float32(1 / float8.FLOAT8_MAX))
    return Rounded((x / scales).astype(jnp.float8_e4m3fn), scales, dtype)


def bits(rounded: Rounded) -> Any:
    """The codes of the rows that are there."""
    return np.asarray(rounded.codes).view(np.uint8)[: len(rounded.scales)]


def check_equal(got: Rounded, expected: Rounded) -> None:
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.scales, expected.scales)
    np.testing.assert_array_equal(bits(got), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 18])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows(width: int, num_rows: int, dtype: Any) -> None:
    x = normal(num_rows, width, dtype=dtype) * 10.0 ** jnp.arange(-9, num_rows - 9, dtype=dtype)[:, None]
    x = x.at[num_rows // 2].set(0) if num_rows > 1 else x
    got, by_xla = jax.jit(lambda x: (gpu_float8.round_rows(x), float8.round_rows(x)))(x)
    check_equal(got, divided(x, dtype))
    assert got.codes.shape == by_xla.codes.shape == (num_rows + -num_rows % FLOAT8_ROWS, width)
    np.testing.assert_array_equal(got.scales, by_xla.scales)
    assert np.mean(bits(got) != bits(by_xla)) < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 18])
@pytest.mark.parametrize("width", WIDTHS)
def test_gates(width: int, num_rows: int, dtype: Any) -> None:
    """With an activation that is exact."""
    product = normal(num_rows + -num_rows % FLOAT8_ROWS, 2 * width, dtype=dtype) * 100
    row_scales, scales = jnp.abs(normal(num_rows, 1)), jnp.abs(normal(width, 2)) / 10
    got = jax.jit(lambda *given: gpu_float8.round_gated(*given, None, jax.nn.relu))(
        product, row_scales, scales
    )
    # One by one: together XLA may leave out that products are rounded.
    both = product[:num_rows] * row_scales * scales.reshape(-1)
    check_equal(got, divided(jnp.maximum(both[:, ::2], 0) * both[:, 1::2], dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [jax.nn.silu, ACTIVATIONS["gelu_tanh"], ACTIVATIONS["quick_gelu"]])
def test_activations_and_biases(activation: Any, dtype: Any) -> None:
    product, row_scales = normal(16, 2 * 96, dtype=dtype), jnp.abs(normal(5, 1))
    scales, bias = jnp.abs(normal(96, 2)), normal(96, 2, dtype=dtype)
    got = gpu_float8.round_gated(product, row_scales, scales, bias, activation)
    both = (product[:5] * row_scales).reshape(5, 96, 2) * scales + bias
    expected = divided(activation(both[..., 0]) * both[..., 1], dtype)
    np.testing.assert_allclose(got.scales, expected.scales, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-5)
    assert np.mean(bits(got) != bits(expected)) < 1e-2


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 18])
@pytest.mark.parametrize("width", [4096, 96, 9000])
def test_what_a_product_is_added_to(width: int, num_rows: int, dtype: Any, has_bias: bool) -> None:
    around, product = normal(num_rows, width, dtype=dtype), normal(num_rows + 14, width, dtype=dtype) * 100
    row_scales, scales, bias = jnp.abs(normal(num_rows, 1)), jnp.abs(normal(width)) / 10, normal(width)
    norm = Norm(normal(width, dtype=dtype), 1e-5, 1.0)
    parts = jnp.stack([product, product]) / 2 if has_bias else product[None]
    given = around, parts, row_scales, scales, bias.astype(dtype) if has_bias else None, norm.weight
    joined, rounded = jax.jit(
        lambda *given: gpu_float8.join_rows(*given[:-1], norm._replace(weight=given[-1]))
    )(*given)
    added = product[:num_rows].astype(jnp.float32) * row_scales * scales
    added = added + given[4].astype(jnp.float32) if given[4] is not None else added
    expected = (around.astype(jnp.float32) + added).astype(dtype)
    assert joined.dtype == dtype
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(
        joined.astype(jnp.float32), expected.astype(jnp.float32), rtol=tolerance, atol=tolerance
    )
    whole = joined.astype(jnp.float32)
    normed = decoder.normalize(whole, norm.eps) * (norm.weight.astype(jnp.float32) + norm.offset)
    by_judge = divided(normed, dtype)
    np.testing.assert_allclose(rounded.scales, by_judge.scales, rtol=tolerance)
    assert np.mean(bits(rounded) != bits(by_judge)) < 1e-2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_no_numbers_reach_nobody_else(bad: float) -> None:
    x, num = normal(5, 2 * 96), 5
    broken = x.at[1, 7].set(bad).at[4, -1].set(bad)
    ones, scales = jnp.ones((num, 1)), jnp.ones((96, 2))
    others = jnp.array([0, 2, 3])

    def product_of(rows: Rounded) -> Any:
        return np.asarray(rows.codes[:num].astype(jnp.float32) * rows.scales)

    def joined(x: jax.Array) -> Rounded:
        norm = Norm(jnp.ones(x.shape[1]), 1e-5, 0.0)
        return gpu_float8.join_rows(x, x[None], ones, jnp.ones(x.shape[1]), None, norm)[1]

    gated = partial(gpu_float8.round_gated, row_scales=ones, scales=scales, bias=None, activation=jax.nn.silu)
    for make in (gpu_float8.round_rows, gated, joined):
        got, expected = jax.jit(make)(broken), jax.jit(make)(x)
        np.testing.assert_array_equal(bits(got)[others], bits(expected)[others])
        np.testing.assert_array_equal(got.scales[others], expected.scales[others])
        assert not np.isfinite(product_of(got)[[1, 4]]).any()
        assert np.isfinite(product_of(expected)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("width", [96, 14336, 28672, 9000])
def test_lowers_for_gpus(width: int, dtype: Any) -> None:
    x, ones, scales = jnp.zeros((32, 2 * width), dtype), jnp.ones((20, 1)), jnp.ones((width, 2))
    for bias in (None, jnp.zeros((width, 2), dtype)):
        given = x, ones, scales, bias
        text = lowered_for_gpus(lambda *given: gpu_float8.round_gated(*given, jax.nn.silu).codes, *given)
        assert "triton" in text
        given = x[:20], x[None], ones, jnp.ones(2 * width), None if bias is None else bias.reshape(-1), x[0]
        text = lowered_for_gpus(
            lambda *one: gpu_float8.join_rows(*one[:-1], Norm(one[-1], 1e-5, 0.0))[0], *given
        )
        assert "triton" in text
    assert "triton" in lowered_for_gpus(lambda x: gpu_float8.round_rows(x).codes, x)
