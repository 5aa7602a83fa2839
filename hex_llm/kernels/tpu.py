"""paged_attention for TPUs: a step in the terms of the ragged kernel that comes with JAX.

The kernel attends to whole sequences from their first key on. Here rows become *runs*: rows of one sequence
that together see a stretch of its blocks. A window or a chunk moves the beginning of that stretch, so that
blocks that no row of a run sees are not read. It knows nothing of meshes: it sees the heads of one device.

The kernel reads the KV heads of a block together, which its compiler can do for some numbers of them and for
heads of 128. Otherwise heads lie *apart*: a block of K heads is A pages of K / A heads, one after the other,
and a row is A rows, each with its own table. Pages are as large either way, and nobody else reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas import cdiv
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from hex_llm.kernels import attention, tpu_pages
from hex_llm.kernels.attention import LARGEST, Batch, Mask, Options, first_key
from hex_llm.kernels.reference import several
from hex_llm.kernels.tpu_pages import PairedPages
from hex_llm.kernels.tpu_sinks import LANES, attention_with_sinks

TABLE_BYTES = 1 << 19  # the kernel copies the block tables to scalar memory, of which there is 1 MiB
BUFFER_BYTES = 8 << 20  # for keys and values that are read ahead; vector memory may give a kernel 16 MiB
# JAX's tables of tuned sizes (for 512 rows and more) mostly say 1024 keys, at most 16 pages of them,
# and 32 rows. A decode's rows are of as many sequences, and each computes for all rows of its block.
KEYS, MOST_PAGES = 1024, 16
PREFILL_ROWS, DECODE_ROWS = 32, 8
MOST_KEYS_OF_A_PAGE = 256  # larger blocks are seen as several pages


class Runs(NamedTuple):
    """Runs of rows, one after the other from the first row on; the first `num` of R, the others are empty."""

    ends: Array  # [R + 1] of rows, beginning with 0
    lengths: Array  # [R] keys from the first block of the table up to the run's last row
    tables: Array  # [R, B]
    num: Array  # [1]


def can_attend(
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    masks: Iterable[Mask],
    sinks: bool,
    dtype: Any,
    kv_dtype: Any = jnp.bfloat16,
) -> bool:
    """Whether a kernel is for models like this; `num_kv_heads` are those of one device. What none is for,
    the reference does."""
    head_dim = padded_head_dim(head_dim)
    whole_chunks = all((mask.attention_chunk or 0) % block_size == 0 for mask in masks)
    if jnp.dtype(dtype) != jnp.bfloat16 or not whole_chunks:
        return False
    if jnp.dtype(kv_dtype) in LARGEST:
        return tpu_pages.can_attend(num_kv_heads, head_dim, block_size)
    pages_fit = block_size <= MOST_KEYS_OF_A_PAGE or block_size % MOST_KEYS_OF_A_PAGE == 0
    apart = num_apart(num_kv_heads, head_dim)
    keys_fit = _keys_at_once(num_kv_heads // apart, head_dim) >= min(block_size, MOST_KEYS_OF_A_PAGE)
    sinks_fit = not sinks or apart == 1  # else they would be another's in each row
    return pages_fit and keys_fit and sinks_fit


def padded_head_dim(head_dim: int) -> int:
    """The width that pages must have."""
    return cdiv(head_dim, LANES) * LANES


def empty_pages(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """As the kernels want them."""
    return (tpu_pages if dtype in LARGEST else attention).empty_pages(shape, dtype)


def paged_attention(
    q: Array, k: Array, v: Array, pages: Any, batch: Batch, options: Options
) -> tuple[Array, Any]:
    """See kernels.attention.PagedAttention. Pages are `padded_head_dim` wide, and paired, or plain; what lies
    where in a plain block is not as it says there."""
    head_dim, shape = q.shape[-1], pages.shape
    q, k, v = (_padded(x, shape[-1]) for x in (q, k, v))
    if isinstance(pages, PairedPages):
        pages = tpu_pages.write(k, v, pages, batch)
        return _attend_all(q, pages, batch, options)[..., :head_dim], pages
    num_blocks, block_size, num_kv_heads = shape[:3]
    apart = num_apart(num_kv_heads, shape[-1])
    pages = pages.reshape(num_blocks * apart, block_size, num_kv_heads // apart, 2, shape[-1])
    pages = _write(k, v, pages, batch.kv_slots)
    assert options.sinks is None or apart == 1, "heads that lie apart have none"
    return _attend_all(q, pages, batch, options)[..., :head_dim], pages.reshape(shape)


def _attend_all(q: Array, pages: Any, batch: Batch, options: Options) -> Array:
    """q [T, K, G, H] -> [T, K, G, H]. To move or choose from a whole array of so small heads is expensive:
    decodes take their places among the first rows, and padding keeps what was in the kernel's memory."""
    if not batch.max_chunks:
        return _decode(q, pages, batch.positions, batch.tables[batch.rows], jnp.int32(len(q)), options)
    num, most = batch.num_decodes, len(batch.tables)
    decoded = _decode(q[:most], pages, batch.positions[:most], batch.tables, num, options)
    out = _prefill(q, pages, prefill_runs(batch, options.mask, pages.shape[1]), options)
    is_decode = jnp.arange(most)[:, None, None, None] < num
    return out.at[:most].set(jnp.where(is_decode, decoded, out[:most]))


def _write(k: Array, v: Array, pages: Array, slots: Array) -> Any:
    """k, v [T, K, H] into pages [N * A, block, K / A, 2, H], as rows of which each key is 2 K / A: as long as
    keys and values are an axis of their own, XLA writes many keys with this axis before that of the heads,
    if a chip has four, and so copies all pages, there and back."""
    block_size, together = pages.shape[1:3]
    whole = _pages_of((slots // block_size)[:, None], k.shape[1] // together)  # [T, A, 1]
    slots = (whole[..., 0] * block_size + (slots % block_size)[:, None]).reshape(-1)
    kv, slots = several(jnp.stack([k, v], axis=2).reshape(len(slots), 2 * together, -1), slots)
    rows = pages.reshape(-1, *kv.shape[1:])
    return rows.at[slots].set(kv.astype(rows.dtype)).reshape(pages.shape)


def _decode(q: Array, pages: Any, positions: Array, tables: Array, num: Array, options: Options) -> Array:
    """q [R, K, G, H] -> [R, K, G, H], the first `num` of them; heads that lie apart are as many sequences."""
    (num_rows, num_kv_heads), block_size, mask = q.shape[:2], pages.shape[1], options.mask
    apart = num_kv_heads // pages.shape[2]
    rows = q.reshape(num_rows * apart, pages.shape[2], *q.shape[2:])
    positions = jnp.where(jnp.arange(num_rows) < num, positions, 0).repeat(apart)
    tables = _pages_of(tables, apart).reshape(len(rows), -1)
    width = _width(tables, 1, mask, block_size)
    most = max(TABLE_BYTES // (4 * cdiv(width, LANES) * LANES), 1)
    parts = []
    for i in range(0, len(rows), most):
        part = slice(i, min(i + most, len(rows)))
        runs = decode_runs(positions[part], tables[part], num * apart - i, mask, block_size)
        parts.append(_attend(rows[part], pages, runs, DECODE_ROWS, options))
    return jnp.concatenate(parts).reshape(q.shape)


def _prefill(q: Array, pages: Any, runs: Runs, options: Options) -> Array:
    """q [T, K, G, H] -> [T, K, G, H]; heads that lie apart are as many calls."""
    apart = q.shape[1] // pages.shape[2]
    tables = _pages_of(runs.tables, apart)
    parts = [
        _attend(heads, pages, runs._replace(tables=tables[:, i]), PREFILL_ROWS, options)
        for i, heads in enumerate(jnp.split(q, apart, axis=1))
    ]
    return jnp.concatenate(parts, axis=1)


def num_apart(num_kv_heads: int, head_dim: int) -> int:
    """Into how many pages the KV heads of a block are divided: the fewest that the kernel can read."""

    def fits(together: int) -> bool:
        return together == 1 or (head_dim == LANES and (together in (2, 4) or together % 8 == 0))

    return next(n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and fits(num_kv_heads // n))


def _pages_of(blocks: Array, apart: int) -> Array:
    """[R, B] -> [R, A, B]."""
    return blocks[:, None] * apart + jnp.arange(apart)[:, None]


def _padded(x: Array, head_dim: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, head_dim - x.shape[-1])])


def decode_runs(positions: Array, tables: Array, num: Array, mask: Mask, block_size: int) -> Runs:
    """Every row is a run, padding too: it sees one key of block 0."""
    first = _first_block(positions, mask, block_size)
    return Runs(
        jnp.arange(len(tables) + 1, dtype=jnp.int32),
        positions + 1 - first * block_size,
        _from_block(tables, first, _width(tables, 1, mask, block_size)),
        jnp.clip(num, 1, len(tables)).astype(jnp.int32)[None],  # as below, at least one
    )


def prefill_runs(batch: Batch, mask: Mask, block_size: int) -> Runs:
    """A chunk is a run, or, where it crosses from one attention chunk to the next, several. Runs begin with
    the first row: before them all decodes are one, which sees block 0 and whose outcome nobody wants."""
    positions, rows, num = batch.positions, batch.rows, batch.num_decodes
    num_rows, most = len(positions), batch.max_chunks
    is_chunk = (jnp.arange(num_rows) >= num) & (batch.kv_slots >= block_size)  # block 0 is nobody's
    begins = is_chunk & (rows != jnp.roll(rows, 1))
    if mask.attention_chunk is not None:
        begins |= is_chunk & (positions % mask.attention_chunk == 0)
        most = min(2 * most + num_rows // mask.attention_chunk, num_rows)
    # There is always one, even if all is padding: the kernel reads ahead for it in any case.
    begins = begins.at[0].set(True)
    num_real = jnp.maximum(num + is_chunk.sum(dtype=jnp.int32), 1)
    starts = jnp.nonzero(begins, size=most + 1, fill_value=num_rows)[0].astype(jnp.int32)
    ends = jnp.minimum(jnp.append(starts, num_rows), num_real)
    starts, lasts = jnp.minimum(starts, num_rows - 1), jnp.maximum(ends[1:] - 1, 0)
    first = _first_block(positions[starts], mask, block_size)
    seen = positions[lasts] + 1 - first * block_size
    tables = _from_block(batch.tables[rows[starts]], first, _width(batch.tables, num_rows, mask, block_size))
    decodes = starts < num
    return Runs(
        ends,
        jnp.where(ends[1:] > ends[:-1], jnp.where(decodes, num, seen), 0),
        jnp.where(decodes[:, None], 0, tables),
        begins.sum(dtype=jnp.int32)[None],
    )


def _first_block(positions: Array, mask: Mask, block_size: int) -> Array:
    """The first that runs see which begin at these positions. A chunk begins with a block, so that what
    lies before it is left out exactly; of a window's first block the kernel hides what is not seen."""
    return first_key(positions, mask) // block_size


def _width(tables: Array, num_rows: int, mask: Mask, block_size: int) -> int:
    """The most blocks that a run of so many rows can see."""
    width = tables.shape[1]
    if mask.window is not None:
        width = min(width, (mask.window + num_rows + block_size - 3) // block_size + 1)
    if mask.attention_chunk is not None:
        width = min(width, mask.attention_chunk // block_size)
    return width


def _from_block(tables: Array, first: Array, width: int) -> Array:
    """[R, B] -> [R, width]; what lies behind a table's end is not read."""
    return jnp.take_along_axis(tables, first[:, None] + jnp.arange(width), axis=1, mode="clip")


def _attend(q: Array, pages: Any, runs: Runs, max_rows: int, options: Options) -> Array:
    """q [T, K, G, H] -> [T, K, G, H]."""
    if isinstance(pages, PairedPages):
        return tpu_pages.attend(q, pages, runs, max_rows == DECODE_ROWS, options)
    num_rows, num_kv_heads, group, head_dim = q.shape
    block_size, tables = pages.shape[1], runs.tables
    per_block = cdiv(block_size, MOST_KEYS_OF_A_PAGE)
    page_size = block_size // per_block
    if per_block > 1:
        tables = (tables[:, :, None] * per_block + jnp.arange(per_block)).reshape(len(tables), -1)
    num_keys = _keys_at_once(num_kv_heads, head_dim)
    mask, scale, softcap, sinks = options
    kernel = ragged_paged_attention if sinks is None else partial(attention_with_sinks, sinks=sinks)
    out = kernel(
        q.reshape(num_rows, num_kv_heads * group, head_dim),
        # K and V lie in turns, as the kernel has them.
        pages.reshape(-1, page_size, 2 * num_kv_heads, head_dim),
        runs.lengths,
        tables,
        runs.ends,
        runs.num,
        num_kv_pages_per_block=min(num_keys // page_size, MOST_PAGES, tables.shape[1]),
        num_queries_per_block=min(max_rows, num_rows),
        sm_scale=scale,
        sliding_window=mask.window,
        soft_cap=softcap,
    )
    return out.reshape(q.shape)


def _keys_at_once(num_kv_heads: int, head_dim: int) -> int:
    """Read twice, one stretch ahead of the other; a power of two."""
    keys = KEYS
    while 2 * keys * num_kv_heads * 2 * head_dim * 2 > BUFFER_BYTES:
        keys //= 2
    return keys
