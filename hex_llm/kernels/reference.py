"""paged_attention in plain XLA: the implementation for CPUs, and the oracle for every kernel.

Keys are visited in stretches of fixed positions with a running softmax: decodes together, as far as the
longest of them reaches; tokens of chunks in blocks, over the rows that have tokens in the block. So the work
follows the tokens that are there, not the width of the block tables, and a row's result does not depend on
its neighbours: a stretch that it does not see adds exactly nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.attention import (
    HIDDEN,
    NO_PEAK,
    Batch,
    KVPages,
    Mask,
    Options,
    QuantizedPages,
    dequantized,
    quantized,
)

DECODE_STRETCH = 256  # keys of each sequence scored at a time
PREFILL_STRETCH = 128
QUERY_BLOCK = 128  # tokens of chunks scored at a time

# (weights' running maximum, their running sum, the running sum of weighted values)
Softmax = tuple[Array, Array, Array]


def paged_attention(
    q: Array, k: Array, v: Array, pages: KVPages, batch: Batch, options: Options
) -> tuple[Array, KVPages]:
    """See kernels.attention.PagedAttention."""
    pages = write_kv(k, v, pages, batch.kv_slots)
    q = q * options.scale
    if not batch.max_chunks:
        return _decode(q, batch.positions, pages, batch.tables[batch.rows], options), pages
    num_rows, is_decode = len(batch.tables), jnp.arange(len(q)) < batch.num_decodes
    positions = jnp.where(is_decode, batch.positions, -1)[:num_rows]
    decoded = _decode(q[:num_rows], positions, pages, batch.tables, options)
    is_prefilled = ~is_decode & (batch.kv_slots >= pages.shape[1])
    rows = jnp.where(is_prefilled, batch.rows, -1)
    prefilled = _prefill((q, batch.positions, rows), pages, batch.tables, options)
    decoded = jnp.pad(decoded, [(0, len(q) - num_rows)] + [(0, 0)] * 3)
    return jnp.where(is_decode[:, None, None, None], decoded, prefilled), pages


def write_kv(k: Array, v: Array, pages: KVPages, slots: Array) -> KVPages:
    kv, slots = several(jnp.stack([k, v], axis=2), slots)  # [T, K, 2, H]
    block, place = jnp.divmod(slots, pages.shape[1])
    if not isinstance(pages, QuantizedPages):
        return pages.at[block, place].set(kv.astype(pages.dtype))
    words, scales = quantized(jnp.split(kv, 2, axis=-1), pages.dtype)
    words = pages.words.at[block, place].set(words)
    return replace(pages, words=words, scales=pages.scales.at[block, :, :, place].set(scales.swapaxes(1, 2)))


def several(rows: Array, slots: Array) -> tuple[Array, Array]:
    """To be written. Of a single row XLA makes an update that copies all pages, so it is written twice."""
    return (jnp.repeat(rows, 2, axis=0), jnp.repeat(slots, 2)) if len(slots) == 1 else (rows, slots)


def _decode(q: Array, positions: Array, pages: KVPages, tables: Array, options: Options) -> Array:
    """q [R, K, G, H] with a table for each; a position of -1 sees nothing."""
    tables, length = _stretches(tables, pages, DECODE_STRETCH)

    def add(i: Array, running: Softmax) -> Softmax:
        keys, values = _stretch(pages, tables[:, i])  # [S, K, C, H]
        # On CPUs a product copies its second factor: let that be the few queries, and let it stay so.
        scores = jnp.einsum("skch,skgh->skcg", keys, q, preferred_element_type=jnp.float32)
        scores = jax.lax.optimization_barrier(scores).swapaxes(2, 3)
        visible = _visible(positions[:, None], i * length + jnp.arange(length), options.mask)
        seen = jnp.where(visible[:, None, :, None], values, 0)  # 0 times what a former owner left may be NaN
        weighted = lambda weights: jnp.einsum("skgc,skch->skgh", weights, seen)  # noqa: E731
        return _accumulate(running, _capped(scores, options.softcap), visible[:, None, None], weighted)

    return _finish(jax.lax.fori_loop(0, jnp.max(positions) // length + 1, add, _start(q, options.sinks)), q)


def _prefill(tokens: tuple[Array, Array, Array], pages: KVPages, tables: Array, options: Options) -> Array:
    """tokens: q [T, K, G, H], positions [T], their rows [T] in the tables; -1: none, and it becomes 0."""
    num_rows = len(tables)
    tables, length = _stretches(tables, pages, PREFILL_STRETCH)
    sinks = None if options.sinks is None else options.sinks[:, :, None]

    def attend(tokens: tuple[Array, Array, Array]) -> Array:
        q, positions, rows = tokens
        q = q.transpose(1, 2, 0, 3)  # [K, G, T, H]
        owned = rows == jnp.arange(num_rows)[:, None]  # [R, T]
        first_row = jnp.min(jnp.where(rows < 0, num_rows, rows))
        num_stretches = jnp.max(jnp.where(owned, positions // length + 1, 0), axis=1)

        def add(row: Array, i: Array, running: Softmax) -> Softmax:
            keys, values = _stretch(pages, tables[row, i])  # [K, C, H]
            scores = jnp.einsum("kgth,kch->kgtc", q, keys, preferred_element_type=jnp.float32)
            visible = _visible(positions[:, None], i * length + jnp.arange(length), options.mask)
            visible &= owned[row][:, None]
            seen = jnp.where(visible.any(axis=0)[:, None], values, 0)
            weighted = lambda weights: jnp.einsum("kgtc,kch->kgth", weights, seen)  # noqa: E731
            return _accumulate(running, _capped(scores, options.softcap), visible, weighted)

        def attend_to(row: Array, running: Softmax) -> Softmax:
            return jax.lax.fori_loop(0, num_stretches[row], partial(add, row), running)

        summed = jax.lax.fori_loop(first_row, jnp.max(rows) + 1, attend_to, _start(q, sinks))
        return _finish(summed, q).transpose(2, 0, 1, 3)

    q = tokens[0]
    if len(q) <= QUERY_BLOCK or len(q) % QUERY_BLOCK:
        return attend(tokens)
    blocks = jax.tree.map(lambda x: x.reshape(-1, QUERY_BLOCK, *x.shape[1:]), tokens)
    return jax.lax.map(attend, blocks).reshape(q.shape)


def _stretches(tables: Array, pages: KVPages, num_keys: int) -> tuple[Array, int]:
    """tables [S, B] cut into stretches [S, stretches, blocks of one], and the length of one in keys."""
    num_seqs, num_blocks = tables.shape
    per_stretch = min(max(num_keys // pages.shape[1], 1), num_blocks)
    tables = jnp.pad(tables, ((0, 0), (0, -num_blocks % per_stretch)))
    return tables.reshape(num_seqs, -1, per_stretch), per_stretch * pages.shape[1]


def _stretch(pages: KVPages, blocks: Array) -> tuple[Array, Array]:
    """Keys and values [..., K, C, H] of the given blocks [..., B], gathered straight into that order."""
    heads = jnp.arange(pages.shape[2])[:, None]

    def gather(i: int) -> Array:
        held = pages.words if isinstance(pages, QuantizedPages) else pages
        out = held.at[blocks[..., None, :], :, heads, i].get(mode="clip")  # [..., K, B, block, H]
        if isinstance(pages, QuantizedPages):
            scales = pages.scales.at[blocks[..., None, :], i, heads].get(mode="clip")
            out = dequantized(out, scales, pages.dtype)
        return out.reshape(*out.shape[:-3], -1, out.shape[-1])

    # The barrier keeps the order: for some products XLA's CPU backend would rather copy to [H, C], which
    # costs more than the product.
    keys, values = jax.lax.optimization_barrier((gather(0), gather(1)))
    return keys, values


def _visible(query: Array, key: Array, mask: Mask) -> Array:
    seen = key <= query
    if mask.window is not None:
        seen &= query - key < mask.window
    if mask.attention_chunk is not None:
        seen &= query // mask.attention_chunk == key // mask.attention_chunk
    return seen


def _capped(scores: Array, softcap: float | None) -> Array:
    return scores if softcap is None else jnp.tanh(scores / softcap) * softcap


def _start(q: Array, sinks: Array | None) -> Softmax:
    shape = q.shape[:-1]
    if sinks is None:
        return jnp.full(shape, NO_PEAK), jnp.zeros(shape), jnp.zeros(q.shape)
    return jnp.broadcast_to(sinks.astype(jnp.float32), shape), jnp.ones(shape), jnp.zeros(q.shape)


def _accumulate(
    running: Softmax, scores: Array, visible: Array, weighted: Callable[[Array], Array]
) -> Softmax:
    peak, total, values = running
    scores = jnp.where(visible, scores, HIDDEN)
    new_peak = jnp.maximum(peak, scores.max(axis=-1))
    weights = jnp.exp(scores - new_peak[..., None])  # exactly 0 where hidden
    shrink = jnp.exp(peak - new_peak)
    return new_peak, total * shrink + weights.sum(axis=-1), values * shrink[..., None] + weighted(weights)


def _finish(running: Softmax, q: Array) -> Array:
    _, total, values = running
    # Padding may see nothing. It must still be a number: what it writes to block 0 is read with weight 0.
    return (values / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)
