"""The TPU's attention through pages of 8 bits: the kernel itself, interpreted, against the reference with
the same numbers and scales; and as far as it can be lowered without a TPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from hex_llm.execution.batch import StepShape, batch_of, parts_of
from hex_llm.kernels import reference, tpu, tpu_pages
from hex_llm.kernels.attention import Batch, Mask, Options, QuantizedPages, quantized
from hex_llm.kernels.tpu_pages import PairedPages
from tests.kernels.test_tpu import CHIP, hasty, ragged

INT8, FLOAT8 = np.dtype(np.int8), np.dtype(jnp.float8_e4m3fn)
DECODES = [0, 31, 32, 290]  # positions; everything before is cached
CHUNKS = [(0, 45), (240, 37), (95, 1)]  # (cached, new tokens)


@dataclass(frozen=True)
class Case:
    dtype: np.dtype[Any] = INT8
    decodes: list[int] = field(default_factory=lambda: DECODES)
    chunks: list[tuple[int, int]] = field(default_factory=lambda: CHUNKS)
    mask: Mask = field(default_factory=Mask)
    softcap: float | None = None
    sinks: bool = False
    heads: dict[str, int] = field(default_factory=dict)
    padding: tuple[int, int] = (9, 2)


FAST = {
    "a mixed step": Case(
        decodes=[0, 290], chunks=[(0, 45), (240, 21)], softcap=1.5, heads={"group": 3, "block_size": 32}
    ),
    "fp8, one head, a window, sinks": Case(
        FLOAT8,
        [7, 290],
        [],
        Mask(window=150),
        sinks=True,
        heads={"kv_heads": 1, "group": 5, "block_size": 16},
    ),
}
SLOW = {
    "small blocks": Case(heads={"kv_heads": 2, "group": 3, "block_size": 8}),
    "fp8": Case(
        FLOAT8, mask=Mask(window=150), sinks=True, heads={"kv_heads": 1, "group": 4, "block_size": 16}
    ),
    "only decodes, of more than a block": Case(
        decodes=[5, 17, 300, 2, 44, 61, 8, 12, 13, 200],
        chunks=[],
        heads={"kv_heads": 8, "group": 1, "block_size": 16},
    ),
    "only chunks": Case(FLOAT8, [], heads={"kv_heads": 3, "group": 2, "block_size": 32}, padding=(0, 0)),
    "attention chunks": Case(mask=Mask(window=20, attention_chunk=32), heads={"group": 2, "block_size": 32}),
    "wide heads, softcap, a window": Case(
        mask=Mask(window=130), softcap=5.0, heads={"head_dim": 200, "group": 2, "block_size": 32}
    ),
    "large blocks": Case(
        FLOAT8, [2050], [(2000, 60)], Mask(window=140), heads={"block_size": 2048, "kv_heads": 1, "group": 8}
    ),
    "one token": Case(decodes=[40], chunks=[], heads={"block_size": 32}, padding=(0, 0)),
    "a step for chunks that has none": Case(chunks=[], heads={"block_size": 32}, padding=(70, 3)),
}


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_attention(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """By several stretches of keys, and tiles of 16 tokens. What nobody may see is no number."""
    monkeypatch.setattr(tpu_pages, "KEYS", 128)
    monkeypatch.setattr(tpu_pages, "MOST_QUERIES", 16)
    one = (FAST | SLOW)[case]
    q, k, v, pages, batch = ragged(one.decodes, one.chunks, padding=one.padding, **one.heads)
    if case == "a step for chunks that has none":
        batch = replace(batch, max_chunks=2)
    q = np.asarray(q, jnp.bfloat16)
    sinks = np.linspace(-3, 4, q[0, ..., 0].size).reshape(q.shape[1:3]) if one.sinks else None
    options = Options(one.mask, 1.0, one.softcap, sinks)

    def expect(q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array) -> tuple[jax.Array, PairedPages]:
        held = quantized_pages(pages, one.dtype)
        out, stored = reference.paged_attention(q.astype(jnp.float32), k, v, held, batch, options)
        return out, paired(stored)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array) -> tuple[jax.Array, PairedPages]:
        return tpu.paged_attention(q, k, v, paired(quantized_pages(pages, one.dtype)), batch, options)

    real = np.asarray(batch.kv_slots) > 0
    cached = one.decodes + [cached for cached, _ in one.chunks]
    pages = np.where(known_slots(batch, cached, pages), pages, np.nan)
    expected, stored = hasty(expect, q, k, v, pages)
    q, k, v = (np.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, np.nan) for x in (q, k, v))
    with pltpu.force_tpu_interpret_mode():
        out, written = hasty(attend, q.astype(jnp.bfloat16), k, v, pages)
    np.testing.assert_array_equal(*(np.asarray(x.words)[1:] for x in (written, stored)))
    np.testing.assert_array_equal(*(np.asarray(x.scales)[1 : len(pages)] for x in (written, stored)))
    out, expected = (np.asarray(x)[real].astype(np.float32) for x in (out, expected))
    # Weights have 16 bits in the kernel, and so has what comes of them.
    np.testing.assert_allclose(out, expected, atol=0.03)
    assert np.linalg.norm(out - expected) < 4e-3 * np.linalg.norm(expected)


def known_slots(batch: Batch, cached: list[int], pages: jax.Array) -> Any:
    """[N, block, 1, 1, 1], of what was written before the step."""
    known = np.zeros(pages.shape[:2], bool)
    for table, length in zip(np.asarray(batch.tables), cached, strict=False):
        for position in range(length):
            known[table[position // pages.shape[1]], position % pages.shape[1]] = True
    return known[..., None, None, None]


def quantized_pages(pages: jax.Array, dtype: np.dtype[Any]) -> QuantizedPages:
    words, scales = quantized(jnp.split(pages, 2, axis=-1), dtype)
    return QuantizedPages(words, scales.transpose(0, 3, 2, 1), dtype)


def paired(pages: QuantizedPages) -> PairedPages:
    """The same numbers and scales as TPUs have them."""
    num, block_size, heads, _, head_dim = pages.shape
    wide = tpu.padded_head_dim(head_dim)
    empty = tpu_pages.empty_pages((num, block_size, heads, 2, wide), pages.dtype)
    assert empty.shape == (num, block_size, heads, 2, wide)
    per_block, page_size = empty.scales.shape[1], empty.words.shape[3]
    codes = jnp.concatenate([pages.words & 0xFF, pages.words >> 8], axis=-1)
    words = jnp.pad(codes[:, :, :, 0] | codes[:, :, :, 1] << 8, [(0, 0)] * 3 + [(0, wide - head_dim)])
    words = words.reshape(num, per_block, page_size, heads, -1, 128).transpose(0, 1, 4, 3, 2, 5)
    scales = pages.scales.reshape(num, 2, heads, per_block, page_size).transpose(0, 3, 2, 1, 4)
    scales = jnp.pad(scales, [(0, 0)] * 4 + [(0, 64 - page_size)]).reshape(num, *empty.scales.shape[1:])
    return replace(empty, words=words.reshape(empty.words.shape), scales=empty.scales.at[:num].set(scales))


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size", "mask", "softcap", "dtype"),
    [
        (1, 8, 128, 32, Mask(), None, INT8),  # Llama-3.1-70B over 8 chips
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, 8, 64, 32, Mask(window=128), None, FLOAT8),  # gpt-oss-20b over 4 chips
                (2, 2, 256, 8, Mask(window=4096), 50.0, INT8),  # Gemma-2-9B over 4 chips
                (3, 3, 64, 16, Mask(), None, FLOAT8),  # SmolLM2-135M
                (8, 4, 128, 2048, Mask(), None, INT8),
            )
        ),
    ],
)
def test_the_kernel_lowers_for_tpus(
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    mask: Mask,
    softcap: float | None,
    dtype: np.dtype[Any],
) -> None:
    assert tpu.can_attend(kv_heads, head_dim, block_size, [mask], True, jnp.bfloat16, dtype)
    shape = StepShape(80, 18, 2)

    def step(q: Any, k: Any, v: Any, pages: Any, tables: Any, packed: Any) -> tuple[jax.Array, Any]:
        batch = batch_of(parts_of(packed, shape), tables, shape)
        return tpu.paged_attention(q, k, v, pages, batch, Options(mask, 0.1, softcap))

    described = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    kv = described((shape.num_tokens, kv_heads, head_dim))
    wide = (64, block_size, kv_heads, 2, tpu.padded_head_dim(head_dim))
    pages = jax.eval_shape(partial(tpu_pages.empty_pages, wide, dtype))
    q = described((shape.num_tokens, kv_heads, group, head_dim))
    sizes = (shape.num_rows, max(16384 // block_size, 1)), (shape.packed_size,)
    tables, packed = (jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes)
    with jax.sharding.use_abstract_mesh(CHIP):
        traced = jax.jit(step, donate_argnums=3).trace(q, kv, kv, pages, tables, packed)
        lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert lowered.count("@tpu_custom_call") == 2, "one kernel for decodes, one for prefills"


def test_what_the_kernel_is_for() -> None:
    fits = partial(tpu.can_attend, masks=[Mask(attention_chunk=8192)], sinks=True, dtype=jnp.bfloat16)
    assert fits(1, 128, 32, kv_dtype=INT8)
    assert fits(3, 64, 8, kv_dtype=FLOAT8), "no number of heads is apart"
    assert fits(2, 256, 8192, kv_dtype=INT8)
    assert not fits(1, 128, 24, kv_dtype=INT8)
    assert not fits(1, 128, 48, masks=[Mask(attention_chunk=8200)], kv_dtype=INT8)
    assert not fits(1, 128, 32, dtype=jnp.float32, kv_dtype=INT8)
    assert not fits(128, 256, 32, kv_dtype=INT8)
