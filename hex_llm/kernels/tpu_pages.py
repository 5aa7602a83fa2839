"""Pages of 8 bits on TPUs: how they lie, how they are written, and who attends through them.

A word of 16 bits is a number of a key and the same one of its value, since a TPU's rows have 128 lanes, as
heads have: words of a key's two halves would leave half of them empty. So pages are whole tiles, however few
heads there are. A page has no more keys than a row has lanes for their scales and those of their values:
larger blocks are several pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.attention import BYTE, NO_PEAK, Batch, Options, coded
from hex_llm.kernels.reference import several
from hex_llm.kernels.tpu_pages_kernel import BUFFERS, Sizes, State, attend_block
from hex_llm.kernels.tpu_sinks import LANES

HALF = LANES // 2  # the most keys of a page
SUBLANES, PACKED = 8, 16  # rows of a register of 32 bits, and of 16
KEYS, BUFFER_BYTES = 512, 8 << 20  # that are read together, and what is read ahead
DECODES = 8  # of a block of queries
MOST_QUERIES, QUERIES_OF_HEADS = 256, 2048  # that attend together: of a KV head, and of all of them
VECTOR_MEMORY = 48 << 20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PairedPages:
    """As attention.QuantizedPages, with the same scales. A block is B pages of U keys, and a head J rows of
    128. Of a row of scales those of keys begin with the first lane, those of values with the 64th."""

    words: Array  # uint16 [N, B * J, K, U, 128]: a key's number in the low byte, its value's in the high one
    scales: Array  # float32 [N and up to 7 more, B, K, 128]
    dtype: np.dtype[Any] = field(metadata={"static": True})  # of the numbers

    @property
    def shape(self) -> tuple[int, ...]:
        """As of plain pages."""
        num_blocks, rows, num_kv_heads, page_size, _ = self.words.shape
        per_block = self.scales.shape[1]
        return num_blocks, per_block * page_size, num_kv_heads, 2, rows // per_block * LANES


def empty_pages(shape: tuple[int, ...], dtype: np.dtype[Any]) -> PairedPages:
    """Of the shape of plain ones, whose heads are whole lanes."""
    num_blocks, block_size, num_kv_heads, _, head_dim = shape
    page_size = min(block_size, HALF)
    per_block = block_size // page_size
    words = (num_blocks, per_block * head_dim // LANES, num_kv_heads, page_size, LANES)
    # Of whole tiles, or XLA copies all scales where some are written.
    scales = (pl.cdiv(num_blocks, SUBLANES) * SUBLANES, per_block, num_kv_heads, LANES)
    return PairedPages(jnp.zeros(words, jnp.uint16), jnp.zeros(scales), dtype)


def can_attend(num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Whether the kernel is for such heads of one device, filled up to whole lanes, and such blocks."""
    page_size = min(block_size, HALF)
    fits = page_size in (8, 16, 32, 64) and block_size % page_size == 0
    return fits and _keys_at_once(num_kv_heads, head_dim) >= LANES


def write(k: Array, v: Array, pages: PairedPages, batch: Batch) -> PairedPages:
    """k, v [T, K, H]"""
    (num_tokens, num_kv_heads, head_dim), page_size = k.shape, pages.words.shape[3]
    per_head, (page, place) = head_dim // LANES, jnp.divmod(batch.kv_slots, page_size)
    (keys,), key_scales = coded([k], pages.dtype)
    (values,), value_scales = coded([v], pages.dtype)
    words = (keys | values << BYTE).astype(jnp.uint16).reshape(num_tokens, num_kv_heads, per_head, LANES)
    # As rows of all pages, or XLA brings them into another order first.
    parts = page[:, None] * per_head * num_kv_heads + jnp.arange(per_head * num_kv_heads)
    places = (parts * page_size + place[:, None]).reshape(-1)
    rows, places = several(words.swapaxes(1, 2).reshape(-1, LANES), places)
    written = pages.words.reshape(-1, LANES).at[places].set(rows).reshape(pages.words.shape)
    scales = jnp.stack([key_scales, value_scales], axis=-1)
    most = _most_pages(batch, page_size)
    return replace(pages, words=written, scales=_with_scales(pages.scales, scales, page, place, most))


def _with_scales(held: Array, scales: Array, page: Array, place: Array, most: int) -> Array:
    """`scales` [T, K, 2] in their lanes of `held`. To write a lane takes as long as to write a row: so rows
    are put together, of the pages that get some, at most so many. Tokens of a page follow each other."""
    num_kv_heads = scales.shape[1]
    rows = held.reshape(-1, LANES)
    begins = (page != jnp.roll(page, 1)).at[0].set(True)
    starts = jnp.nonzero(begins, size=most, fill_value=len(page))[0]
    touched = page.at[starts].get(mode="fill", fill_value=len(rows))
    ours = (touched[:, None] == page).astype(jnp.float32)  # [pages, T]
    lanes = jnp.arange(LANES)
    is_own = (place[:, None] == lanes % HALF)[:, None]  # [T, 1, L]
    told = jnp.where(scales < jnp.inf, scales, -1)  # what is no number must not reach others by 0 times it
    spread = jnp.where(is_own, told[:, :, lanes // HALF], 0)
    # Of each sum one term is not 0, and in so many passes a float32 stays what it is.
    put = partial(jnp.einsum, "pt,tkl->pkl", ours, precision=lax.Precision.HIGHEST)
    new, is_new = put(spread), put(is_own.astype(jnp.float32)) > 0
    new = jnp.where(is_new, jnp.where(new < 0, jnp.nan, new), 0).reshape(-1, LANES)
    is_new = jnp.repeat(is_new[:, 0], num_kv_heads, axis=0)
    places = (touched[:, None] * num_kv_heads + jnp.arange(num_kv_heads)).reshape(-1)
    new = jnp.where(is_new, new, rows.at[places].get(mode="clip"))
    return rows.at[places].set(new, mode="drop").reshape(held.shape)


def _most_pages(batch: Batch, page_size: int) -> int:
    """That a step's tokens lie in: a chunk in two besides whole ones, a decode in one, and so padding."""
    num_tokens = len(batch.positions)
    if not batch.max_chunks:
        return num_tokens
    return min(num_tokens // page_size + len(batch.tables) + batch.max_chunks + 1, num_tokens)


def attend(q: Array, pages: PairedPages, runs: tuple[Array, ...], is_decode: bool, options: Options) -> Array:
    """q [T, K, G, H] -> [T, K, G, H] of the rows in `runs` (tpu.py), each a run of its own if `is_decode`."""
    num_tokens, num_kv_heads, group, head_dim = q.shape
    ends, lengths, tables, num = runs
    tokens = 1 if is_decode else _tokens_together(num_kv_heads, group)
    # Of decodes several are in a block, and each has whole registers of it, as float32.
    queries = pl.cdiv(group, SUBLANES) * SUBLANES if is_decode else group
    fill, sinks = [(0, 0), (0, queries - group)], options.sinks
    rows = jnp.pad(q.swapaxes(0, 1), [(0, 0), *fill, (0, 0)]).reshape(num_kv_heads, -1, head_dim)
    peaks = jnp.full((num_kv_heads, group), NO_PEAK) if sinks is None else sinks.astype(jnp.float32)
    peaks = jnp.tile(jnp.pad(peaks, fill), tokens)[..., None]
    arrays = (
        jnp.broadcast_to(peaks, (*peaks.shape[:2], LANES)),
        rows.astype(jnp.float32 if is_decode else q.dtype),
        *_as_read(pages),
    )
    options, has_sinks = options._replace(sinks=None), sinks is not None
    per_block, width = pages.scales.shape[1], tables.shape[1]
    sizes = Sizes(tokens, queries, width, per_block, options, has_sinks, pages.dtype)
    keys = max(pl.next_power_of_2(width * pages.shape[1]), LANES)
    keys = min(keys, _keys_at_once(num_kv_heads, head_dim))
    kernel = _kernel(min(DECODES, num_tokens) if is_decode else 1, keys, sizes, arrays)
    # It looks for the pages of a whole stretch before it knows how many there are.
    out = kernel(ends, lengths, jnp.pad(tables.reshape(-1), (0, KEYS)), num, *arrays)
    out = out.reshape(num_kv_heads, num_tokens, queries, head_dim)[:, :, :group]
    return out.swapaxes(0, 1).astype(q.dtype)


def _as_read(pages: PairedPages) -> list[Array]:
    """Words [pages, J, K, U, 128] and scales [pages, K, 128]; where heads fill no tile their scales lie one
    by one, or XLA would copy them all."""
    num_kv_heads, *row = pages.words.shape[2:]
    are_tiles = num_kv_heads in (1, 2, 4) or num_kv_heads % SUBLANES == 0
    words = pages.words.reshape(-1, pages.shape[-1] // LANES, num_kv_heads, *row)
    scales = pages.scales.reshape(-1, num_kv_heads, *() if are_tiles else (1,), LANES)
    # Or XLA brings all of them into vector memory where there is room.
    return [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (words, scales)]


def _keys_at_once(num_kv_heads: int, head_dim: int) -> int:
    """A power of two."""
    keys = KEYS
    while BUFFERS * keys * num_kv_heads * 2 * head_dim > BUFFER_BYTES:
        keys //= 2
    return keys


def _tokens_together(num_kv_heads: int, group: int) -> int:
    queries = min(MOST_QUERIES, QUERIES_OF_HEADS // num_kv_heads)
    return max(queries // group // PACKED, 1) * PACKED


def _kernel(tiles: int, keys: int, sizes: Sizes, arrays: tuple[Array, ...]) -> Any:
    """The kernel for blocks of so many tiles."""
    peaks, q, words, scales = arrays
    num_kv_heads, num_rows, head_dim = q.shape
    rows = peaks.shape[1]
    block = pl.BlockSpec((num_kv_heads, tiles * rows, head_dim), lambda i, *_: (0, i, 0))
    outside = pl.BlockSpec(memory_space=pl.ANY)
    read_ahead = BUFFERS, keys // words.shape[3]
    return pl.pallas_call(
        partial(attend_block, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(num_rows, tiles * rows),),
            in_specs=[pl.BlockSpec(peaks.shape, lambda *_: (0, 0, 0)), block, outside, outside],
            out_specs=block,
            scratch_shapes=[
                pltpu.VMEM((*read_ahead, *words.shape[1:]), words.dtype),
                pltpu.VMEM((*read_ahead, *scales.shape[1:]), scales.dtype),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
                pltpu.SMEM((len(State),), jnp.int32),
                pltpu.VMEM(peaks.shape, jnp.float32),
                pltpu.VMEM(peaks.shape, jnp.float32),
                pltpu.VMEM((num_kv_heads, rows, head_dim), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(  # checks would take as long as the copies; tables are our own
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VECTOR_MEMORY, disable_bounds_checks=True
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="paged_attention_of_8_bits",
    )
