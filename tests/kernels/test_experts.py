"""Every form of the routed experts against float64; the GPU's kernel interpreted where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.execution.weight_layouts import in_words
from hex_llm.kernels import cpu, cpu_experts, experts, gpu_experts, tpu_experts
from hex_llm.kernels.experts import ExpertOptions, RoutedExperts
from hex_llm.kernels.gpu_experts import Tiling
from hex_llm.kernels.gpu_quantized import QuantizedWords
from hex_llm.models.decoder import ACTIVATIONS
from hex_llm.models.linear import Dense
from hex_llm.models.params import Rounding
from hex_llm.models.quantized import quantize
from tests.kernels.lowering import lowered_for_gpus

SMALL = (Tiling(16, 16, 16, 2, 3, 4, 2), Tiling(16, 32, 16, 3, 2, 4, 2))
# Chosen experts of each token, of 5.
SPREADS: dict[str, Sequence[Sequence[int]]] = {
    "one token": [(3, 1)],
    "one choice": [(i * i % 5,) for i in range(21)],
    "all to one": [(2,)] * 50,
    "all to the last two": [(4, 3)] * 37,
    "ragged, two experts empty": [(0, 4)] * 3 + [(4, 2)] * 30 + [(2, 0)],
}


def arguments(spread: Sequence[Sequence[int]], dtype: Any, width: int = 72, inputs: int = 88) -> list[Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.array(rng.standard_normal(shape) / shape[-1] ** 0.5, dtype)

    chosen = jnp.array(spread, jnp.int32)
    scores = jnp.array(rng.uniform(0.1, 1, chosen.shape), jnp.float32)
    x = normal(len(spread), inputs) * inputs**0.5
    return [x, chosen, scores, normal(5, 2, width, inputs), normal(5, inputs, width)]


PLAIN = ExpertOptions(jax.nn.silu, scale_input=False)
SCALED = ExpertOptions(jax.nn.silu, scale_input=True)
LIMITED = ExpertOptions(jax.nn.silu, scale_input=False, limit=0.7)


def biases(options: ExpertOptions, width: int) -> jax.Array | None:
    """With a limit, which only models have that also have biases."""
    return None if options.limit is None else jnp.linspace(-1, 1, 5 * 2 * width).reshape(5, 2, width)


def run(fused_moe: RoutedExperts, given: Sequence[Any], options: ExpertOptions = PLAIN) -> np.ndarray:
    """Compiled in haste: what interprets kernels is long, and is run once."""
    gate_up = given[3]
    width = gate_up.outputs[2] if isinstance(gate_up, QuantizedWords) else gate_up.shape[2]
    function = partial(fused_moe, options=options._replace(bias=biases(options, width)))
    hasty = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    with jax.default_matmul_precision("highest"):
        out = jax.jit(function).lower(*given).compile(compiler_options=hasty)(*given)
    return np.asarray(out.astype(jnp.float32))


def expected(given: Sequence[Any], options: ExpertOptions = PLAIN) -> np.ndarray:
    """Token by token, in float64."""
    bias, (_, scale_input, limit, _) = biases(options, given[3].shape[2]), options
    x, chosen, scores, gate_up, down = (np.asarray(jnp.asarray(a, jnp.float32), np.float64) for a in given)
    out = np.zeros(x.shape)
    for t, of_token in enumerate(chosen.astype(int)):
        for j, expert in enumerate(of_token):
            inputs = x[t] * scores[t, j] if scale_input else x[t]
            gate, up = gate_up[expert] @ inputs + (0 if bias is None else np.asarray(bias[expert]))
            if limit is not None:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
            expert_out = down[expert] @ (gate / (1 + np.exp(-gate)) * up)
            out[t] += expert_out if scale_input else expert_out * scores[t, j]
    return out


def in_panels(x: Any, chosen: Any, scores: Any, gate_up: Any, down: Any, options: ExpertOptions) -> jax.Array:
    """The CPU's form, which wants other weights."""
    width = cpu.panel_width()
    assert width is not None
    ups = tuple(cpu.to_panels(weight.swapaxes(0, 1), 2, width, turned=True) for weight in gate_up)
    downs = tuple(cpu.to_panels(weight, 1, width) for weight in down)
    return cpu_experts.fused_moe(x, chosen, scores, ups, downs, options)


@pytest.fixture(autouse=True)
def interpreted_on_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The TPU's kernel."""
    monkeypatch.setattr(tpu_experts, "FEW_TOKENS", 0)
    monkeypatch.setattr(tpu_experts, "gmm", partial(tpu_experts.gmm, interpret=True))


FORMS: dict[str, Any] = {
    "dense": experts.dense,
    "cpu": in_panels,
    "gpu": gpu_experts.fused_moe,
    "gpu, small tiles": partial(gpu_experts.fused_moe, tilings=SMALL),
    "tpu": tpu_experts.fused_moe,
}


@pytest.mark.parametrize(
    ("spread", "options"),
    [
        *(
            pytest.param(
                spread,
                SCALED,
                id=f"{spread}, scaled inputs",
                marks=[pytest.mark.slow] * spread.startswith("all to"),
            )
            for spread in SPREADS
        ),
        *(
            pytest.param(
                spread,
                LIMITED,
                id=f"{spread}, with biases and a limit",
                marks=[pytest.mark.slow] * (spread != "ragged, two experts empty"),
            )
            for spread in SPREADS
        ),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_tokens_visit_the_experts_that_they_chose(form: str, spread: str, options: ExpertOptions) -> None:
    if form == "cpu" and jax.default_backend() != "cpu":
        pytest.skip("a kernel for CPUs")
    given = arguments(SPREADS[spread], jnp.float32)
    out = run(FORMS[form], given, options)
    np.testing.assert_allclose(out, expected(given, options), atol=3e-6)


@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    [
        (1, jnp.bfloat16),
        (40, jnp.float16),
        (300, jnp.bfloat16),
        pytest.param(300, jnp.float16, marks=pytest.mark.slow),
    ],
)
def test_16_bits_on_gpus(num_tokens: int, dtype: Any) -> None:
    """As many tokens as lead to each kind of tiling."""
    rng = np.random.default_rng(1)
    spread = [tuple(rng.permutation(5)[:2]) for _ in range(num_tokens)]
    given = arguments(spread, dtype, width=136, inputs=152)
    exact = expected(given)
    error = np.linalg.norm(run(gpu_experts.fused_moe, given) - exact) / np.linalg.norm(exact)
    assert error < 4e-3  # what goes on and what comes out are rounded once each


ROUNDINGS = {
    "int4": Rounding(4, 32),
    "int8": Rounding(8, 64),
    "e2m1": Rounding(4, 32, to_float=True),
    "fp8 by groups": Rounding(8, 32, to_float=True),
    "fp8": Rounding(8, 0, to_float=True),
}


def quantized(array: jax.Array, num_outputs: int, to: Rounding) -> tuple[QuantizedWords, jax.Array]:
    """As GPUs hold it, and what it then is."""

    def both(array: jax.Array) -> tuple[QuantizedWords, jax.Array]:
        words = in_words(quantize(Dense(array.astype(jnp.float32), num_outputs), to))
        return words, words.expanded(jnp.float32).reshape(array.shape)

    return jax.jit(both)(array)


@pytest.mark.parametrize(
    ("num_tokens", "options"), [(1, PLAIN), (40, LIMITED), pytest.param(300, PLAIN, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ROUNDINGS)
def test_quantized_experts_on_gpus(name: str, num_tokens: int, options: ExpertOptions) -> None:
    """Widths and inputs that do not fill blocks of words."""
    rng = np.random.default_rng(1)
    spread = [tuple(rng.permutation(5)[:2]) for _ in range(num_tokens)]
    *given, gate_up, down = arguments(spread, jnp.bfloat16, width=64, inputs=192)
    both = [quantized(one, axes, ROUNDINGS[name]) for one, axes in ((gate_up, 3), (down, 2))]
    exact = expected([*given, *(expanded for _, expanded in both)], options)
    got = run(gpu_experts.fused_moe, [*given, *(words for words, _ in both)], options)
    assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 8e-3  # weights are rounded too


@pytest.mark.parametrize("form", ["cpu", "gpu"])
def test_a_row_does_not_depend_on_its_neighbours(form: str) -> None:
    rng = np.random.default_rng(2)
    spread = [tuple(rng.permutation(5)[:2]) for _ in range(90)]
    x, chosen, scores, *weights = arguments(spread, jnp.float32)
    together = run(FORMS[form], [x, chosen, scores, *weights])
    for part in (slice(0, 1), slice(17, 24)):
        alone = run(FORMS[form], [x[part], chosen[part], scores[part], *weights])
        np.testing.assert_array_equal(together[part], alone)


@pytest.mark.parametrize("form", ["cpu", "gpu", "gpu, small tiles", "tpu"])
def test_experts_that_nobody_chose_are_not_read(form: str) -> None:
    """They are not numbers, which even a weight of 0 would spread."""
    x, chosen, scores, gate_up, down = arguments(SPREADS["ragged, two experts empty"], jnp.float32)
    unread = jnp.array([1, 3])
    given = [x, chosen, scores, gate_up.at[unread].set(jnp.nan), down.at[unread].set(jnp.nan)]
    assert np.isfinite(run(FORMS[form], given)).all()


def test_what_the_kernel_is_for() -> None:
    assert gpu_experts.can_fuse("silu", jnp.bfloat16)
    assert gpu_experts.can_fuse("gelu_tanh", jnp.float32)
    assert not gpu_experts.can_fuse("gelu", jnp.bfloat16)
    assert not gpu_experts.can_fuse("silu", jnp.float64)


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "options"),
    [
        (1, jnp.bfloat16, PLAIN),
        (40, jnp.float32, ExpertOptions(partial(jax.nn.gelu, approximate=True), scale_input=False)),
        (300, jnp.bfloat16, ExpertOptions(ACTIVATIONS["quick_gelu"], scale_input=False, limit=7.0)),
    ],
)
def test_lowers_for_gpus(num_tokens: int, dtype: Any, options: ExpertOptions) -> None:
    """As far as that goes without a GPU: to Triton's own language."""
    if jax.default_backend() != "cpu":
        pytest.skip("it runs here")
    *given, gate_up, down = arguments([(i % 5, (i + 1) % 5) for i in range(num_tokens)], dtype, 64, 96)
    function = partial(gpu_experts.fused_moe, options=options._replace(bias=biases(options, 64)))
    assert lowered_for_gpus(function, *given, gate_up, down).count("triton") >= 2
    if dtype == jnp.bfloat16:
        words = [quantized(one, axes, ROUNDINGS["e2m1"])[0] for one, axes in ((gate_up, 3), (down, 2))]
        assert lowered_for_gpus(function, *given, *words).count("fma.rn.bf16x2 $0, f, $2, w") >= 2
