"""Every attention that runs here against a dense one that is written out in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import Array

from hex_llm.kernels import cpu, gpu, reference
from hex_llm.kernels.attention import (
    LARGEST,
    Batch,
    Mask,
    Options,
    PagedAttention,
    QuantizedPages,
    as_held,
    dequantized,
    empty_pages,
    quantized,
)
from hex_llm.models import decoder
from tests.kernels.test_gpu import as_pages

KV_HEADS, HEAD_DIM = 2, 16
INT8, FLOAT8 = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)


def dense(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    position: int,
    mask: Mask,
    softcap: float | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """One query [K, G, H] at `position` over its sequence's keys and values [L, K, H]."""
    places = np.arange(len(k))
    seen = places <= position
    if mask.window is not None:
        seen &= places > position - mask.window
    if mask.attention_chunk is not None:
        seen &= places // mask.attention_chunk == position // mask.attention_chunk
    scores = np.einsum("kgh,ckh->kgc", q, k) * HEAD_DIM**-0.5
    if softcap is not None:
        scores = np.tanh(scores / softcap) * softcap
    peak = scores.max(-1, keepdims=True)
    weights = np.where(seen, np.exp(scores - peak), 0)
    sunk = 0 if sinks is None else np.exp(sinks[..., None] - peak)
    return np.einsum("kgc,ckh->kgh", weights / (weights.sum(-1, keepdims=True) + sunk), v)


needs_compiler = pytest.mark.skipif(cpu.panel_width() is None, reason="there is no C++ compiler")
every_one = pytest.mark.parametrize(
    "paged_attention",
    [reference.paged_attention, pytest.param(cpu.paged_attention, marks=needs_compiler)],
    ids=["reference", "cpu"],
)


def forms_and_blocks() -> Iterator[Any]:
    """Of the reference's forms each is usually tried with blocks of one size."""
    forms = {
        "reference one by one": (reference.paged_attention, 0),
        "reference": (reference.paged_attention, 4),
        "cpu": (cpu.paged_attention, 0),  # it does not look at chunks
    }
    usual = {("reference one by one", 8), ("reference", 512), ("cpu", 8), ("cpu", 512)}
    for (name, form), size in product(forms.items(), (8, 32, 512)):
        marks = [needs_compiler] * (name == "cpu") + [pytest.mark.slow] * ((name, size) not in usual)
        yield pytest.param(*form, size, marks=marks, id=f"{name}-{size}")


@pytest.mark.parametrize(("paged_attention", "max_chunks", "block_size"), list(forms_and_blocks()))
@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    ("mask", "softcap", "has_sinks"),
    [
        (Mask(), None, False),
        (Mask(window=5), None, True),
        (Mask(window=300), 2.0, False),
        (Mask(attention_chunk=7), None, False),
        (Mask(), 1.5, True),
    ],
)
def test_ragged_batch(
    paged_attention: PagedAttention,
    max_chunks: int,
    block_size: int,
    group: int,
    mask: Mask,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    """Decodes and prefill chunks of very different lengths, some after a cached prefix, with padding; chunks
    told apart, or every token by itself."""
    rng = np.random.default_rng(0)
    decodes = [0, 5, 255, 256, 700]  # positions; everything before is cached
    chunks = [(0, 130), (300, 40), (0, 1)]  # (cached, new tokens)
    lengths = [p + 1 for p in decodes] + [cached + new for cached, new in chunks]
    width = -(-max(lengths) // block_size)
    keys = [rng.standard_normal((n, KV_HEADS, HEAD_DIM), dtype=np.float32) for n in lengths]
    values = [rng.standard_normal((n, KV_HEADS, HEAD_DIM), dtype=np.float32) for n in lengths]
    tables = rng.permutation(len(lengths) * width).reshape(len(lengths), width).astype(np.int32) + 1
    pages = rng.standard_normal((tables.max() + 1, block_size, KV_HEADS, 2, HEAD_DIM), dtype=np.float32)
    rows = [(i, p) for i, p in enumerate(decodes)]
    rows += [(len(decodes) + i, c + t) for i, (c, n) in enumerate(chunks) for t in range(n)]
    new = set(rows)
    for i, n in enumerate(lengths):
        for p in range(n):
            if (i, p) not in new:
                pages[tables[i, p // block_size], p % block_size] = np.stack(
                    [keys[i][p], values[i][p]], axis=1
                )
    num_padding = 256 - len(rows) % 128
    place = [tables[i, p // block_size] * block_size + p % block_size for i, p in rows]
    pad = [0] * num_padding
    batch = Batch(
        positions=jnp.array([p for _, p in rows] + pad),
        rows=jnp.array([i for i, _ in rows] + pad),
        kv_slots=jnp.array(place + pad),
        tables=jnp.array(tables),
        num_decodes=jnp.int32(len(decodes)),
        max_chunks=max_chunks,
    )
    q = rng.standard_normal((len(rows) + num_padding, KV_HEADS, group, HEAD_DIM), dtype=np.float32)
    k = np.zeros((len(q), KV_HEADS, HEAD_DIM), np.float32)
    v = np.zeros_like(k)
    for row, (i, p) in enumerate(rows):
        k[row], v[row] = keys[i][p], values[i][p]

    @jax.jit
    def attend(q: Array, k: Array, v: Array, pages: Array, batch: Batch, sinks: Array | None) -> Any:
        return paged_attention(q, k, v, pages, batch, Options(mask, HEAD_DIM**-0.5, softcap, sinks))

    sinks = rng.standard_normal((KV_HEADS, group), dtype=np.float32) * 2 if has_sinks else None
    arrays = (jnp.array(array) for array in (q, k, v, pages))
    out, pages_out = map(np.asarray, attend(*arrays, batch, sinks))
    for row, (i, p) in enumerate(rows):
        expected = dense(q[row], keys[i], values[i], p, mask, softcap, sinks)
        np.testing.assert_allclose(out[row], expected, atol=2e-6, err_msg=f"sequence {i} position {p}")
        stored = pages_out[tables[i, p // block_size], p % block_size]
        np.testing.assert_array_equal(stored, np.stack([keys[i][p], values[i][p]], axis=1))
    assert np.isfinite(out).all(), "padding must stay finite"


def attended(paged_attention: PagedAttention, *arguments: Any) -> np.ndarray:
    """What comes out, without the pages; compiled whole."""
    *arrays, options = arguments
    return np.asarray(jax.jit(partial(paged_attention, options=options))(*arrays)[0])


@every_one
def test_a_row_does_not_depend_on_its_neighbours(paged_attention: PagedAttention) -> None:
    """A long neighbour makes more stretches, which add exactly nothing to a short row."""
    rng = np.random.default_rng(0)
    pages = jnp.array(rng.standard_normal((64, 32, KV_HEADS, 2, HEAD_DIM), dtype=np.float32))
    tables = jnp.arange(1, 61, dtype=jnp.int32).reshape(2, 30)
    q = jnp.array(rng.standard_normal((2, KV_HEADS, 2, HEAD_DIM), dtype=np.float32))
    kv = jnp.array(rng.standard_normal((2, KV_HEADS, HEAD_DIM), dtype=np.float32))

    def first_row(positions: list[int]) -> np.ndarray:
        n = len(positions)
        at = jnp.array(positions)
        slots = tables[jnp.arange(n), at // 32] * 32 + at % 32
        batch = Batch(at, jnp.arange(n), slots, tables[:n], jnp.int32(n), 0)
        options = Options(Mask(), 1.0, None)
        return attended(paged_attention, q[:n], kv[:n], kv[:n], pages, batch, options)[0]

    np.testing.assert_array_equal(first_row([100, 900]), first_row([100, 3]))


@every_one
def test_a_prefill_row_does_not_depend_on_its_neighbours(paged_attention: PagedAttention) -> None:
    """A prompt gives the same rows alone as between others that share its block of queries."""
    rng = np.random.default_rng(0)
    pages = jnp.array(rng.standard_normal((64, 32, KV_HEADS, 2, HEAD_DIM), dtype=np.float32))
    tables = jnp.arange(1, 61, dtype=jnp.int32).reshape(3, 20)
    lengths = [30, 50, 48]
    q = jnp.array(rng.standard_normal((128, KV_HEADS, 2, HEAD_DIM), dtype=np.float32))
    kv = jnp.array(rng.standard_normal((128, KV_HEADS, HEAD_DIM), dtype=np.float32))
    middle = slice(lengths[0], lengths[0] + lengths[1])

    def attend(rows: slice, lengths: list[int], tables: jax.Array) -> np.ndarray:
        at = jnp.concatenate([jnp.arange(n) for n in lengths])
        owners = jnp.repeat(jnp.arange(len(lengths)), jnp.array(lengths))
        slots = tables[owners, at // 32] * 32 + at % 32
        batch = Batch(at, owners, slots, tables, jnp.int32(0), 3)
        options = Options(Mask(), 1.0, None)
        return attended(paged_attention, q[rows], kv[rows], kv[rows], pages, batch, options)

    together = attend(slice(0, 128), lengths, tables)[middle]
    np.testing.assert_allclose(together, attend(middle, lengths[1:2], tables[1:2]), atol=1e-6)


@pytest.mark.parametrize(
    ("paged_attention", "dtype"),
    [
        (reference.paged_attention, None),
        (reference.paged_attention, INT8),
        pytest.param(cpu.paged_attention, None, marks=needs_compiler),
        (gpu.paged_attention, None),  # interpreted
        pytest.param(gpu.paged_attention, INT8, marks=pytest.mark.slow),
    ],
    ids=["reference", "reference-int8", "cpu", "gpu", "gpu-int8"],
)
@pytest.mark.parametrize(
    ("place", "bad"),
    [
        ("behind the end", np.inf),
        ("after the rows", np.nan),
        pytest.param("behind the end", np.nan, marks=pytest.mark.slow),
        pytest.param("after the rows", np.inf, marks=pytest.mark.slow),
    ],
)
def test_what_is_hidden_cannot_spread(
    paged_attention: PagedAttention, dtype: np.dtype[Any] | None, bad: float, place: str
) -> None:
    """What is no number behind the end of a sequence (left by a block's former owner), or in the keys and
    values of its own later tokens."""
    rng = np.random.default_rng(0)
    tables = jnp.arange(1, 5, dtype=jnp.int32).reshape(2, 2)  # a decode, then a prefill
    cached, new, block = 20, 30, 32
    positions = jnp.array([cached, *range(new)])
    sequences = jnp.array([0] + [1] * new)
    slots = tables[sequences, positions // block] * block + positions % block
    batch = Batch(positions, sequences, slots, tables, jnp.int32(1), 1)
    q = jnp.array(rng.standard_normal((new + 1, KV_HEADS, 2, HEAD_DIM), dtype=np.float32))
    k, v = (np.array(rng.standard_normal((new + 1, KV_HEADS, HEAD_DIM), dtype=np.float32)) for _ in "kv")
    pages = rng.standard_normal((5, block, KV_HEADS, 2, HEAD_DIM)).astype(np.float32)
    options = Options(Mask(), 1.0, None)

    def attend() -> np.ndarray:
        contained = decoder.contained(jnp.array(k), jnp.array(v))
        held = jnp.array(pages) if dtype is None else as_pages(jnp.array(pages), dtype)
        return attended(paged_attention, q, *contained, held, batch, options)

    expected = attend()
    if place == "behind the end":
        what = slice(None) if dtype is None else 0  # values of 8 bits were all finite when they were written
        pages[1, cached + 1 :, :, what], pages[2, :, :, what] = bad, bad
        pages[3, new:, :, what], pages[4, :, :, what] = bad, bad
        np.testing.assert_array_equal(attend(), expected)
    else:
        v[21, 0, 3] = bad  # the prefill's token 20, one head of it
        out = attend()
        np.testing.assert_array_equal(out[:21], expected[:21])
        np.testing.assert_array_equal(out[:, 1], expected[:, 1])
        assert np.isnan(out[21:, 0]).all(), "who sees it is told so"


def rounded(x: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """[..., H] as 8 bits hold it, with the scale of the largest."""
    scale = np.abs(x).max(-1, keepdims=True) / LARGEST[dtype]
    codes = x / np.where(scale == 0, 1, scale)
    return (np.floor(codes + 0.5) if dtype == INT8 else codes.astype(dtype).astype(np.float64)) * scale


@pytest.mark.parametrize("dtype", [INT8, FLOAT8])
def test_keys_and_values_of_8_bits(dtype: np.dtype[Any]) -> None:
    x = np.random.default_rng(0).standard_normal((50, 3, 64)) * np.geomspace(1e-6, 1e6, 50)[:, None, None]
    x[7, 1] = 0
    x = x.astype(np.float32)
    words, scales = quantized(np.split(x, 2, axis=-1), dtype)
    assert words.dtype == jnp.uint16
    assert words.shape == (50, 3, 32)
    got = np.asarray(dequantized(words, scales, dtype))
    step = np.asarray(scales)[..., None] * (1 if dtype == INT8 else 32)  # between the largest two
    assert (np.abs(got - x) <= step * 0.5001).all()
    same = np.abs(got - rounded(x.astype(np.float64), dtype)) <= 1e-5 * step
    assert same.mean() > 0.999, "what lies in the middle of two may become either"
    np.testing.assert_array_equal(as_held(jnp.array(x), dtype), got)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_scale_tells_what_is_not_finite(bad: float) -> None:
    x = np.ones((2, 8), np.float32)
    x[1, 3] = bad
    words, scales = quantized(np.split(x, 2, axis=-1), INT8)
    assert scales[0] == np.float32(1 / 127)
    assert np.isnan(scales[1])
    assert np.isnan(np.asarray(dequantized(words, scales, INT8))[1]).all()


@pytest.mark.parametrize(
    ("dtype", "max_chunks"), [(INT8, 1), (INT8, 0), (FLOAT8, 0), (np.dtype(np.float16), 1)]
)
def test_pages_of_other_types(dtype: np.dtype[Any], max_chunks: int) -> None:
    """What was written in one step is read in the next, beside a dense attention to what 8 bits hold."""
    rng, num, block = np.random.default_rng(0), 21, 8
    k, v = (rng.standard_normal((num, KV_HEADS, HEAD_DIM), dtype=np.float32) for _ in "kv")
    q = rng.standard_normal((num, KV_HEADS, 2, HEAD_DIM), dtype=np.float32)
    pages = empty_pages((6, block, KV_HEADS, 2, HEAD_DIM), dtype)
    tables, options = jnp.array([[4, 1, 3]]), Options(Mask(window=9), 0.25, 3.0)
    attend, parts = jax.jit(partial(reference.paged_attention, options=options)), []
    for part in (slice(0, 20), slice(20, 21)):
        at = jnp.arange(num)[part]
        slots = tables[0, at // block] * block + at % block
        batch = Batch(at, jnp.zeros_like(at), slots, tables, jnp.int32(0), max_chunks)
        out, pages = attend(q[part], k[part], v[part], pages, batch)
        parts.append(np.asarray(out))
    held = [np.asarray(as_held(jnp.array(x), dtype)) for x in (k, v)]
    for row, got in enumerate(np.concatenate(parts)):
        expected = dense(q[row], *held, row, options.mask, options.softcap, None)
        np.testing.assert_allclose(got, expected, atol=2e-6)
    assert isinstance(pages, QuantizedPages) == (dtype in LARGEST)
    assert pages.shape == (6, block, KV_HEADS, 2, HEAD_DIM)
