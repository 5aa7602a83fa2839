"""The GPU's routing, interpreted where there is none, beside what sorts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import experts, gpu_routing
from hex_llm.kernels.experts import Choice
from hex_llm.kernels.gpu_routing import blocks_of
from tests.kernels.lowering import lowered_for_gpus

CHOICES = {
    "qwen3": Choice(jax.nn.softmax, 8, normalized=True, scale=1.0),
    "gpt-oss": Choice(jax.nn.softmax, 4, normalized=True, scale=1.0),
    "llama4": Choice(jax.nn.sigmoid, 1, normalized=False, scale=1.0, logit_scale=0.5),
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
    found = [
        jax.jit(partial(choose, choice=CHOICES[name]))(logits, correction)
        for choose in (gpu_routing.choose, experts.choose)
    ]
    (chosen, scores), (expected, exact) = found
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_allclose(scores, exact, rtol=2e-6)


def test_logits_that_are_no_numbers_choose_what_is_there() -> None:
    """Who reads the weights of the chosen must not leave them."""
    logits = logits_of(2, 20).at[0].set(jnp.nan).at[1, 3].set(jnp.nan)
    chosen, scores = gpu_routing.choose(logits, None, CHOICES["glm"])
    assert set(chosen.ravel().tolist()) <= set(range(20))
    assert bool(jnp.isnan(scores[0]).all())


@pytest.mark.parametrize("num_tokens", [1, 16, 65, 600])
@pytest.mark.parametrize(("num_experts", "rows"), [(8, 16), (128, 32)])
def test_blocks_are_of_one_expert_each(num_tokens: int, num_experts: int, rows: int) -> None:
    """All pairs are in one, in their order, and only the last of an expert's is not full."""
    rng, find = (
        np.random.default_rng(num_tokens),
        jax.jit(partial(blocks_of, num_experts=num_experts, rows=rows)),
    )
    spread = rng.permuted(np.tile(np.arange(num_experts), (num_tokens, 1)), axis=1)[:, :8]
    for chosen in (spread, np.sort(spread)[:, :1] // 2, np.full((num_tokens, 1), num_experts - 1)):
        owners, order, starts, ends = find(jnp.array(chosen, jnp.int32))
        if order is None or starts is None or ends is None:
            assert num_tokens == 1
            order, starts, ends = np.arange(8), np.arange(8), np.arange(1, 9)
        table = zip(owners.tolist(), np.asarray(starts), np.asarray(ends), strict=False)
        got = [(expert, np.asarray(order)[i:j].tolist()) for expert, i, j in table if i < j]
        pairs = [np.flatnonzero(chosen.ravel() == expert).tolist() for expert in range(num_experts)]
        wanted = [(e, one[i : i + rows]) for e, one in enumerate(pairs) for i in range(0, len(one), rows)]
        assert (got if num_tokens > 1 else sorted(got)) == wanted


def test_lowers_for_gpus() -> None:
    for name, choice in CHOICES.items():
        logits = logits_of(5, NUM_EXPERTS[name])
        text = lowered_for_gpus(partial(gpu_routing.choose, choice=choice), logits, logits[0])
        assert "triton" in text
    text = lowered_for_gpus(partial(blocks_of, num_experts=128, rows=16), jnp.zeros((128, 8), jnp.int32))
    assert "triton" in text
    assert "sort" not in text
