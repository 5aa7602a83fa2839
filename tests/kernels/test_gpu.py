"""The GPU's kernels against the reference, interpreted where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import gpu, gpu_kernel, gpu_launch, reference
from hex_llm.kernels.attention import LARGEST, Batch, KVPages, Mask, Options, QuantizedPages, quantized
from tests.kernels.lowering import lowered_for_gpus

DECODES = [0, 5, 63, 64, 299]  # positions; everything before is cached
CHUNKS = [(0, 50), (100, 40), (0, 1), (290, 3)]  # (cached, new tokens)


def ragged(
    decodes: list[int],
    chunks: list[tuple[int, int]],
    *,
    block_size: int = 16,
    kv_heads: int = 1,
    group: int = 2,
    head_dim: int = 16,
    dtype: Any = jnp.float32,
    kv_dtype: Any = None,  # as the others
    num_padding: int = 11,
    max_chunks: int = 5,
    seed: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array, Any, Batch]:
    """The arguments of paged_attention: blocks in any order, and padding behind the prefills."""
    rng = np.random.default_rng(seed)
    lengths = [p + 1 for p in decodes] + [cached + new for cached, new in chunks]
    width = -(-max(lengths) // block_size)
    tables = np.zeros((len(lengths), width), np.int32)
    free = rng.permutation(len(lengths) * width) + 1
    for i, n in enumerate(lengths):
        reached = -(-n // block_size)
        tables[i, :reached] = free[i * width : i * width + reached]
    rows = [(i, p) for i, p in enumerate(decodes)]
    rows += [(len(decodes) + i, c + t) for i, (c, n) in enumerate(chunks) for t in range(n)]
    rows += [(0, 0)] * num_padding
    slots = [tables[i, p // block_size] * block_size + p % block_size for i, p in rows]
    slots[len(rows) - num_padding :] = [0] * num_padding
    batch = Batch(
        positions=jnp.array([p for _, p in rows], jnp.int32),
        rows=jnp.array([i for i, _ in rows], jnp.int32),
        kv_slots=jnp.array(slots, jnp.int32),
        tables=jnp.array(tables),
        num_decodes=jnp.int32(len(decodes)),
        max_chunks=max_chunks,
    )

    def normal(*shape: int) -> jax.Array:
        return jnp.array(rng.standard_normal(shape, dtype=np.float32), dtype)

    q = normal(len(rows), kv_heads, group, head_dim)
    k, v = normal(len(rows), kv_heads, head_dim), normal(len(rows), kv_heads, head_dim)
    pages = normal(len(free) + 1, block_size, kv_heads, 2, head_dim)
    return q, k, v, as_pages(pages, np.dtype(kv_dtype or dtype)), batch


def as_pages(pages: jax.Array, dtype: np.dtype[Any]) -> KVPages:
    """Plain ones [N, block, K, 2, H] in a type."""
    if dtype not in LARGEST:
        return pages.astype(dtype)
    words, scales = quantized(jnp.split(pages, 2, axis=-1), dtype)
    return QuantizedPages(words, scales.transpose(0, 3, 2, 1), dtype)


def run(attend: Any, arguments: tuple[Any, ...], **options: Any) -> tuple[jax.Array, jax.Array]:
    """Compiled in haste: what interprets kernels is long, and is run once."""
    lowered = jax.jit(partial(attend, **options)).lower(*arguments)
    hasty = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return lowered.compile(compiler_options=hasty)(*arguments)


def check(
    arguments: tuple[Any, ...], mask: Mask, softcap: float | None = None, *, has_sinks: bool = False
) -> None:
    q = arguments[0]
    sinks = jnp.linspace(-3, 4, q[0, ..., 0].size).reshape(q.shape[1:3]) if has_sinks else None
    options = Options(mask, q.shape[-1] ** -0.5, softcap, sinks)
    out, pages = run(gpu.paged_attention, arguments, options=options)
    exact = [x.astype(jnp.float32) for x in arguments[:3]]
    with jax.default_matmul_precision("highest"):
        expected, stored = run(reference.paged_attention, (*exact, *arguments[3:]), options=options)
    for ours, theirs in zip(jax.tree.leaves(pages), jax.tree.leaves(stored), strict=True):
        np.testing.assert_array_equal(ours[1:].astype(jnp.float32), theirs[1:].astype(jnp.float32))
    real = np.asarray(arguments[4].kv_slots) > 0
    tolerance = {"atol": 2e-6} if out.dtype == jnp.float32 else {"atol": 2e-2, "rtol": 2e-2}
    got = np.asarray(out.astype(jnp.float32))
    np.testing.assert_allclose(got[real], np.asarray(expected)[real], **tolerance)
    assert np.isfinite(got).all(), "padding must stay finite"


@pytest.mark.parametrize(
    ("mask", "softcap", "group", "head_dim", "block_size", "dtype"),
    [
        pytest.param(Mask(), None, 3, 16, 16, jnp.float32, marks=pytest.mark.slow),
        (Mask(window=5), 1.5, 1, 96, 8, jnp.float32),
        pytest.param(Mask(window=100), None, 7, 64, 32, jnp.bfloat16, marks=pytest.mark.slow),
        (Mask(attention_chunk=48), None, 32, 16, 512, jnp.float32),
        (Mask(window=100), 1.5, 2, 64, 32, jnp.float16),
        pytest.param(Mask(), 1.5, 2, 16, 2048, jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_decodes_and_prefills(
    mask: Mask, softcap: float | None, group: int, head_dim: int, block_size: int, dtype: Any
) -> None:
    sizes = {"group": group, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    kind = {"mask": mask, "softcap": softcap, "has_sinks": group in (1, 3, 7)}
    check(ragged(DECODES, CHUNKS, kv_heads=3 if group == 3 else 1, **sizes), **kind)
    check(ragged(DECODES, CHUNKS[1:], max_chunks=0, **sizes), **kind)  # every token by itself


@pytest.mark.parametrize(
    ("decodes", "chunks", "dtype"),
    [
        ([3000, 0, 700], [(1500, 9), (20, 3)], jnp.bfloat16),
        pytest.param([3000, 0, 700], [], jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_several_splits(decodes: list[int], chunks: list[tuple[int, int]], dtype: Any) -> None:
    check(
        ragged(decodes, chunks, dtype=dtype, num_padding=2 * len(chunks)), Mask(window=1400), has_sinks=True
    )


@pytest.mark.parametrize(
    ("mask", "softcap", "group", "head_dim", "block_size", "dtype", "kv_dtype"),
    [
        pytest.param(Mask(), None, 3, 32, 16, jnp.float32, jnp.int8, marks=pytest.mark.slow),
        (Mask(window=100), 1.5, 1, 96, 8, jnp.bfloat16, jnp.float8_e4m3fn),
        pytest.param(Mask(), None, 4, 64, 512, jnp.bfloat16, jnp.int8, marks=pytest.mark.slow),
        pytest.param(Mask(), None, 1, 16, 32, jnp.bfloat16, jnp.float16, marks=pytest.mark.slow),
        pytest.param(Mask(), 1.5, 2, 16, 8, jnp.float32, jnp.float8_e4m3fn, marks=pytest.mark.slow),
        pytest.param(Mask(), None, 2, 64, 16, jnp.float16, jnp.float8_e4m3fn, marks=pytest.mark.slow),
    ],
)
def test_pages_of_other_types(
    mask: Mask, softcap: float | None, group: int, head_dim: int, block_size: int, dtype: Any, kv_dtype: Any
) -> None:
    sizes = {"group": group, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    kind = {"mask": mask, "softcap": softcap, "has_sinks": group == 1}
    check(ragged(DECODES, CHUNKS, kv_heads=group, kv_dtype=kv_dtype, **sizes), **kind)


@pytest.mark.slow
def test_several_splits_of_quantized_pages() -> None:
    arguments = ragged([3000, 0, 700], [(1500, 9)], dtype=jnp.bfloat16, kv_dtype=jnp.int8, num_padding=2)
    check(arguments, Mask(window=1400))


def test_large_heads() -> None:
    check(ragged([40, 70], [(30, 20)], head_dim=256, dtype=jnp.bfloat16), Mask())


@pytest.mark.parametrize(
    ("head_dim", "capability"), [(64, 8.9), (256, 8.9), pytest.param(64, 10.0, marks=pytest.mark.slow)]
)
def test_as_it_is_cut_for_other_gpus(
    head_dim: int, capability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_launch, "capability", lambda: capability)
    arguments = ragged([300, 0, 70], [(150, 9), (20, 70)], head_dim=head_dim, dtype=jnp.bfloat16)
    check(arguments, Mask(window=140))


def test_only_prefills_with_padding_that_claims_to_be_of_the_first() -> None:
    check(ragged([], [(20, 30), (0, 5)], num_padding=82), Mask())


@pytest.mark.parametrize(
    ("decodes", "chunks"), [([700, 2, 90, 1500], []), ([], [(300, 20), (40, 30), (0, 60)])]
)
def test_a_row_does_not_depend_on_its_neighbours(decodes: list[int], chunks: list[tuple[int, int]]) -> None:
    options = Options(Mask(), 0.25, None)
    q, k, v, pages, batch = ragged(decodes, chunks, num_padding=0)
    together, _ = run(gpu.paged_attention, (q, k, v, pages, batch), options=options)
    first = chunks[0][1] if chunks else 1
    tokens = (x[:first] for x in (batch.positions, batch.rows, batch.kv_slots))
    alone = Batch(*tokens, batch.tables[:1], jnp.int32(not chunks), batch.max_chunks)
    out, _ = run(gpu.paged_attention, (q[:first], k[:first], v[:first], pages, alone), options=options)
    # Interpreted, XLA may sum otherwise on one processor than on another.
    np.testing.assert_allclose(together[:first], out, rtol=0, atol=1e-7 if gpu_launch.interpreted() else 0)


def test_keys_before_the_window_are_not_read() -> None:
    """They are not numbers, which even a weight of 0 would spread."""
    q, k, v, pages, batch = ragged([600], [(600, 40)], num_padding=0, block_size=32)
    unseen = batch.tables[:, :16].ravel()
    arguments = q, k, v, pages.at[unseen].set(jnp.nan), batch
    out, _ = run(gpu.paged_attention, arguments, options=Options(Mask(window=64), 0.25, None))
    assert np.isfinite(np.asarray(out)).all()


def test_what_the_kernels_are_for() -> None:
    assert gpu.can_attend(7, 96, jnp.bfloat16)
    assert not gpu.can_attend(71, 64, jnp.bfloat16)
    assert not gpu.can_attend(1, 8, jnp.float32)
    assert gpu.can_attend(1, 64, jnp.float16)
    assert not gpu.can_attend(1, 64, jnp.float64)


def test_row_blocks() -> None:
    chunks = jnp.array([-2, -1] + [0] * 9 + [1] * 4 + [2] + [5] * 2)
    assert gpu.row_blocks(chunks, 4, 8).tolist() == [2, 6, 10, 11, 15, 16, 18, 18, 18]


@pytest.mark.parametrize("is_exact", [False, True])
def test_work_items(is_exact: bool) -> None:
    """Every key of every block is some item's, none twice, and splits are about as long."""
    tiling = gpu_kernel.Tiling(16, 32, 1, num_blocks=6, num_spare=18, min_split=64, warps=1, stages=1)
    tiling = replace(tiling, is_exact=is_exact)
    starts, ends = jnp.arange(6), jnp.array([1, 2, 2, 4, 5, 6])  # the third is empty
    first, stop = jnp.array([0, 40, 0, 7, 0, 0]), jnp.array([1, 900, 70, 63, 3000, 70])
    items = jax.tree.map(np.asarray, gpu.work_items(starts, ends, first, stop, tiling))
    seen: dict[int, list[tuple[int, int]]] = {}
    for i in np.flatnonzero(items.start < items.end):
        seen.setdefault(int(items.start[i]), []).append((int(items.begin[i]), int(items.stop[i])))
        assert items.stop_all[i] == stop[items.start[i]]
    assert seen.keys() == {0, 1, 3, 4, 5}
    for block, stretches in seen.items():
        *_, last = sorted(stretches)
        edges = sorted(stretches)
        assert edges[0][0] == first[block] // 32 * 32
        assert last[1] == stop[block]
        assert all(a[1] == b[0] for a, b in pairwise(edges))
        assert is_exact or max(b - a for a, b in edges) <= 256
    assert sorted(items.part[items.start < items.end]) == list(range(sum(map(len, seen.values()))))


@pytest.mark.parametrize("kv_dtype", [None, jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("softcap", [pytest.param(None, marks=pytest.mark.slow), 30.0])
def test_lowers_for_gpus(dtype: Any, softcap: float | None, kv_dtype: Any) -> None:
    """As far as that goes without a GPU: to Triton's own language."""
    if jax.default_backend() != "cpu":
        pytest.skip("it runs here")
    arguments = ragged(DECODES, CHUNKS, dtype=dtype, kv_dtype=kv_dtype, group=3, head_dim=96, num_padding=2)

    def attend(*arguments: Any) -> Any:
        sinks = None if softcap is None else jnp.zeros((1, 3))
        return gpu.paged_attention(*arguments, Options(Mask(window=70), 0.1, softcap, sinks))

    assert lowered_for_gpus(attend, *arguments).count("triton") >= 3  # the write, decodes, prefills
