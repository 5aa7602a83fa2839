"""Quantized products on TPUs: the kernel, interpreted, against the expanded matrix; and where it is split."""

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
from hex_llm.kernels import tpu_quantized
from hex_llm.kernels.tpu_quantized import QuantizedColumns
from hex_llm.models.linear import Dense
from hex_llm.models.params import Rounding
from hex_llm.models.quantized import Quantized, quantize
from hex_llm.parallel.shardings import TP, make_mesh

INT4, INT8, FLOAT8 = Rounding(4, 32), Rounding(8, 128), Rounding(8, 0, to_float=True)
WIDE4 = Rounding(4, 128)


def quantized(shape: tuple[int, ...], num_outputs: int, to: Rounding, devices: int, spec: P) -> Quantized:
    array = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    whole = Dense(jnp.array(array), num_outputs)
    return quantize(jax.device_put(whole, NamedSharding(make_mesh(devices), spec)), to)


def rows(num: int, num_inputs: int) -> jax.Array:
    return jnp.array(np.random.default_rng(num).standard_normal((num, num_inputs), np.float32))


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("num_rows", "shape", "num_outputs", "to", "devices", "spec"),
    [
        pytest.param(5, (2, 3, 128, 256), 3, INT4, 2, P(TP), marks=pytest.mark.slow),
        (5, (128, 2, 2, 128), 1, INT8, 2, P(None, TP)),
        (33, (256, 384), 1, WIDE4, 1, P()),
        pytest.param(129, (256, 384), 1, WIDE4, 1, P(), marks=pytest.mark.slow),
        pytest.param(5, (256, 512), 1, FLOAT8, 2, P(None, TP), marks=pytest.mark.slow),
        pytest.param(129, (256, 384), 1, FLOAT8, 1, P(), marks=pytest.mark.slow),
        pytest.param(5, (256, 1024), 1, Rounding(8, 1024), 1, P(), marks=pytest.mark.slow),
        pytest.param(5, (256, 512), 1, INT4, 2, P(None, TP), marks=pytest.mark.slow),
    ],
)
def test_products(num_rows: int, shape: Any, num_outputs: int, to: Rounding, devices: int, spec: P) -> None:
    part = quantized(shape, num_outputs, to, devices, spec)
    held = over_tpus(part)
    assert isinstance(held.shard if devices > 1 else held, QuantizedColumns)
    x = rows(num_rows, int(np.prod(shape[num_outputs:])))
    with pltpu.force_tpu_interpret_mode():
        out = jax.jit(lambda held, x: held.matmul(x))(held, x)
    close(out, part.matmul(x))


def test_gates_and_ups_of_several_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix is expanded for the first of them alone."""
    monkeypatch.setattr(tpu_quantized, "MAX_ROWS", 16)
    part = quantized((256, 2, 256), 2, INT4, 2, P(TP))
    x, bias = rows(40, 256), jnp.arange(512.0).reshape(256, 2) / 100
    with pltpu.force_tpu_interpret_mode():
        out = jax.jit(lambda held, x: held.gated(x, jax.nn.silu, bias))(over_tpus(part), x)
    close(out, part.gated(x, jax.nn.silu, bias))


def test_rows_of_a_table() -> None:
    part = quantized((256, 256), 1, INT4, 1, P())
    which = jnp.array([3, 200, 3])
    close(over_tpus(part).rows(which), part.rows(which))


def test_what_the_kernel_is_not_for_is_expanded() -> None:
    part = quantized((96, 256), 1, INT4, 1, P())
    held = over_tpus(part)
    assert isinstance(held, Dense)
    close(held.array, part.expanded(jnp.bfloat16).array)
