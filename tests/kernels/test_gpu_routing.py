"""The GPU's routing, interpreted where there is none, beside what sorts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import experts, gpu_launch, gpu_routing
from hex_llm.kernels.experts import Choice
from tests.kernels.lowering import lowered_for_gpus

CHOICES = {
    "qwen3": Choice(jax.nn.softmax, 8, normalized=True, scale=1.0),
    "gpt-oss": Choice(jax.nn.softmax, 4, normalized=True, scale=1.0),
    "llama4": Choice(jax.nn.sigmoid, 1, normalized=False, scale=1.0),
    "glm": Choice(jax.nn.sigmoid, 3, normalized=True, scale=2.5),
}
NUM_EXPERTS = {"qwen3": 128, "gpt-oss": 32, "llama4": 16, "glm": 20}


def logits_of(num_tokens: int, num_experts: int) -> jax.Array:
    """Some are equal."""
    found = np.random.default_rng(num_tokens).standard_normal((num_tokens, num_experts)) * 3
    return jnp.array(np.where(np.abs(found) < 2, found, found.round()), jnp.float32)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_experts_are_chosen(name: str, corrected: bool) -> None:
    logits = logits_of(37, NUM_EXPERTS[name])
    correction = jnp.linspace(0.2, -0.2, logits.shape[1]) if corrected else None
    chosen, scores = gpu_routing.choose(logits, correction, CHOICES[name])
    expected, exact = experts.choose(logits, correction, CHOICES[name])
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_allclose(scores, exact, rtol=2e-6)


def test_logits_that_are_no_numbers_choose_what_is_there() -> None:
    """Who reads the weights of the chosen must not leave them."""
    logits = logits_of(2, 20).at[0].set(jnp.nan).at[1, 3].set(jnp.nan)
    chosen, scores = gpu_routing.choose(logits, None, CHOICES["glm"])
    assert set(chosen.ravel().tolist()) <= set(range(20))
    assert bool(jnp.isnan(scores[0]).all())


@pytest.mark.parametrize("shape", [(1, 8), (1, 1), (16, 4), (128, 8), (200, 3)])
@pytest.mark.parametrize("num_experts", [8, 128])
def test_pairs_are_in_the_order_of_experts(shape: tuple[int, int], num_experts: int) -> None:
    chosen = np.random.default_rng(0).integers(0, num_experts, shape).astype(np.int32)
    for one in (chosen, np.full_like(chosen, num_experts - 1), np.zeros_like(chosen)):
        for got, expected in zip(
            gpu_routing.by_expert(jnp.array(one), num_experts),
            experts.by_expert(jnp.array(one), num_experts),
            strict=True,
        ):
            np.testing.assert_array_equal(got, expected)


def test_lowers_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_launch, "interpreted", lambda: False)
    for name, choice in CHOICES.items():
        logits = logits_of(5, NUM_EXPERTS[name])
        text = lowered_for_gpus(partial(gpu_routing.choose, choice=choice), logits, logits[0])
        assert "triton" in text
    text = lowered_for_gpus(partial(gpu_routing.by_expert, num_experts=128), jnp.zeros((128, 8), jnp.int32))
    assert "triton" in text
    assert "sort" not in text
