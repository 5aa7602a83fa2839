"""A block's heads, made by the decoder or by a kernel: the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.execution.load import init_weights
from hex_llm.execution.weight_plan import plan_weights
from hex_llm.kernels import experts, gpu, reference
from hex_llm.kernels.attention import AttentionKernels, Batch, KVPages, Options, Projected
from hex_llm.kernels.experts import ExpertKernels
from hex_llm.models import decoder
from hex_llm.models.families import model_spec
from hex_llm.models.params import abstract_weights
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import make_mesh
from tests.tiny import FAMILIES

BLOCK, NUM_TOKENS = 8, 6
PLAIN = ["qwen3", "smollm3", "gpt-oss-20b", "llama3.1", "gemma3-27b-vision"]
USUAL = PLAIN[:1]


def spec_of(name: str) -> ModelSpec:
    tiny = next(one for one in FAMILIES if one.name == name)
    return model_spec({**tiny.config().to_dict(), "architectures": [tiny.architecture]})


@pytest.mark.parametrize(
    "name", [*PLAIN, "phi3-partial-rotary", "olmo2-gqa-biases", "llama4-scout", "glm4.5"]
)
def test_whose_heads_a_kernel_can_make(name: str) -> None:
    spec = spec_of(name)
    layers = zip(spec.layers, abstract_weights(spec).layers, strict=True)
    assert all(decoder.is_plain(layer, w, spec) for layer, w in layers) == (name in PLAIN)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in USUAL else pytest.mark.slow) for one in PLAIN]
)
def test_heads_of_a_kernel(name: str) -> None:
    spec = spec_of(name)
    weights = init_weights(plan_weights(spec), spec, make_mesh(1), np.dtype(np.float32), seed=0)
    num_made = 0

    def attend_projected(
        heads: Projected, pages: KVPages, batch: Batch, options: Options
    ) -> tuple[jax.Array, KVPages]:
        nonlocal num_made
        num_made += 1
        return gpu.projected_attention(heads, pages, batch, options)

    positions = jnp.arange(NUM_TOKENS, dtype=jnp.int32)
    table = jnp.array([[1, 2, 3]], jnp.int32)
    rows = jnp.zeros(NUM_TOKENS, jnp.int32)
    batch = Batch(positions, rows, positions + BLOCK, table, jnp.int32(0), max_chunks=0)
    x = jnp.array(np.random.default_rng(0).standard_normal((NUM_TOKENS, spec.hidden_size)), jnp.float32)
    heads = map(spec.heads_of, spec.layers)
    pages: list[KVPages] = [jnp.zeros((4, BLOCK, one.num_kv, 2, one.dim)) for one in heads]
    routed = ExpertKernels(experts.choose, experts.dense)
    found = [
        decoder.forward(spec, weights, x, positions + 1, pages, batch, kernels, routed)
        for kernels in (
            AttentionKernels(reference.paged_attention),
            AttentionKernels(reference.paged_attention, attend_projected),
        )
    ]
    assert num_made
    for mine, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)
