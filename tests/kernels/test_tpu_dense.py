"""Products of many rows on TPUs: the kernel, interpreted, against the plain matrix; and where it is split."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.execution.weight_layouts import over_tpus
from hex_llm.kernels import tpu_dense
from hex_llm.kernels.sharded import ShardedMatrix
from hex_llm.kernels.tpu_dense import DenseRows
from hex_llm.models.linear import Dense
from hex_llm.parallel.shardings import TP, make_mesh


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 rows at most, two parts of which stay, and 128 columns."""
    for name, size in {"MANY_ROWS": 20, "MAX_PART": 24, "MIN_COLUMNS": 128, "MAX_COLUMNS": 128}.items():
        monkeypatch.setattr(tpu_dense, name, size)
    monkeypatch.setattr(tpu_dense, "ROWS_BYTES", 64 * 256 * 4)


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def dense(shape: tuple[int, ...], num_outputs: int, devices: int, spec: P) -> Dense:
    array = jax.device_put(normal(*shape), NamedSharding(make_mesh(devices), spec))
    return Dense(array, num_outputs)


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("num_rows", "shape", "num_outputs", "devices", "spec"),
    [
        (19, (256, 256), 1, 1, P()),
        (120, (256, 256), 1, 1, P()),
        (50, (2, 3, 128, 256), 3, 2, P(TP)),
        (50, (256, 2, 1, 128), 1, 2, P(None, TP)),
    ],
)
def test_products(num_rows: int, shape: Any, num_outputs: int, devices: int, spec: P) -> None:
    matrix = dense(shape, num_outputs, devices, spec)
    held = over_tpus(matrix, with_rows=True)
    assert isinstance(held, DenseRows | ShardedMatrix)
    x = jnp.array(normal(num_rows, 256))
    with pltpu.force_tpu_interpret_mode():
        out = jax.jit(lambda held, x: held.matmul(x))(held, x)
    close(out, matrix.matmul(x))


@pytest.mark.parametrize("num_rows", [19, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gates_and_ups(num_rows: int, has_bias: bool) -> None:
    matrix = dense((256, 2, 256), 2, 2, P(TP))
    x, bias = jnp.array(normal(num_rows, 256)), jnp.array(normal(256, 2)) if has_bias else None
    with pltpu.force_tpu_interpret_mode():
        out = jax.jit(lambda held, x: held.gated(x, jax.nn.silu, bias))(over_tpus(matrix, with_rows=True), x)
    close(out, matrix.gated(x, jax.nn.silu, bias))


def test_a_row_that_is_no_number_stays_one() -> None:
    matrix, x = dense((128, 128), 1, 1, P()), normal(40, 128)
    x[7] = np.nan
    with pltpu.force_tpu_interpret_mode():
        out = np.asarray(jax.jit(lambda held, x: held.matmul(x))(over_tpus(matrix, with_rows=True), x))
    assert np.isnan(out).all(axis=1).nonzero()[0].tolist() == [7]
    assert not np.isnan(np.delete(out, 7, axis=0)).any()


def test_what_is_no_whole_lanes_stays_as_it_is() -> None:
    matrix = dense((192, 256), 1, 2, P(TP))
    assert over_tpus(matrix, with_rows=True) is matrix


def test_a_table_whose_rows_are_no_whole_lanes() -> None:
    array = normal(6, 200)
    table = tpu_dense.to_table(jnp.array(array))
    assert table.array.shape == (6, 256)
    close(table.rows(jnp.array([4, 0, 4])), array[[4, 0, 4]])
    x = normal(3, 200)
    close(table.matmul(jnp.array(x)), x @ array.T)
