"""A block's heads, and what adapters add to it, made by the decoder or by kernels: the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.execution.adapters import AdapterLayout, HostAdapter
from hex_llm.execution.kernel_choice import Devices, choose_kernels
from hex_llm.execution.load import init_weights
from hex_llm.execution.programs import write_adapter
from hex_llm.execution.weight_plan import FORMS, plan_weights
from hex_llm.kernels import (
    experts,
    gpu,
    gpu_adapter_tiles,
    gpu_adapters,
    gpu_heads,
    reference,
    tpu_experts,
)
from hex_llm.kernels.adapters import AdapterKernels
from hex_llm.kernels.attention import AttentionKernels, Batch, KVPages, Options, Projected
from hex_llm.kernels.experts import ExpertKernels
from hex_llm.models import decoder
from hex_llm.models.adapters import Slots, adapt, add_by_all
from hex_llm.models.families import model_spec
from hex_llm.models.params import Param, Weights, abstract_weights
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
        run_whole(spec, weights, x, positions + 1, pages, batch, kernels, routed)
        for kernels in (
            AttentionKernels(reference.paged_attention),
            AttentionKernels(reference.paged_attention, attend_projected),
        )
    ]
    assert num_made
    for mine, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)


def run_whole(spec: ModelSpec, weights: Weights, *given: Any) -> tuple[jax.Array, list[KVPages]]:
    """Hidden states of all tokens, and the pages."""
    *states, pages = decoder.forward(spec, weights, *given)
    return decoder.finished(spec, weights, *states, given[-1]), pages


@pytest.mark.parametrize("name", ["mixtral-8x7b", pytest.param("gemma2-2b", marks=pytest.mark.slow)])
def test_padding_that_is_no_number_reaches_nobody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the TPU's attention may leave it, step after step."""
    monkeypatch.setattr(tpu_experts, "FEW_TOKENS", 0)
    monkeypatch.setattr(tpu_experts, "gmm", partial(tpu_experts.gmm, interpret=True))
    spec = spec_of(name)
    spec = replace(spec, layers=spec.layers[:2])
    weights = init_weights(plan_weights(spec), spec, make_mesh(1), np.dtype(np.float32), seed=0)
    padded = NUM_TOKENS + 3
    heads = map(spec.heads_of, spec.layers)
    empty: list[KVPages] = [jnp.zeros((4, BLOCK, one.num_kv, 2, one.dim)) for one in heads]
    inputs = np.random.default_rng(0).standard_normal((2, padded, spec.hidden_size), np.float32)

    @jax.jit
    def step(x: jax.Array, start: int, pages: list[KVPages], left: float) -> tuple[jax.Array, list[KVPages]]:
        is_real = jnp.arange(padded) < NUM_TOKENS

        def attend(*arguments: Any) -> tuple[jax.Array, KVPages]:
            out, pages = reference.paged_attention(*arguments)
            return jnp.where(is_real[:, None, None, None], out, left), pages

        positions = jnp.where(is_real, start + jnp.arange(padded), 0).astype(jnp.int32)
        slots, rows = jnp.where(is_real, positions + BLOCK, 0), jnp.zeros(padded, jnp.int32)
        batch = Batch(positions, rows, slots, jnp.array([[1, 2, 0]], jnp.int32), jnp.int32(0), max_chunks=1)
        kernels = AttentionKernels(attend), ExpertKernels(experts.choose, tpu_experts.fused_moe)
        return run_whole(spec, weights, x, positions + 1, pages, batch, *kernels)

    def run(left: float) -> list[jax.Array]:
        pages, found = empty, []
        for i, x in enumerate(inputs):
            hidden, pages = step(x, i * NUM_TOKENS, pages, left)
            assert bool(jnp.isfinite(hidden).all()) == np.isfinite(left)
            found.append(hidden[:NUM_TOKENS])
        return found

    for mine, theirs in zip(run(jnp.nan), run(0.0), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("num_tokens", "few"), [(NUM_TOKENS, 256), (20, 256), (20, 19)])
@pytest.mark.parametrize("name", ["llama3.1", pytest.param("gemma2-2b", marks=pytest.mark.slow)])
def test_adapters_by_kernels(name: str, num_tokens: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu_adapter_tiles, gpu_adapters, gpu_heads):
        monkeypatch.setattr(module, "FEW_ROWS", few)
    spec, mesh = spec_of(name), make_mesh(1)
    weights = init_weights(plan_weights(spec), spec, mesh, np.dtype(np.float32), seed=0)
    rng = np.random.default_rng(0)

    def normal(param: Param) -> jax.Array:
        return jnp.array(rng.standard_normal(param.shape, np.float32) / 4)

    params = AdapterLayout(spec, mesh, np.dtype(np.float32), 3, 4).params(3)
    slots: Slots = jax.tree.map(normal, params, is_leaf=lambda node: isinstance(node, Param))
    firsts = {path: replace(one, up=jnp.moveaxis(one.up, -2, 0)) for path, one in slots.items()}
    which = jnp.array(rng.integers(0, 4, num_tokens), jnp.int32)
    positions, rows = jnp.arange(num_tokens, dtype=jnp.int32), jnp.zeros(num_tokens, jnp.int32)
    table = jnp.array([[1, 2, 3]], jnp.int32)
    batch = Batch(positions, rows, positions + BLOCK, table, jnp.int32(0), max_chunks=0)
    token_ids = jnp.array(rng.integers(0, spec.vocab_size, num_tokens), jnp.int32)
    pages: list[KVPages] = [
        jnp.zeros((4, BLOCK, one.num_kv, 2, one.dim)) for one in map(spec.heads_of, spec.layers)
    ]
    routed = ExpertKernels(experts.choose, experts.dense)

    def run(slots: Slots, kernels: AdapterKernels, attention: AttentionKernels) -> Any:
        own = adapt(weights, slots, which, kernels)
        x = decoder.embed(spec, own, token_ids)
        return run_whole(spec, own, x, positions + 1, pages, batch, attention, routed)

    by_all = run(slots, AdapterKernels(add_by_all), AttentionKernels(reference.paged_attention))
    attention = AttentionKernels(reference.paged_attention, gpu.projected_attention)
    by_kernels = run(firsts, gpu_adapters.KERNELS, attention)
    for mine, theirs in zip(*map(jax.tree.leaves, (by_kernels, by_all)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", pytest.param("glm4.5", marks=pytest.mark.slow)])
def test_rows_rounded_by_kernels(name: str) -> None:
    """Floats of 8 bits, as one GPU rounds them and as several do; and with adapters, none of which adds."""
    spec, mesh, dtype = spec_of(name), make_mesh(1), np.dtype(jnp.bfloat16)
    spec = replace(spec, layers=spec.layers[:2])
    rng = np.random.default_rng(0)
    x = jnp.array(rng.standard_normal((NUM_TOKENS, spec.hidden_size)), dtype)
    slots = AdapterLayout(spec, mesh, dtype, 1, 4, slots_first=True).allocate()
    positions, rows = jnp.arange(NUM_TOKENS, dtype=jnp.int32), jnp.zeros(NUM_TOKENS, jnp.int32)
    batch = Batch(positions, rows, positions + BLOCK, jnp.array([[1, 2, 3]], jnp.int32), jnp.int32(0), 0)
    heads = map(spec.heads_of, spec.layers)
    pages: list[KVPages] = [jnp.zeros((4, BLOCK, one.num_kv, 2, one.dim), dtype) for one in heads]
    kernels = AttentionKernels(reference.paged_attention), ExpertKernels(experts.choose, experts.dense)

    def run(num_gpus: int, is_adapted: bool = False) -> tuple[int, Any]:
        plan = plan_weights(spec, keeps=lambda form, routed: not routed, rounded_to=FORMS["fp8"])
        weights = init_weights(plan, spec, mesh, dtype, seed=0)
        weights = choose_kernels(spec, Devices("gpu", num_gpus, BLOCK, dtype, dtype)).lay_out(weights)
        if is_adapted:
            weights = adapt(weights, slots, rows, gpu_adapters.KERNELS)

        def forward(weights: Weights) -> Any:
            return run_whole(spec, weights, x, positions + 1, pages, batch, *kernels)[0]

        num_kernels = str(jax.make_jaxpr(forward)(weights)).count("pallas_call")
        return num_kernels, np.asarray(jax.jit(forward)(weights), np.float32)

    (one, by_kernel), (several, by_xla) = run(1), run(2)
    assert several == 0 < one
    np.testing.assert_allclose(by_kernel, by_xla, atol=0.05)
    np.testing.assert_allclose(run(1, is_adapted=True)[1], by_xla, atol=0.05)


def test_a_slot_is_written_where_kernels_look_for_it() -> None:
    spec, mesh, dtype = spec_of("llama3.1"), make_mesh(1), np.dtype(np.float32)
    rng = np.random.default_rng(0)

    def normal(param: Param) -> np.ndarray[Any, Any]:
        return rng.standard_normal(param.shape, np.float32)

    last, first = (AdapterLayout(spec, mesh, dtype, 3, 4, slots_first) for slots_first in (False, True))
    matrices = jax.tree.map(normal, last.params(1), is_leaf=lambda node: isinstance(node, Param))
    adapter = HostAdapter("digest", matrices)
    lasts, firsts = (
        write_adapter(layout.allocate(), layout.stage(adapter), jnp.int32(2), axis=axis)
        for layout, axis in ((last, -2), (first, 0))
    )
    for path, one in lasts.items():
        np.testing.assert_array_equal(firsts[path].down, one.down)
        np.testing.assert_array_equal(firsts[path].up, np.moveaxis(one.up, -2, 0))
        np.testing.assert_array_equal(one.up[..., 1, :], matrices[path].up[..., 0, :])
