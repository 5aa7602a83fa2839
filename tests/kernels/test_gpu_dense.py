"""Gates and ups of some rows on GPUs, interpreted where there is none."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import gpu_dense, gpu_launch
from hex_llm.models.linear import Dense
from tests.kernels.lowering import lowered_for_gpus

GELU = partial(jax.nn.gelu, approximate=True)


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
    np.testing.assert_allclose(
        *(np.asarray(one, np.float32) for one in (got, expected)), rtol=0.02, atol=0.02
    )


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
