"""Quantized matrices over several GPUs, whose kernels are interpreted: against the expanded matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.execution.programs import split_by_width
from hex_llm.execution.weight_layouts import over_gpus
from hex_llm.kernels import experts, gpu_experts
from hex_llm.kernels.adapters import Owners
from hex_llm.kernels.experts import ExpertKernels, ExpertOptions
from hex_llm.kernels.gpu_quantized import MAX_ROWS
from hex_llm.kernels.sharded import ShardedMatrix
from hex_llm.models.adapters import Adapted, SlotMatrices
from hex_llm.models.linear import Dense
from hex_llm.models.params import Rounding
from hex_llm.models.quantized import Quantized, quantize
from hex_llm.parallel.shardings import TP, make_mesh
from tests.kernels.lowering import lowered_for_gpus

INT4, INT8, WHOLE8 = Rounding(4, 32), Rounding(8, 64), Rounding(8, 0, to_float=True)
E2M1, FLOAT8 = Rounding(4, 32, to_float=True), Rounding(8, 32, to_float=True)


def quantized(shape: tuple[int, ...], num_outputs: int, to: Rounding, devices: int, spec: P) -> Quantized:
    array = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    whole = Dense(jnp.array(array), num_outputs)
    return quantize(jax.device_put(whole, NamedSharding(make_mesh(devices), spec)), to)


def rows(num: int, num_inputs: int) -> jax.Array:
    return jnp.array(np.random.default_rng(num).standard_normal((num, num_inputs)), jnp.bfloat16)


def check(got: jax.Array, expected: jax.Array, tolerance: float = 8e-3) -> None:
    """Weights and what devices add up are rounded as activations are."""
    off = np.abs(np.asarray(got, np.float32) - np.asarray(expected))
    assert off.max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize(
    ("num_rows", "shape", "num_outputs", "to", "devices", "spec"),
    [
        (5, (4, 3, 16, 64), 3, INT4, 4, P(TP)),  # tiles of outputs that are not filled
        (5, (70, 4, 96), 1, E2M1, 2, P(None, TP)),  # nor blocks of inputs
        (MAX_ROWS + 1, (70, 192), 1, INT4, 2, P(None, TP)),
        pytest.param(1, (70, 256), 1, INT4, 4, P(None, TP), marks=pytest.mark.slow),
        pytest.param(5, (70, 256), 1, INT8, 4, P(None, TP), marks=pytest.mark.slow),
        pytest.param(5, (4, 3, 16, 64), 3, FLOAT8, 2, P(TP), marks=pytest.mark.slow),
        pytest.param(5, (70, 64), 1, INT4, 2, P(), marks=pytest.mark.slow),
    ],
)
def test_products(
    num_rows: int, shape: tuple[int, ...], num_outputs: int, to: Rounding, devices: int, spec: P
) -> None:
    part = quantized(shape, num_outputs, to, devices, spec)
    held = over_gpus(part)
    assert isinstance(held, ShardedMatrix)
    x = rows(num_rows, int(np.prod(shape[num_outputs:])))
    out = jax.jit(lambda held, x: held.matmul(x))(held, x)
    assert out.dtype == x.dtype
    check(out, part.matmul(x.astype(jnp.float32)))


def test_gates() -> None:
    part, bias = quantized((24, 2, 64), 2, INT4, 2, P(TP)), jnp.arange(48.0).reshape(24, 2) / 10
    x = rows(3, 64)
    got = jax.jit(lambda held, x: held.gated(x, jax.nn.relu, bias))(over_gpus(part), x)
    check(got, part.gated(x.astype(jnp.float32), jax.nn.relu, bias), 2e-2)


@pytest.mark.parametrize("spec", [P(TP), P()])
def test_rows_of_a_table(spec: P) -> None:
    """Of any device's part, and whole where the vocabulary does not divide."""
    part, which = quantized((96, 64), 1, INT8, 4, spec), jnp.array([3, 95, 24, 3])
    found = jax.jit(lambda held: held.rows(which))(over_gpus(part))
    np.testing.assert_allclose(found, part.rows(which), rtol=1e-5, atol=1e-5)


def test_adapters_add_to_it() -> None:
    part, x = quantized((24, 128), 1, INT8, 2, P(None, TP)), rows(4, 128)
    slots, which = SlotMatrices(rows(2, 128)[:, None], rows(24, 2)[..., None]), jnp.array([0, 1, 2, 1])
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), slots)
    expected = Adapted(part, exact, Owners(which)).matmul(x.astype(jnp.float32))
    check(
        jax.jit(lambda held, x: Adapted(held, slots, Owners(which)).matmul(x))(over_gpus(part), x), expected
    )


@pytest.mark.parametrize(
    ("to", "devices"),
    [
        (E2M1, 4),
        pytest.param(INT4, 2, marks=pytest.mark.slow),
        pytest.param(WHOLE8, 2, marks=pytest.mark.slow),
    ],
)
def test_experts(to: Rounding, devices: int) -> None:
    """Their widths are split: the outputs of gates and ups, the inputs of what follows."""
    num, width, inputs = 4, 128, 64
    gate_up = quantized((num, 2, width, inputs), 3, to, devices, P(None, None, TP))
    down = quantized((num, inputs, width), 2, to, devices, P(None, None, TP))
    x, chosen = rows(3, inputs), jnp.array([[3, 0], [0, 1], [1, 3]])
    given = chosen, jnp.array([[0.7, 0.3], [0.5, 0.5], [0.9, 0.1]])
    bias = jnp.linspace(-1, 1, num * 2 * width).reshape(num, 2, width)
    options = ExpertOptions(jax.nn.silu, scale_input=False, bias=bias)
    kernels = split_by_width(ExpertKernels(experts.choose, gpu_experts.fused_moe), make_mesh(devices))

    def run(x: jax.Array, gate_up: Any, down: Any) -> jax.Array:
        return kernels.run(x, *given, gate_up, down, options)

    exact = (matrix.expanded(jnp.float32).array for matrix in (gate_up, down))
    expected = experts.dense(x.astype(jnp.float32), *given, *exact, options)
    check(jax.jit(run)(x, over_gpus(gate_up), over_gpus(down)), expected, 2e-2)


@pytest.mark.parametrize("spec", [P(TP), P(None, TP)])
def test_lowers_for_gpus(spec: P) -> None:
    """To a kernel for a device's part, and, where inputs are split, one sum."""
    held = over_gpus(quantized((128, 128), 1, INT4, 2, spec))
    gpus = AbstractMesh(
        (2,), (TP,), (AxisType.Auto,), abstract_device=AbstractDevice("NVIDIA H200", None, "gpu")
    )
    held = replace(held, mesh=gpus)
    text = lowered_for_gpus(lambda x: held.matmul(x), rows(5, 128))
    assert (text.count("fma.rn.bf16x2 $0"), text.count("all_reduce")) == (4, spec == P(None, TP))
