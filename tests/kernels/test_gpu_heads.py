"""The GPU's heads, interpreted where there is none, beside what XLA makes of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import gpu_heads, reference
from hex_llm.kernels.adapters import Fused, Owners
from hex_llm.kernels.attention import KVPages, Projected
from hex_llm.kernels.gpu_adapters import begin_adapters
from hex_llm.kernels.gpu_heads import place_heads
from hex_llm.models import decoder
from hex_llm.models.adapters import add_by_all
from hex_llm.models.rope import rotate
from tests.kernels.lowering import lowered_for_gpus
from tests.kernels.test_gpu import as_pages

NUM_TOKENS, KV_HEADS, BLOCK = 5, 3, 4
SLOTS = jnp.array([9, 4, 17, 0, 23], jnp.int32)
FORMS = [
    "normed and turned",
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("normed", "turned", "plain")),
]


@pytest.fixture(params=["token by token", "in tiles"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in tiles":  # the last of which is not full
        monkeypatch.setattr(gpu_heads, "FEW_ROWS", NUM_TOKENS - 1)
        monkeypatch.setattr(gpu_heads, "TILE_ROWS", 4)


def heads_of(form: str, group: int, head_dim: int, dtype: Any) -> Projected:
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = dtype) -> jax.Array:
        return jnp.array(rng.standard_normal(shape), dtype)

    angles = normal(NUM_TOKENS, head_dim // 2, dtype=jnp.float32)
    norms = (normal(head_dim), normal(head_dim)) if "normed" in form else None
    table = (jnp.cos(angles), jnp.sin(angles)) if "turned" in form else None
    return Projected(normal(NUM_TOKENS, KV_HEADS, group + 2, head_dim), norms, table, eps=1e-5, offset=1.0)


def expected(heads: Projected, pages: KVPages) -> tuple[jax.Array, list[jax.Array], KVPages]:
    qk, v = heads.qkv[:, :, :-1], heads.qkv[:, :, -1]
    if heads.norms is not None:
        weights = jnp.stack([heads.norms[0]] * (qk.shape[2] - 1) + [heads.norms[1]]).astype(jnp.float32)
        normed = decoder.normalize(qk.astype(jnp.float32), heads.eps) * (weights + heads.offset)
        qk = normed.astype(qk.dtype)
    if heads.table is not None:
        qk = rotate(qk, *heads.table, interleaved=False)
    k, v = decoder.contained(qk[:, :, -1], v)
    return qk[:, :, :-1], [k, v], reference.write_kv(k, v, pages, SLOTS)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("group", "head_dim", "dtype", "kv_dtype"),
    [
        (1, 16, jnp.float32, jnp.float32),
        (3, 80, jnp.bfloat16, jnp.bfloat16),
        (8, 128, jnp.bfloat16, jnp.int8),
        (4, 64, jnp.float32, jnp.float8_e4m3fn),
    ],
)
def test_heads_are_made_and_written(form: str, group: int, head_dim: int, dtype: Any, kv_dtype: Any) -> None:
    heads = heads_of(form, group, head_dim, dtype)
    heads = heads._replace(qkv=heads.qkv.at[1, 2, -1, 3].set(jnp.inf).at[2, 0, -1, 5].set(jnp.nan))
    pages = as_pages(jnp.ones((7, BLOCK, KV_HEADS, 2, head_dim)), np.dtype(kv_dtype))
    settings = {"eps": heads.eps, "offset": heads.offset}

    def both(pages: KVPages, *arrays: Any) -> Any:
        heads = Projected(*arrays, **settings)
        return place_heads(heads, pages, SLOTS, keep=True), expected(heads, pages)

    (*got, semaphores), wanted = jax.jit(both)(pages, *heads[:3])
    exact = dtype == jnp.float32 or form == "plain"
    for mine, theirs in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert mine.dtype == theirs.dtype
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
        if mine.dtype == jnp.uint16:  # two codes, of which one may be rounded the other way
            assert np.mean(mine != theirs) < 0.02
        else:
            tolerance = 1e-5 if exact else 1e-2
            mine, theirs = mine.astype(np.float32), theirs.astype(np.float32)
            np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)
    assert not np.asarray(semaphores).any()


def test_heads_of_a_product_in_parts() -> None:
    """They are summed, and rounded as the product would have been."""
    heads = heads_of("normed and turned", 4, 64, jnp.bfloat16)
    parts = jnp.asarray(np.random.default_rng(1).standard_normal((3, *heads.qkv.shape)), jnp.float32)
    whole = heads._replace(qkv=parts.sum(axis=0).astype(jnp.bfloat16))
    in_parts = heads._replace(qkv=parts, dtype=jnp.bfloat16)
    pages = jnp.zeros((7, BLOCK, KV_HEADS, 2, 64), jnp.bfloat16)
    got, wanted = (place_heads(one, pages, SLOTS, keep=True) for one in (in_parts, whole))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine.astype(jnp.float32), theirs.astype(jnp.float32), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("few", [256, NUM_TOKENS - 1])
def test_lowers_for_gpus(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_heads, "FEW_ROWS", few)
    for kv_dtype in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
        pages = as_pages(jnp.ones((7, BLOCK, KV_HEADS, 2, 96), jnp.bfloat16), np.dtype(kv_dtype))
        heads = heads_of("normed and turned", 5, 96, jnp.bfloat16)
        text = lowered_for_gpus(
            lambda arrays, *others: place_heads(Projected(*arrays, eps=1e-6), *others),
            heads[:3],
            pages,
            SLOTS,
        )
        assert "triton" in text


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("fused", [Fused(), Fused(1, (3, 4))])
def test_adapters_add_to_heads(fused: Fused) -> None:
    heads = heads_of("normed and turned", 3, 80, jnp.float32)
    pages = jnp.ones((7, BLOCK, KV_HEADS, 2, 80))
    rng = np.random.default_rng(1)
    x, down, up = (
        jnp.asarray(rng.standard_normal(shape, np.float32) / 4)
        for shape in (
            (NUM_TOKENS, 64),
            (3, 6 * fused.num_modules, 64),
            (KV_HEADS, 5, 80, 3, 6),
        )
    )
    which = Owners(jnp.array([2, 0, 1, 3, 2], jnp.int32))

    def both(pages: KVPages, qkv: jax.Array, *given: jax.Array) -> Any:
        x, down, up = given
        pending = begin_adapters(x, down, jnp.moveaxis(up, -2, 0), fused, which)
        added = add_by_all(qkv, *given, fused, which)
        mine = place_heads(heads._replace(qkv=qkv, pending=pending), pages, SLOTS, keep=True)
        return mine[:-1], expected(heads._replace(qkv=added), pages)

    got, wanted = jax.jit(both)(pages, heads.qkv, x, down, up)
    for mine, theirs in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_adapters_of_prompts_lower_for_gpus() -> None:
    rows, fused = 300, Fused(1, (4, 5))

    def half(*shape: int) -> jax.Array:
        return jnp.ones(shape, jnp.bfloat16)

    def run(qkv: jax.Array, x: jax.Array, down: jax.Array, up: jax.Array, which: jax.Array) -> Any:
        heads = Projected(qkv, pending=begin_adapters(x, down, up, fused, Owners(which)))
        return place_heads(heads, half(7, BLOCK, KV_HEADS, 2, 64), which)

    given = half(rows, KV_HEADS, 6, 64), half(rows, 512), half(3, 48, 512), half(3, KV_HEADS, 6, 64, 16)
    text = lowered_for_gpus(run, *given, jnp.ones(rows, jnp.int32))
    assert text.count("triton") >= 2
