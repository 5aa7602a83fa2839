"""paged_attention in plain XLA: the implementation for CPUs, and the oracle for every kernel.

Keys are visited in stretches of fixed positions with a running softmax, as far as the longest sequence
reaches. So the work follows the tokens that are there, not the width of the block tables, and a row's
result does not depend on its neighbours: a stretch that it does not see adds exactly nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from hex_llm.kernels.attention import Batch, Mask

STRETCH = 256  # keys of each sequence scored at a time
QUERY_BLOCK = 128  # prefill rows scored at a time
HIDDEN = -1e30  # a score that is not seen; finite, so that rows without any key yet stay numbers

# (weights' running maximum, their running sum, the running sum of weighted values)
Softmax = tuple[jax.Array, jax.Array, jax.Array]


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    batch: Batch,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """See kernels.attention.PagedAttention."""
    pages = write_kv(k, v, pages, batch.slots)
    q = q * scale
    num_decode = len(batch.decode_tables)
    positions, sequences = batch.positions, batch.sequences - num_decode
    parts = []
    if num_decode:
        parts.append(
            _decode(q[:num_decode], positions[:num_decode], pages, batch.decode_tables, mask, softcap)
        )
    if len(batch.prefill_tables):
        rows = (q[num_decode:], positions[num_decode:], sequences[num_decode:])
        parts.append(_prefill(rows, pages, batch.prefill_tables, mask, softcap))
    return jnp.concatenate(parts), pages


def write_kv(k: jax.Array, v: jax.Array, pages: jax.Array, slots: jax.Array) -> jax.Array:
    kv = jnp.stack([k, v], axis=2).astype(pages.dtype)  # [T, K, 2, H]
    if len(slots) == 1:  # of a single row XLA makes an update that copies all pages, so write it twice
        kv, slots = jnp.tile(kv, (2, 1, 1, 1)), jnp.tile(slots, 2)
    block_size = pages.shape[1]
    return pages.at[slots // block_size, slots % block_size].set(kv)


def _decode(
    q: jax.Array,
    positions: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    mask: Mask,
    softcap: float | None,
) -> jax.Array:
    """q [S, K, G, H], one row for each sequence."""
    stretch, length = _stretches(pages, tables)

    def add(i: jax.Array, running: Softmax) -> Softmax:
        keys, values = stretch(i)  # [S, C, K, H]
        scores = jnp.einsum("skgh,sckh->skgc", q, keys, preferred_element_type=jnp.float32)
        visible = _visible(positions[:, None], i * length + jnp.arange(length), mask)
        weighted = lambda weights: jnp.einsum("skgc,sckh->skgh", weights, values)  # noqa: E731
        return _accumulate(running, _capped(scores, softcap), visible[:, None, None], weighted)

    return _finish(jax.lax.fori_loop(0, jnp.max(positions) // length + 1, add, _start(q)), q)


def _prefill(
    rows: tuple[jax.Array, jax.Array, jax.Array],
    pages: jax.Array,
    tables: jax.Array,
    mask: Mask,
    softcap: float | None,
) -> jax.Array:
    """rows: q [T, K, G, H], positions [T], sequences [T]; each is scored on all and sees its own."""
    stretch, length = _stretches(pages, tables)
    owners = jnp.repeat(jnp.arange(len(tables)), length)

    def attend(rows: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, positions, sequences = rows
        q = q.transpose(1, 2, 0, 3)  # [K, G, T, H]

        def add(i: jax.Array, running: Softmax) -> Softmax:
            keys, values = (x.reshape(-1, *x.shape[2:]) for x in stretch(i))  # [S*C, K, H]
            scores = jnp.einsum("kgth,ckh->kgtc", q, keys, preferred_element_type=jnp.float32)
            places = jnp.tile(i * length + jnp.arange(length), len(tables))
            visible = _visible(positions[:, None], places, mask) & (sequences[:, None] == owners)
            weighted = lambda weights: jnp.einsum("kgtc,ckh->kgth", weights, values)  # noqa: E731
            return _accumulate(running, _capped(scores, softcap), visible, weighted)

        running = jax.lax.fori_loop(0, jnp.max(positions) // length + 1, add, _start(q))
        return _finish(running, q).transpose(2, 0, 1, 3)

    q = rows[0]
    if len(q) <= QUERY_BLOCK or len(q) % QUERY_BLOCK:
        return attend(rows)
    blocks = jax.tree.map(lambda x: x.reshape(-1, QUERY_BLOCK, *x.shape[1:]), rows)
    return jax.lax.map(attend, blocks).reshape(q.shape)


def _stretches(
    pages: jax.Array, tables: jax.Array
) -> tuple[Callable[[jax.Array], tuple[jax.Array, jax.Array]], int]:
    """A function that gives the i-th stretch of every sequence, K and V [S, C, K, H], and its length C."""
    num_seqs, num_blocks = tables.shape
    per_stretch = min(max(STRETCH // pages.shape[1], 1), num_blocks)
    tables = jnp.pad(tables, ((0, 0), (0, -num_blocks % per_stretch)))
    length = per_stretch * pages.shape[1]

    def stretch(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        blocks = jax.lax.dynamic_slice_in_dim(tables, i * per_stretch, per_stretch, axis=1)
        kv = pages[blocks].reshape(num_seqs, length, *pages.shape[2:])
        return kv[..., 0, :], kv[..., 1, :]

    return stretch, length


def _visible(query: jax.Array, key: jax.Array, mask: Mask) -> jax.Array:
    seen = key <= query
    if mask.window is not None:
        seen &= query - key < mask.window
    if mask.chunk is not None:
        seen &= query // mask.chunk == key // mask.chunk
    return seen


def _capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    return scores if softcap is None else jnp.tanh(scores / softcap) * softcap


def _start(q: jax.Array) -> Softmax:
    shape = q.shape[:-1]
    return jnp.full(shape, HIDDEN), jnp.zeros(shape), jnp.zeros(q.shape)


def _accumulate(
    running: Softmax, scores: jax.Array, visible: jax.Array, weighted: Callable[[jax.Array], jax.Array]
) -> Softmax:
    peak, total, values = running
    scores = jnp.where(visible, scores, HIDDEN)
    new_peak = jnp.maximum(peak, scores.max(axis=-1))
    weights = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0.0)
    shrink = jnp.exp(peak - new_peak)
    return new_peak, total * shrink + weights.sum(axis=-1), values * shrink[..., None] + weighted(weights)


def _finish(running: Softmax, q: jax.Array) -> jax.Array:
    _, total, values = running
    # Padding may see nothing. It must still be a number: what it writes to block 0 is read with weight 0.
    return (values / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)
