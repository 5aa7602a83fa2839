"""Quantized experts on TPUs: the kernel, interpreted, against all experts for all tokens, expanded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.execution.programs import split_by_width
from hex_llm.execution.weight_layouts import over_tpus
from hex_llm.kernels import experts, tpu_experts, tpu_quantized_experts
from hex_llm.kernels.experts import ExpertKernels, ExpertOptions
from hex_llm.kernels.sharded import ShardedMatrix
from hex_llm.kernels.tpu_quantized_experts import ExpertColumns
from hex_llm.models.linear import Dense
from hex_llm.models.params import FeedForward, Rounding
from hex_llm.models.quantized import Quantized, quantize
from hex_llm.parallel.shardings import TP, make_mesh

NUM_EXPERTS = 5
PLAIN = ExpertOptions(jax.nn.silu, scale_input=False)
SCALED = ExpertOptions(jax.nn.silu, scale_input=True)
LIMITED = ExpertOptions(jax.nn.silu, scale_input=False, limit=0.7)  # with biases
ROUNDINGS = {
    "int4": Rounding(4, 32),
    "int4, wide": Rounding(4, 128),
    "int4, narrow": Rounding(4, 8),
    "int8": Rounding(8, 16),
    "e2m1": Rounding(4, 32, to_float=True),
    "fp8": Rounding(8, 0, to_float=True),
}


def quantized(shape: tuple[int, ...], to: Rounding, devices: int) -> Quantized:
    """[E, 2, F, D] or [E, D, F], with groups divided as execution/weight_plan.py does it."""
    array = np.random.default_rng(len(shape)).standard_normal(shape, np.float32) / shape[-1] ** 0.5
    made = quantize(Dense(jnp.array(array), len(shape) - 1), to)
    if len(shape) == 3 and to.group:
        parts = to.group // math.gcd(to.group, shape[-1] // devices)
        tables = made.scales, made.offsets
        scales, offsets = (t if t is None else jnp.repeat(t, parts, axis=-1) for t in tables)
        made = replace(made, scales=scales, offsets=offsets)
    mesh, spec = make_mesh(devices), P(None, None, TP, *[None] * (len(shape) - 3))

    def placed(array: jax.Array) -> jax.Array:
        fits = array.shape[2] % devices == 0  # of what all inputs share there is one
        return jax.device_put(array, NamedSharding(mesh, spec if fits else P()))

    part: Quantized = jax.tree.map(placed, made)
    return part


def routed(num_tokens: int, inputs: int, num_experts: int = NUM_EXPERTS) -> list[Any]:
    """Tokens, and whom they choose of the first experts."""
    rng = np.random.default_rng(num_tokens)
    chosen = jnp.array([rng.permutation(num_experts)[:2] for _ in range(num_tokens)], jnp.int32)
    scores = jnp.array(rng.uniform(0.1, 1, chosen.shape), jnp.float32)
    return [jnp.array(rng.standard_normal((num_tokens, inputs)), jnp.float32), chosen, scores]


def held(
    to: Rounding, width: int, inputs: int, devices: int = 1, has_bias: bool = False
) -> tuple[FeedForward, FeedForward]:
    """As TPUs hold it, and as it was."""
    gate_up = quantized((NUM_EXPERTS, 2, width, inputs), to, devices)
    bias = jnp.linspace(-1, 1, NUM_EXPERTS * 2 * width).reshape(NUM_EXPERTS, 2, width) if has_bias else None
    part = FeedForward(gate_up, quantized((NUM_EXPERTS, inputs, width), to, devices), bias)
    return over_tpus(part), part


def expected(given: list[Any], part: FeedForward, options: ExpertOptions) -> np.ndarray:
    both = [matrix.expanded(jnp.float32).array for matrix in (part.gate_up, part.down)]
    with jax.default_matmul_precision("highest"):
        return np.asarray(experts.dense(*given, *both, options._replace(bias=part.gate_up_bias)))


def run(given: list[Any], part: FeedForward, options: ExpertOptions, devices: int = 1) -> np.ndarray:
    kernels = split_by_width(ExpertKernels(experts.choose, tpu_experts.fused_moe), make_mesh(devices))

    def function(*given: Any) -> jax.Array:
        return kernels.run(*given, options=options._replace(bias=part.gate_up_bias))

    with pltpu.force_tpu_interpret_mode(), jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(function)(*given, part.gate_up, part.down))


@pytest.mark.parametrize(
    ("name", "num_tokens", "options", "devices"),
    [
        ("int4", 1, PLAIN, 1),
        ("e2m1", 9, LIMITED, 2),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in [
                ("int4, wide", 9, SCALED, 1),
                ("int4, narrow", 9, PLAIN, 1),
                ("int4", 300, SCALED, 2),
                ("e2m1", 300, LIMITED, 2),
                ("int8", 9, PLAIN, 2),
                ("int8", 300, PLAIN, 1),
                ("fp8", 9, PLAIN, 2),
                ("fp8", 300, PLAIN, 1),
            ]
        ),
    ],
)
def test_tokens_visit_the_experts_that_they_chose(
    name: str, num_tokens: int, options: ExpertOptions, devices: int
) -> None:
    """Neither width nor inputs are whole lanes, on any device."""
    width, inputs = (256, 128) if name == "int4, wide" else (96, 160)
    laid_out, part = held(ROUNDINGS[name], width, inputs, devices, options.limit is not None)
    assert isinstance(laid_out.gate_up, ExpertColumns | ShardedMatrix)
    given = routed(num_tokens, inputs)
    out = run(given, laid_out, options, devices)
    np.testing.assert_allclose(out, expected(given, part, options), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("num_tokens", [9, pytest.param(300, marks=pytest.mark.slow)])
def test_what_is_no_number_reaches_nobody_else(num_tokens: int) -> None:
    """A token, and experts that nobody chose."""
    laid_out, part = held(ROUNDINGS["int4"], 96, 160)
    x, chosen, scores = routed(num_tokens, 160, num_experts=NUM_EXPERTS - 1)

    def spoiled(matrix: Any) -> Any:
        return replace(matrix, scales=matrix.scales.at[-1].set(jnp.nan))

    laid_out = replace(laid_out, gate_up=spoiled(laid_out.gate_up), down=spoiled(laid_out.down))
    out = run([x.at[3].set(jnp.nan), chosen, scores], laid_out, PLAIN)
    assert np.isnan(out[3]).all()
    others = np.arange(num_tokens) != 3
    np.testing.assert_allclose(
        out[others], expected([x, chosen, scores], part, PLAIN)[others], rtol=1e-4, atol=2e-5
    )


def test_what_the_kernel_is_not_for_is_expanded() -> None:
    assert [tpu_quantized_experts.can_multiply(group) for group in (0, 8, 32, 256)] == [True] * 4
    assert not any(tpu_quantized_experts.can_multiply(group) for group in (4, 96))
    laid_out, part = held(Rounding(8, 4), 96, 160)
    assert isinstance(laid_out.gate_up, Dense)
    np.testing.assert_array_equal(laid_out.down.array, part.down.expanded(jnp.bfloat16).array)
