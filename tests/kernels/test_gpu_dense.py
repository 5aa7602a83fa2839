"""Products of some rows on GPUs, interpreted where there is none."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import gpu_dense, gpu_launch
from hex_llm.kernels.adapters import Norm
from hex_llm.models import decoder
from hex_llm.models.linear import Dense, linear
from hex_llm.models.quantized import Float8
from tests.kernels.lowering import lowered_for_gpus

GELU = partial(jax.nn.gelu, approximate=True)


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape[-1]).standard_normal(shape, np.float32) / 4, dtype)


def close(got: jax.Array, expected: jax.Array, tolerance: float = 0.02) -> None:
    whole = np.asarray(expected, np.float32)
    np.testing.assert_allclose(np.asarray(got, np.float32), whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    [(2, jnp.bfloat16), (16, jnp.float16), (24, jnp.bfloat16), (64, jnp.float16), (16, jnp.float8_e4m3fn)],
)
@pytest.mark.parametrize("num_outputs", [64 * 80, 64 * 40, 64 * 20])
def test_products(num_rows: int, num_outputs: int, dtype: Any) -> None:
    """With a tail of rows and without, by one program and by several, which do not round their parts."""
    x, matrix = normal(num_rows, 2048, dtype=dtype), normal(num_outputs, 2048, dtype=dtype)
    parts = gpu_dense.product(x, matrix, jnp.bfloat16)
    splits = 64 * 80 // num_outputs
    assert parts.shape == (splits, num_rows, num_outputs)
    assert parts.dtype == (jnp.float32 if splits > 1 else jnp.bfloat16)
    exact = x.astype(jnp.float32) @ matrix.astype(jnp.float32).T
    close(parts.astype(jnp.float32).sum(axis=0), exact, 0.02 if splits == 1 else 1e-4)


@pytest.mark.parametrize("num_rows", [1, 10])
def test_scales(num_rows: int) -> None:
    """Rows that only fill up have none."""
    x, matrix = (normal(n, 1024, dtype=jnp.float8_e4m3fn) for n in (16, 64 * 80))
    of_rows, of_outputs = jnp.abs(normal(num_rows)), jnp.abs(normal(64 * 80))
    scales = of_rows.astype(jnp.float32), of_outputs.astype(jnp.float32)
    [out] = gpu_dense.product(x, matrix, jnp.bfloat16, scales)
    exact = x[:num_rows].astype(jnp.float32) @ matrix.astype(jnp.float32).T
    close(out, exact * scales[0][:, None] * scales[1])


@pytest.mark.parametrize("width", [4096, 96, 9000])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_a_product_is_added_to(width: int, splits: int, dtype: Any) -> None:
    norm = Norm(normal(width, dtype=dtype), 1e-5, 1.0)
    around = normal(5, width, dtype=dtype)
    parts = normal(splits, 5, width, dtype=dtype if splits == 1 else jnp.float32)
    joined, normed = gpu_dense.join(around, parts, norm)
    assert joined.dtype == normed.dtype == dtype
    whole = around.astype(jnp.float32) + parts.astype(jnp.float32).sum(axis=0)
    close(joined, whole)
    close(normed, decoder.normalize(whole, norm.eps) * (norm.weight.astype(jnp.float32) + 1))


@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_matrix_joins(num_rows: int) -> None:
    """One row as XLA multiplies it, some by the kernel."""
    x, around = normal(num_rows, 8, 256), normal(num_rows, 64 * 20)
    matrix = Dense(normal(64 * 20, 8, 256), has_kernel=True)
    norm = Norm(normal(64 * 20), 1e-5, 0.0)
    both = matrix.join(around, x, None, norm, False)
    assert both is not None
    whole = around.astype(jnp.float32) + linear(x, matrix.expanded(jnp.bfloat16)).astype(jnp.float32)
    close(both[0], whole)
    close(both[1], decoder.normalize(whole, norm.eps) * norm.weight.astype(jnp.float32))
    assert matrix.join(around.astype(jnp.float32), x.astype(jnp.float32), None, norm, False) is None
    assert Dense(matrix.array).join(around, x, None, norm, False) is None


def test_which_products_it_is_for() -> None:
    x, matrix = normal(64, 2048), normal(64 * 20, 2048)
    assert gpu_dense.can_multiply(x, matrix)
    codes = x.astype(jnp.float8_e4m3fn)
    assert gpu_dense.can_multiply(codes[:16], matrix.astype(codes.dtype))
    assert not gpu_dense.can_multiply(codes[:32], matrix.astype(codes.dtype))
    assert not gpu_dense.can_multiply(x[:1], matrix)
    assert not gpu_dense.can_multiply(jnp.tile(x, (2, 1)), matrix)
    assert not gpu_dense.can_multiply(x.astype(jnp.float32), matrix)
    assert not gpu_dense.can_multiply(x, matrix[:-1]), "which no programs share evenly"
    assert not gpu_dense.can_multiply(x[:, :-256], matrix[:, :-256])
    assert not gpu_dense.can_multiply(x, matrix[:-64]), "too few programs"
    with gpu_launch.made_for(8.9):
        assert not gpu_dense.can_multiply(x, matrix), "not measured"


def arrays(num_rows: int, width: int = 7680, num_inputs: int = 192, dtype: Any = jnp.bfloat16) -> Any:
    """Rows, and gates and ups."""
    rng = np.random.default_rng(0)
    shapes = (num_rows, num_inputs), (width, 2, num_inputs)
    return [jnp.asarray(rng.standard_normal(shape, dtype=np.float32) / 4, dtype) for shape in shapes]


@pytest.mark.parametrize("num_rows", [2, 16, 24, 64, 72])
@pytest.mark.parametrize("activation", [jax.nn.silu, GELU])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_beside_xla(num_rows: int, activation: Any, dtype: Any) -> None:
    """With a tail of rows and without, in both tilings."""
    x, matrix = arrays(num_rows, 128, dtype=dtype)
    got, expected = jax.jit(
        lambda x, matrix: (
            gpu_dense.gated(x, matrix, activation),
            Dense(matrix, num_outputs=2).gated(x, activation),
        )
    )(x, matrix)
    assert got.dtype == dtype
    close(got, expected)


def test_which_rows_it_is_for() -> None:
    x, matrix = arrays(64)
    assert gpu_dense.can_gate(x, matrix)
    assert not gpu_dense.can_gate(x[:1], matrix)
    assert not gpu_dense.can_gate(jnp.tile(x, (3, 1)), matrix)
    assert not gpu_dense.can_gate(x.astype(jnp.float32), matrix)
    assert not gpu_dense.can_gate(x, matrix[:-1]), "which no programs share evenly"
    assert not gpu_dense.can_gate(x[:, :-8], matrix[..., :-8])
    assert not gpu_dense.can_gate(x, matrix[:1024]), "too few programs"
    with gpu_launch.made_for(8.9):
        assert not gpu_dense.can_gate(x, matrix), "not measured"


@pytest.mark.parametrize("num_rows", [2, 64, 129])
def test_a_matrix_of_a_gpu_that_is_alone_asks_it(num_rows: int) -> None:
    x, matrix = arrays(num_rows)
    for fuses in (False, True):
        dense = Dense(matrix, num_outputs=2, fuses_gates=fuses)
        text = lowered_for_gpus(lambda dense, x: dense.gated(x, jax.nn.silu), dense, x)
        assert ("triton" in text) == (fuses and num_rows < 129)


@pytest.mark.parametrize(("num_rows", "num_outputs", "alone"), [(2, 5120, 1), (64, 2048, 2), (65, 5120, 0)])
def test_products_of_a_gpu_that_is_alone(num_rows: int, num_outputs: int, alone: int) -> None:
    """By itself a product is the kernel's if one program sums it; with what it is added to, in any case."""
    x, matrix, around = normal(num_rows, 2048), normal(num_outputs, 2, 1024), normal(num_rows, num_outputs)
    norm = Norm(normal(num_outputs), 1e-5, 0.0)
    for has_kernel in (False, True):
        dense = Dense(matrix, has_kernel=has_kernel)
        text = lowered_for_gpus(linear, x, dense)
        assert ("triton" in text) == (has_kernel and alone == 1)
        assert (dense.join(around, x, None, norm, False) is not None) == (has_kernel and alone > 0)
    if alone:
        both = dense.join(around, x, None, norm, False)
        assert both is not None
        plain = around + linear(x, Dense(matrix))
        close(both[0], plain)


@pytest.mark.parametrize("num_rows", [1, 10])
def test_products_of_codes(num_rows: int) -> None:
    """By one program each, as of heads and of gates and ups, and by several with what they are added to."""
    x, wide, high = normal(num_rows, 2048), normal(2560, 2, 2048), normal(2560, 2048)
    around, norm = normal(num_rows, 2560), Norm(normal(2560), 1e-5, 0.0)

    def made(has_kernel: bool) -> Any:
        def matrix(array: jax.Array, num_outputs: int = 1) -> Float8:
            scales = jnp.abs(normal(*array.shape[:num_outputs], dtype=jnp.float32))
            more = {"has_kernel": has_kernel, "rounds_rows": True, "rounds_gated": True}
            return Float8((array * 100).astype(jnp.float8_e4m3fn), scales, **more)

        both = matrix(wide, 2)
        gated = both.gated(x, jax.nn.relu)
        return (
            linear(x, both),
            gated.codes.astype(jnp.float32)[:num_rows],
            matrix(high).join(around, x, None, norm, True),
        )

    (heads, codes, (joined, rounded)), (heads_, codes_, (joined_, rounded_)) = made(True), made(False)
    assert heads.dtype == joined.dtype == x.dtype
    for got, expected in ((heads, heads_), (joined, joined_), (rounded.scales, rounded_.scales)):
        scale = float(jnp.abs(expected.astype(jnp.float32)).max())
        close(got.astype(jnp.float32) / scale, expected.astype(jnp.float32) / scale)
    assert np.mean(np.asarray(codes != codes_)) < 0.05, "a product is rounded before it is scaled"


def test_nothing_is_looked_for_while_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each operation, that is: see gpu_launch.TRITON_DIALECT."""
    looked_for = []

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            looked_for.append(name)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    lowered_for_gpus(partial(gpu_dense.gated, activation=jax.nn.silu), *arrays(8))
    assert gpu_launch.TRITON_DIALECT not in looked_for
