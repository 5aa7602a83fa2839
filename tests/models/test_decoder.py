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
from hex_llm.parallel.shardings import make_mesh
from tests.tiny import FAMILIES

BLOCK, NUM_TOKENS = 8, 6
# Whose heads a kernel can make, in all layers.
PLAIN = {
    "llama3.1": True,
    "qwen3": True,
    "gemma3-27b-vision": True,
    "gpt-oss-20b": True,
    "smollm3": True,  # some layers have no positions
    "phi3-partial-rotary": False,
    "olmo2-gqa-biases": False,
    "llama4-scout": False,
    "glm4.5": False,
}


@pytest.mark.parametrize("name", PLAIN)
def test_heads_of_a_kernel(name: str) -> None:
    tiny, mesh = next(one for one in FAMILIES if one.name == name), make_mesh(1)
    spec = model_spec({**tiny.config().to_dict(), "architectures": [tiny.architecture]})
    weights = init_weights(plan_weights(spec), spec, mesh, np.dtype(np.float32), seed=0)
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
    assert bool(num_made) == PLAIN[name]
    for mine, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)
