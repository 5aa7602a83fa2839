"""paged_attention for NVIDIA GPUs: which kernel is launched for a step, and how it is cut.

Our own (gpu_kernel.py) does everything. Where a step has many prompt tokens, cuDNN (gpu_cudnn.py) attends
among them first, and ours goes on from there over what is cached.

It knows nothing of meshes: it sees the heads of one device. docs/kernels.md tells why the tilings are as they
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from hex_llm.kernels import gpu_cudnn
from hex_llm.kernels.attention import LARGEST, Batch, KVPages, Options, Projected, as_held, first_key
from hex_llm.kernels.gpu_heads import place_heads, write_kv
from hex_llm.kernels.gpu_kernel import LAST, Begun, Cache, Tiling, WorkItem, attend
from hex_llm.kernels.gpu_launch import DTYPES, MIN_DOT, has_large_shared_memory, has_tensor_memory, next_power

MAX_GROUP = 64  # query heads per KV head
MAX_HEAD_DIM = 256
MIN_CUDNN_ROWS = 6144  # fewer rows: our own kernel is as fast, and sooner compiled (docs/kernels.md)
MAX_CUDNN_CHUNKS = 12  # for each there may be, cuDNN fills an array of all rows with zeros


def can_attend(group: int, head_dim: int, dtype: Any) -> bool:
    """Whether the kernels here are for models like this; `dtype` is that of queries; pages have any. What
    they are not for, the reference does."""
    dim_fits = head_dim % 8 == 0 and MIN_DOT <= head_dim <= MAX_HEAD_DIM
    return jnp.dtype(dtype) in DTYPES and group <= MAX_GROUP and dim_fits


def paged_attention(
    q: Array, k: Array, v: Array, pages: KVPages, batch: Batch, options: Options
) -> tuple[Array, KVPages]:
    """See kernels.attention.PagedAttention. Products of 16 bits round weights to these; those of float32
    are exact, and there a row's result does not depend on the others of the batch."""
    pages, semaphores = write_kv(k, v, pages, batch.kv_slots)
    return _attend(q, (k, v), Cache(pages, batch.tables, semaphores), batch, options), pages


def projected_attention(
    heads: Projected, pages: KVPages, batch: Batch, options: Options
) -> tuple[Array, KVPages]:
    """See kernels.attention.ProjectedAttention."""
    keep = batch.max_chunks > 0 and cudnn_begins(heads.queries, options)
    q, kv, pages, semaphores = place_heads(heads, pages, batch.kv_slots, keep)
    return _attend(q, kv, Cache(pages, batch.tables, semaphores), batch, options), pages


def _attend(q: Array, kv: Sequence[Array] | None, cache: Cache, batch: Batch, options: Options) -> Array:
    """`kv`, two of [T, K, H], may be None where cuDNN does not begin."""
    out = prefill(q, kv, batch, cache, options) if batch.max_chunks else None
    return decode(q, batch, cache, options, out)


def decode(q: Array, batch: Batch, cache: Cache, options: Options, out: Array | None) -> Array:
    """Tokens that attend one by one. Where there are chunks these are the decodes, written into `out`."""
    most = len(q) if out is None else len(cache.tables)
    num = most if out is None else batch.num_decodes
    row, positions = jnp.arange(most, dtype=jnp.int32), batch.positions[:most]
    tiling = decode_tiling(q[:most], cache.pages)
    ends = jnp.where(row < num, row + 1, row)
    items = work_items(row, ends, first_key(positions, options.mask), positions + 1, tiling)
    return attend(q, batch, items, cache, options, tiling, None if out is None else Begun(out))


def prefill(q: Array, kv: Sequence[Array] | None, batch: Batch, cache: Cache, options: Options) -> Array:
    """Tokens of chunks, and padding, which stays finite."""
    num_rows, most = len(q), batch.max_chunks
    tiling = prefill_tiling(q, most)
    is_padding = batch.kv_slots < cache.pages.shape[1]  # it lands in block 0, wherever it says it belongs
    chunks = jnp.where(is_padding, most, batch.rows - batch.num_decodes)
    starts = row_blocks(chunks, tiling.num_tokens, tiling.num_blocks)
    starts, ends, lasts = starts[:-1], starts[1:], jnp.maximum(starts[1:] - 1, 0)
    first = first_key(batch.positions[jnp.minimum(starts, num_rows - 1)], options.mask)
    if kv is None or not cudnn_begins(q, options):
        items = work_items(starts, ends, first, batch.positions[lasts] + 1, tiling)
        return attend(q, batch, items, cache, options, tiling)
    # cuDNN is given the decodes too, as they lie before the chunks; what it does of them is not used.
    begun = min(most, MAX_CUDNN_CHUNKS)
    lengths = jnp.sum(chunks == jnp.arange(begun)[:, None], axis=1, dtype=jnp.int32)
    lengths = jnp.append(batch.num_decodes, lengths)
    # As pages hold them, so that it does not matter where a step ends.
    k, v = (as_held(one, cache.pages.dtype) for one in kv)
    out, logs = gpu_cudnn.causal(q, k, v, lengths, window=options.mask.window, scale=options.scale)
    # What is left are the keys before the step; of later chunks all; of padding none, and it becomes 0.
    owners = chunks[jnp.minimum(starts, num_rows - 1)]
    firsts = (jnp.cumsum(lengths) - lengths)[jnp.minimum(owners, begun - 1) + 1]
    left = jnp.where(owners < begun, batch.positions[firsts], batch.positions[lasts] + 1)
    left = jnp.where(owners < most, left, -1)
    items = work_items(starts, jnp.where(left == 0, starts, ends), first, left, tiling)
    return attend(q, batch, items, cache, options, tiling, Begun(out, logs))


def cudnn_begins(q: Array | jax.ShapeDtypeStruct, options: Options) -> bool:
    num_rows, num_kv_heads, group, head_dim = q.shape
    kind = (num_kv_heads, group, head_dim, options.mask.window)
    return (
        num_rows >= MIN_CUDNN_ROWS
        and q.dtype == jnp.bfloat16
        and options.softcap is None
        and options.sinks is None
        and options.mask.attention_chunk is None
        and gpu_cudnn.can_attend(*kind)
    )


def decode_tiling(q: Array, pages: KVPages) -> Tiling:
    num_blocks, num_kv_heads, group, head_dim = q.shape
    tile = partial(Tiling, max(next_power(group), MIN_DOT), num_tokens=1, num_blocks=num_blocks)
    if q.dtype == jnp.float32:
        spare = 15 * num_blocks
        return tile(keys=32, num_spare=spare, min_split=256, warps=4, stages=2, is_exact=True)
    programs = num_blocks * num_kv_heads
    if programs <= 8 and group <= MIN_DOT:  # few: one on each multiprocessor, that reads far ahead
        spare = (min(128 // programs, 64) - 1) * num_blocks
        keys = 128 if has_large_shared_memory() else 64
        tiling = tile(keys=keys, num_spare=spare, min_split=128, warps=4, stages=5)
    elif programs <= 64:
        spare = (max(256 // programs, 4) - 1) * num_blocks
        tiling = tile(keys=64, num_spare=spare, min_split=256, warps=2, stages=5)
    elif programs <= 128:
        tiling = tile(keys=64, num_spare=7 * num_blocks, min_split=512, warps=4, stages=3)
    elif pages.dtype in LARGEST:  # tiles of half as many bytes
        tiling = tile(keys=64, num_spare=num_blocks, min_split=1024, warps=2, stages=5)
    elif 256 < programs <= 512:  # four for each multiprocessor, two at a time
        tiling = tile(keys=64, num_spare=num_blocks, min_split=1024, warps=2, stages=3)
    else:  # splits only balance rows of different lengths
        min_split = 1024 if programs <= 512 else 2048
        tiling = tile(keys=128, num_spare=num_blocks, min_split=min_split, warps=4, stages=2)
    return tiling if head_dim <= 128 else replace(tiling, keys=32, warps=4, stages=2)


def prefill_tiling(q: Array, max_chunks: int) -> Tiling:
    num_rows, num_kv_heads, group, head_dim = q.shape
    is_exact = q.dtype == jnp.float32
    rows, keys, warps, stages = _prefill_tile(head_dim, is_exact, is_short=num_rows * group <= 128)
    rows = max(rows, next_power(group))
    num_tokens = rows // group
    num_blocks = num_rows // num_tokens + max_chunks + 1  # padding may be a run of its own
    num_full = pl.cdiv(num_rows, num_tokens)
    # Few rows may see a long prefix.
    spare = 0 if is_exact else (max(min(256 // (num_full * num_kv_heads), 8), 1) - 1) * num_full
    min_split = 256 if is_exact else 512
    return Tiling(rows, keys, num_tokens, num_blocks, spare, min_split, warps, stages)


def _prefill_tile(head_dim: int, is_exact: bool, is_short: bool) -> tuple[int, int, int, int]:
    """Rows and keys, warps and stages."""
    is_large = has_large_shared_memory()
    if is_exact:
        return 32, 32 if is_large or head_dim <= 128 else 16, 4, 2
    if not is_large:
        return (128, 64, 8, 3) if head_dim <= 128 else (64, 32, 4, 2)
    if head_dim > 128:
        return 128, 64, 8, 2
    return 128 if is_short or has_tensor_memory() else 256, 64, 8, 5


def row_blocks(chunks: Array, length: int, most: int) -> Array:
    """[most + 1] where blocks of tokens begin, each of one chunk and at most `length` tokens; a block ends
    where the next begins, and those that are too many are empty. `chunks` [T] numbers them; below 0: none."""
    num_rows = len(chunks)
    place = jnp.arange(num_rows, dtype=jnp.int32)
    changes = jnp.concatenate([jnp.ones(1, bool), chunks[1:] != chunks[:-1]])
    run_start = lax.cummax(jnp.where(changes, place, 0))
    begins = ((place - run_start) % length == 0) & (chunks >= 0)
    return jnp.nonzero(begins, size=most + 1, fill_value=num_rows)[0].astype(jnp.int32)


def work_items(starts: Array, ends: Array, first: Array, stop: Array, tiling: Tiling) -> WorkItem:
    """The programs of each KV head: blocks of tokens [start, end) with the keys from `first` to `stop` that
    they see, cut into splits; empty ones have none. Splits are as short as the number of items allows, so
    that all are about the same work."""
    first = lax.div(first, tiling.keys) * tiling.keys
    num_keys = jnp.where(starts < ends, jnp.maximum(stop - first, 0), 0)
    if not tiling.num_spare:
        length = jnp.full_like(first, LAST)
    elif tiling.is_exact:
        splits = tiling.num_spare // tiling.num_blocks + 1
        length = pl.cdiv(num_keys, splits * tiling.keys) * tiling.keys
    else:
        length = pl.cdiv(jnp.sum(num_keys), tiling.num_spare * tiling.keys) * tiling.keys
    length = jnp.maximum(jnp.broadcast_to(length, first.shape), tiling.min_split)
    num_splits = jnp.where(starts < ends, jnp.maximum(lax.div(num_keys - 1, length) + 1, 1), 0)
    stops = jnp.cumsum(num_splits)
    # The last blocks of a prompt have the most keys: they go first.
    part = stops[-1] - 1 - jnp.arange(tiling.num_blocks + tiling.num_spare, dtype=jnp.int32)
    block = jnp.sum(stops <= part[:, None], axis=1, dtype=jnp.int32)
    split = part - (stops - num_splits)[block]
    begin = first[block] + split * length[block]
    ends = jnp.where(part >= 0, ends[block], 0)
    end = begin + jnp.minimum(length[block], stop[block] - begin)
    return WorkItem(starts[block], ends, begin, end, stop[block], split, num_splits[block], part)
