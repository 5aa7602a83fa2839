"""paged_attention for NVIDIA GPUs: which kernel is launched for a step, and how it is cut.

Our own (gpu_kernel.py) does everything. Where a step has many prompt tokens, cuDNN (gpu_cudnn.py) attends
among them first, and ours goes on from there over what is cached.

It knows nothing of meshes: it sees the heads of one device. docs/kernels.md tells why the tilings are as they
are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from hex_llm.kernels import gpu_cudnn
from hex_llm.kernels.attention import Batch, Options
from hex_llm.kernels.gpu_kernel import Cache, PartialSoftmax, Tiling, attend, next_power, write_kv

MIN_DOT = 16  # the least side of a matrix product
MAX_GROUP = 64  # query heads per KV head
MAX_HEAD_DIM = 256
MIN_CUDNN_ROWS = 6144  # fewer rows: our own kernel is as fast, and sooner compiled (docs/kernels.md)


def can_attend(group: int, head_dim: int, dtype: Any) -> bool:
    """Whether the kernels here are for models like this; `dtype` is that of queries and pages alike. What
    they are not for, the reference does."""
    dtype_fits = jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
    return dtype_fits and group <= MAX_GROUP and head_dim % 8 == 0 and MIN_DOT <= head_dim <= MAX_HEAD_DIM


def paged_attention(
    q: Array, k: Array, v: Array, pages: Array, batch: Batch, options: Options
) -> tuple[Array, Array]:
    """See kernels.attention.PagedAttention. bfloat16 products round their weights to bfloat16; float32 ones
    are exact, and there a row's result does not depend on the others of the batch."""
    pages, semaphores = write_kv(k, v, pages, batch.kv_slots)
    num_decode = len(batch.decode_tables)
    parts = []
    if num_decode:
        tiling = decode_tiling(q[:num_decode], pages, batch.decode_tables)
        rows = (q[:num_decode], batch.positions[:num_decode], None)
        cache = Cache(pages, batch.decode_tables, semaphores[:num_decode])
        parts.append(attend(*rows, cache, options, tiling))
    if len(batch.prefill_tables):
        tokens = (q, k, v, semaphores, batch.positions, batch.sequences, batch.kv_slots)
        q, k, v, semaphores, positions, sequences, slots = (x[num_decode:] for x in tokens)
        cache = Cache(pages, batch.prefill_tables, semaphores)
        sequences, tiling = sequences - num_decode, prefill_tiling(q, pages, batch.prefill_tables)
        if cudnn_begins(q, pages, options):
            # Padding, which lands in block 0, becomes a sequence of its own.
            sequences = jnp.where(slots < pages.shape[1], len(batch.prefill_tables), sequences)
            parts.append(continued_prefill(q, k, v, positions, sequences, cache, options, tiling))
        else:
            parts.append(prefill(q, positions, sequences, cache, options, tiling))
    return jnp.concatenate(parts), pages


def cudnn_begins(q: Array, pages: Array, options: Options) -> bool:
    num_rows, num_kv_heads, group, head_dim = q.shape
    kind = (num_kv_heads, group, head_dim, options.mask.window)
    return (
        num_rows >= MIN_CUDNN_ROWS
        and q.dtype == pages.dtype == jnp.bfloat16
        and options.softcap is None
        and options.mask.attention_chunk is None
        and gpu_cudnn.can_attend(*kind)
    )


def decode_tiling(q: Array, pages: Array, tables: Array) -> Tiling:
    num_seqs, num_kv_heads, group, head_dim = q.shape
    rows = max(next_power(group), MIN_DOT)
    if pages.dtype == jnp.float32:  # the same for all batches, so that rows do not depend on their number
        return Tiling(rows, keys=32, splits=16, min_split=256, warps=4, stages=2)
    programs, reach = num_seqs * num_kv_heads, tables.shape[1] * pages.shape[1]
    if programs <= 8 and rows == MIN_DOT:  # few: one on each multiprocessor, that reads far ahead
        tiling = Tiling(rows, 128, splits=min(128 // programs, 64), min_split=128, warps=4, stages=5)
    elif programs <= 64:
        tiling = Tiling(rows, 64, splits=max(256 // programs, 4), min_split=256, warps=2, stages=5)
    elif programs <= 128:
        tiling = Tiling(rows, 64, splits=8, min_split=512, warps=4, stages=3)
    else:  # many: splits only balance rows of different lengths
        tiling = Tiling(rows, 128, splits=16, min_split=1024 if programs <= 512 else 2048, warps=4, stages=2)
    if head_dim > 128:
        tiling = replace(tiling, keys=32, warps=4, stages=2)
    return replace(tiling, splits=min(tiling.splits, pl.cdiv(reach, tiling.min_split)))


def prefill_tiling(q: Array, pages: Array, tables: Array) -> Tiling:
    num_rows, num_kv_heads, group, head_dim = q.shape
    if pages.dtype == jnp.float32:
        return Tiling(max(next_power(group), 32), keys=32, splits=1, min_split=256, warps=4, stages=2)
    rows = 128 if num_rows * group <= 128 or head_dim > 128 else 256
    programs = pl.cdiv(num_rows * group, rows) * num_kv_heads
    reach = tables.shape[1] * pages.shape[1]
    splits = max(min(256 // programs, reach // 512, 8), 1)  # few rows may see a long prefix
    return Tiling(rows, 64, splits, min_split=512, warps=8, stages=5 if head_dim <= 128 else 2)


def prefill(
    q: Array, positions: Array, sequences: Array, cache: Cache, options: Options, tiling: Tiling
) -> Array:
    """q [T, K, G, H], rows of a sequence together. Padding, wherever it says it belongs, stays finite."""
    sequences = jnp.maximum(sequences, 0)
    starts = row_blocks(sequences, len(cache.tables), tiling.rows // q.shape[2])
    return attend(q, positions, (sequences, starts), cache, options, tiling)


def continued_prefill(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    sequences: Array,
    cache: Cache,
    options: Options,
    tiling: Tiling,
) -> Array:
    """As `prefill`, but cuDNN does what rows see of k and v [T, K, H], the step's own. Sequences lie in
    order, then padding, which is of the sequence after the last and becomes 0."""
    num_seqs = len(cache.tables)
    lengths = jnp.sum(sequences == jnp.arange(num_seqs)[:, None], axis=1, dtype=jnp.int32)
    out, logs = gpu_cudnn.causal(q, k, v, lengths, window=options.mask.window, scale=options.scale)
    starts = row_blocks(sequences, num_seqs, tiling.rows // q.shape[2])
    first_rows = jnp.append(jnp.cumsum(lengths) - lengths, 0)
    owners = sequences[starts[:-1]]
    cached = jnp.where(owners < num_seqs, positions[first_rows[owners]], -1)
    begun = PartialSoftmax(out, logs, cached)
    return attend(q, positions, (sequences, starts), cache, options, tiling, begun)


def row_blocks(sequences: Array, num_seqs: int, length: int) -> Array:
    """[N + 1] where blocks of rows begin, each of one sequence and at most `length` rows; a block ends where
    the next begins, and those that are too many are empty."""
    num_rows = len(sequences)
    place = jnp.arange(num_rows, dtype=jnp.int32)
    changes = jnp.concatenate([jnp.ones(1, bool), sequences[1:] != sequences[:-1]])
    run_start = lax.cummax(jnp.where(changes, place, 0))
    begins = (place - run_start) % length == 0
    most = num_rows // length + num_seqs + 1  # padding may be a run of its own
    return jnp.nonzero(begins, size=most + 1, fill_value=num_rows)[0].astype(jnp.int32)
