"""Products with quantized matrices for GPUs, interpreted where there is none, against float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hex_llm.kernels import gpu_quantized
from hex_llm.kernels.adapters import Norm
from hex_llm.kernels.gpu_quantized import MAX_ROWS, QuantizedWords, Tiling, multiply, tiling_for, to_words
from hex_llm.models import decoder
from tests.kernels.lowering import lowered_for_gpus

Values = np.ndarray[Any, Any]


class Case(NamedTuple):
    bits: int
    group: int
    has_offsets: bool
    zero: int
    outputs: tuple[int, ...] = (70,)
    num_inputs: int = 256
    is_float: bool = False

    @property
    def is_e2m1(self) -> bool:
        return self.is_float and self.bits == 4


CASES = {
    "awq": Case(4, 128, True, 0),
    "q4_0": Case(4, 32, False, 8),
    "one zero, groups of half a block": Case(4, 64, False, 3, (5, 2, 7)),
    "inputs that do not fill their words": Case(4, 32, True, 0, num_inputs=160),
    "q8_0": Case(8, 32, False, 0),
    "gptq of 8 bits": Case(8, 128, True, 0),
    "one group": Case(8, 192, False, -3, num_inputs=192),
    "fp8 by groups": Case(8, 128, False, 0, is_float=True),
    "e2m1": Case(4, 32, False, 0, num_inputs=160, is_float=True),
}


def made(case: Case) -> tuple[QuantizedWords, Values]:
    """The matrix, and its weights [N, K]."""
    rng = np.random.default_rng(0)
    shape = *case.outputs, case.num_inputs
    groups = *case.outputs, case.num_inputs // case.group
    low, dtype = (0, np.uint8) if case.bits == 4 else (-128, np.int8)
    codes = rng.integers(low, low + 2**case.bits, shape).astype(dtype)
    if case.is_float and case.bits == 8:
        codes = rng.uniform(-448, 448, shape).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 1, groups).astype(np.float16).astype(np.float32)
    scales = np.exp2(rng.integers(-3, 3, groups)).astype(np.float32) if case.is_e2m1 else scales
    offsets = -rng.integers(0, 16, groups).astype(np.float32) * scales if case.has_offsets else None
    kind: Any = {"bits": case.bits, "zero": case.zero, "is_float": case.is_float}
    matrix = jax.jit(partial(to_words, num_output_axes=len(case.outputs), **kind))(codes, scales, offsets)
    codes = 2 * codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) if case.is_e2m1 else codes
    weights = (codes.reshape(*groups, -1).astype(np.float64) - case.zero) * scales[..., None]
    weights += 0 if offsets is None else offsets[..., None]
    return matrix, weights.reshape(-1, case.num_inputs)


def rows(num: int, num_inputs: int, dtype: Any) -> jax.Array:
    return jnp.array(np.random.default_rng(1).standard_normal((num, num_inputs)), dtype)


def check(got: Any, x: jax.Array, weights: Values, tolerance: float) -> None:
    expected = np.asarray(x).astype(np.float64) @ weights.T
    got = np.asarray(got).astype(np.float32).reshape(expected.shape)
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("name", CASES)
def test_what_is_laid_out_is_what_it_was(name: str) -> None:
    """Exactly, if scales and zero points have 16 bits."""
    matrix, weights = made(CASES[name])
    close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    close(jax.jit(lambda matrix: matrix.expanded(jnp.float32))(matrix), weights)
    if len(matrix.outputs) == 1:
        close(jax.jit(lambda matrix: matrix.rows(np.array([3, 0])))(matrix), weights[[3, 0]])


def test_groups_without_a_scale_and_offsets_of_more_bits() -> None:
    codes, scales = np.arange(64, dtype=np.uint8)[None] % 16, np.array([[0.0, 0.1]], np.float32)
    offsets = np.array([[0.3, -0.4321]], np.float32)
    matrix = to_words(codes, scales, offsets, num_output_axes=1, bits=4, zero=0)
    expected = np.concatenate([np.full(32, 0.3), codes[0, 32:] * 0.1 - 0.4321])
    np.testing.assert_allclose(matrix.expanded(jnp.float32)[0], expected, rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize(
    ("name", "num_rows"), [*((name, 3) for name in CASES), ("awq", 100), ("q4_0", 100), ("q8_0", 100)]
)
def test_products(name: str, num_rows: int) -> None:
    """Weights are rounded as the activations are."""
    case = CASES[name]
    matrix, weights = made(case)
    is_narrow = case.has_offsets or case.is_float
    x = rows(num_rows, case.num_inputs, jnp.bfloat16 if is_narrow else jnp.float16)
    out = jax.jit(lambda matrix, x: matrix.matmul(x))(matrix, x)
    assert (out.shape, out.dtype) == ((num_rows, *case.outputs), x.dtype)
    check(out, x, weights, 5e-3 if x.dtype == jnp.bfloat16 else 1e-3)


@pytest.mark.parametrize("tiling", [Tiling(16, 1), Tiling(128, 3)])
def test_a_product_is_the_same_however_it_is_cut(tiling: Tiling) -> None:
    case = CASES["awq"]._replace(num_inputs=640)
    matrix, weights = made(case)
    x = rows(150, case.num_inputs, jnp.bfloat16)
    check(jax.jit(partial(multiply, tiling=tiling))(x, matrix), x, weights, 5e-3)


@pytest.mark.parametrize(("num_rows", "dtype"), [(MAX_ROWS + 1, jnp.bfloat16), (3, jnp.float32)])
def test_many_rows_and_float32_are_multiplied_by_what_is_expanded(num_rows: int, dtype: Any) -> None:
    matrix, weights = made(CASES["awq"])
    x = rows(num_rows, 256, dtype)
    check(
        jax.jit(lambda matrix, x: matrix.matmul(x))(matrix, x),
        x,
        weights,
        5e-3 if dtype == jnp.bfloat16 else 1e-5,
    )


def test_gates() -> None:
    case = CASES["q4_0"]._replace(outputs=(24, 2))
    matrix, weights = made(case)
    x, bias = rows(3, case.num_inputs, jnp.bfloat16), rows(24, 2, jnp.float32)
    gates, ups = np.moveaxis((np.asarray(x, np.float64) @ weights.T).reshape(3, 24, 2) + bias, 2, 0)
    got = matrix.gated(x, jax.nn.relu, bias.astype(jnp.bfloat16))
    expected = np.maximum(gates, 0) * ups
    assert np.abs(got.astype(jnp.float32) - expected).max() <= 2e-2 * np.abs(expected).max()


@pytest.mark.parametrize("splits", [1, 3])
def test_what_reads_parts(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added to tokens and normed, and heads, are not summed before."""
    monkeypatch.setattr(gpu_quantized, "tiling_for", lambda *_: Tiling(16, splits))
    matrix, weights = made(CASES["awq"]._replace(outputs=(6, 16), num_inputs=640))
    x, around, norm = rows(3, 640, jnp.bfloat16), rows(3, 96, jnp.bfloat16), Norm(jnp.ones(96), 1e-5, 0.0)
    both = matrix.join(around, x, None, norm, False)
    assert both is not None
    whole = np.asarray(around, np.float64) + np.asarray(x, np.float64) @ weights.T
    for got, expected in zip(both, (whole, decoder.normalize(jnp.asarray(whole), 1e-5)), strict=True):
        assert np.abs(got.astype(jnp.float32) - expected).max() <= 1e-2 * np.abs(expected).max()
    begun = matrix.begin(x, None)
    if splits == 1:
        assert begun is None
    else:
        assert begun is not None
        assert begun.product.shape == (splits, 3, 6, 16)
        check(begun.product.sum(axis=0), x, weights, 5e-3)
    assert matrix.join(around.astype(jnp.float32), x.astype(jnp.float32), None, norm, False) is None
    assert matrix.begin(x.astype(jnp.float32), None) is None


@pytest.mark.parametrize("num_rows", [24, 32])
def test_gates_on_the_way(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program has all inputs, and outputs fill it."""
    matrix, weights = made(CASES["awq"]._replace(outputs=(128, 2)))
    matrix, x = replace(matrix, fuses_gates=True), rows(num_rows, 256, jnp.bfloat16)
    gates, ups = np.moveaxis((np.asarray(x, np.float64) @ weights.T).reshape(num_rows, 128, 2), 2, 0)
    expected, asked = gates / (1 + np.exp(-gates)) * ups, []
    for splits in (1, 2):  # of two an activation is made afterwards
        monkeypatch.setattr(gpu_quantized, "tiling_for", lambda *_, splits=splits: Tiling(32, splits))
        traced = jax.jit(lambda matrix, x: matrix.gated(x, jax.nn.silu)).trace(matrix, x)
        asked.append("logistic" not in str(traced.jaxpr))
        got = traced.lower().compile()(matrix, x).astype(jnp.float32)
        assert np.abs(got - expected).max() <= 2e-2 * np.abs(expected).max()
    assert asked == [True, False]


@pytest.mark.parametrize("num_rows", [1, 40, 128, 256])
@pytest.mark.parametrize("shape", [(6144, 32), (4096, 112), (28672, 32), (64, 1)])
def test_tilings_have_work_for_every_split(num_rows: int, shape: tuple[int, int]) -> None:
    tiling = tiling_for(num_rows, *shape)
    assert 1 <= tiling.splits <= shape[1]
    assert 16 <= tiling.rows <= 128


@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["awq", "q8_0"])
def test_lowers_for_gpus(name: str, dtype: Any, num_rows: int) -> None:
    matrix, _ = made(CASES[name])
    text = lowered_for_gpus(lambda x: matrix.matmul(x), rows(num_rows, 256, dtype))
    kind = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"
    assert f"fma.rn.{kind} f, f, one, w" in text
    assert f"fma.rn.{kind} $0" in text
