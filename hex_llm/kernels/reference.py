"""paged_attention in plain XLA: the implementation for CPUs, and the oracle for every kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hex_llm.kernels.attention import Batch, Mask

QUERY_BLOCK = 128  # prefill rows scored at a time: bounds the score matrix to [K, G, 128, C]


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
    num_decode = len(batch.decode_tables)
    parts = []
    if num_decode:
        parts.append(
            _decode(
                q[:num_decode],
                pages,
                batch.decode_tables,
                batch.positions[:num_decode],
                mask,
                scale,
                softcap,
            )
        )
    if len(batch.prefill_tables):
        rows = (
            q[num_decode:],
            batch.positions[num_decode:],
            batch.sequences[num_decode:] - num_decode,
        )
        parts.append(_prefill(*rows, pages, batch.prefill_tables, mask, scale, softcap))
    return jnp.concatenate(parts), pages


def write_kv(k: jax.Array, v: jax.Array, pages: jax.Array, slots: jax.Array) -> jax.Array:
    kv = jnp.stack([k, v], axis=2).astype(pages.dtype)  # [T, K, 2, H]
    if len(slots) == 1:  # of a single row XLA makes an update that copies all pages, so write it twice
        kv, slots = jnp.tile(kv, (2, 1, 1, 1)), jnp.tile(slots, 2)
    block_size = pages.shape[1]
    return pages.at[slots // block_size, slots % block_size].set(kv)


def _gather(pages: jax.Array, tables: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K and V of whole sequences: [S, C, K, H] each."""
    kv = pages[tables]  # [S, B, block, K, 2, H]
    kv = kv.reshape(kv.shape[0], -1, *kv.shape[3:])
    return kv[..., 0, :], kv[..., 1, :]


def _visible(query: jax.Array, key: jax.Array, mask: Mask) -> jax.Array:
    seen = key <= query
    if mask.window is not None:
        seen &= query - key < mask.window
    if mask.chunk is not None:
        seen &= query // mask.chunk == key // mask.chunk
    return seen


def _weights(scores: jax.Array, visible: jax.Array, softcap: float | None) -> jax.Array:
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    return jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)


def _decode(
    q: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    positions: jax.Array,
    mask: Mask,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    keys, values = _gather(pages, tables)
    scores = jnp.einsum("skgh,sckh->skgc", q * scale, keys, preferred_element_type=jnp.float32)
    visible = _visible(positions[:, None], jnp.arange(keys.shape[1]), mask)  # [S, C]
    weights = _weights(scores, visible[:, None, None], softcap)
    return jnp.einsum("skgc,sckh->skgh", weights.astype(values.dtype), values).astype(q.dtype)


def _prefill(
    q: jax.Array,
    positions: jax.Array,
    sequences: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    mask: Mask,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """Every token is scored against all sequences of the prefill and sees only its own."""
    keys, values = _gather(pages, tables)
    num_sequences, context = keys.shape[:2]
    keys = keys.reshape(-1, *keys.shape[2:]).transpose(1, 0, 2)  # [K, S*C, H]
    values = values.reshape(-1, *values.shape[2:]).transpose(1, 0, 2)
    key_sequence = jnp.repeat(jnp.arange(num_sequences), context)
    key_position = jnp.tile(jnp.arange(context), num_sequences)

    def attend(rows: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, positions, sequences = rows
        scores = jnp.einsum("tkgh,kch->kgtc", q * scale, keys, preferred_element_type=jnp.float32)
        visible = _visible(positions[:, None], key_position, mask) & (sequences[:, None] == key_sequence)
        weights = _weights(scores, visible, softcap)
        return jnp.einsum("kgtc,kch->tkgh", weights.astype(values.dtype), values).astype(q.dtype)

    if len(q) <= QUERY_BLOCK or len(q) % QUERY_BLOCK:
        return attend((q, positions, sequences))
    blocks = jax.tree.map(lambda x: x.reshape(-1, QUERY_BLOCK, *x.shape[1:]), (q, positions, sequences))
    return jax.lax.map(attend, blocks).reshape(q.shape)
