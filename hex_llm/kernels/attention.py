"""paged_attention: one signature for all platforms, chosen once.

Letters of shapes, here and in the decoder: T tokens, R rows (sequences), B blocks of a row, C = B * block
size, K KV heads, G query heads per KV head, H head size, D model width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

HIDDEN = -1e30  # a score that is not seen; finite, so that rows without any key yet stay numbers
NO_PEAK = -1e20  # the maximum of no scores: far below any that is seen, far above HIDDEN


class Mask(NamedTuple):
    """What a query sees besides being causal; None: everything before it."""

    window: int | None = None  # the last `window` tokens, itself included
    attention_chunk: int | None = None  # its own stretch of `attention_chunk` positions


class Options(NamedTuple):
    """How a layer attends."""

    mask: Mask
    scale: float  # of the scores
    softcap: float | None
    sinks: Array | None = None  # [K, G]: a score beside those of the keys, with a value of 0


def first_key(position: Array, mask: Mask) -> Array:
    """The first key that a query sees."""
    first = jnp.zeros_like(position)
    if mask.window is not None:
        first = jnp.maximum(position - mask.window + 1, 0)
    if mask.attention_chunk is not None:
        first = jnp.maximum(first, lax.div(position, mask.attention_chunk) * mask.attention_chunk)
    return first


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Where the T tokens of a step stand: decodes first, each the only one of its row; then chunks of
    prompts, the tokens of a row together and in order; then padding. How many of each is data, not shape.
    Block 0 is never a sequence's: padding lands there.
    """

    positions: Array  # [T] position of each token in its sequence
    rows: Array  # [T] row of each token in `tables`; decodes have the first, in order, then chunks
    kv_slots: Array  # [T] where its K and V go: block * block size + offset
    tables: Array  # [R, B] block ids, in order of position
    num_decodes: Array  # []
    # Chunks, at most; 0: there may be some, but they are so short that tokens can attend one by one.
    max_chunks: int = field(metadata={"static": True})


class PagedAttention(Protocol):
    """Writes k and v into the pages, then lets every token attend to its sequence through them."""

    def __call__(
        self,
        q: Array,  # [T, K, G, H]
        k: Array,  # [T, K, H]
        v: Array,  # [T, K, H]
        pages: Array,  # [N, block, K, 2, H]
        batch: Batch,
        options: Options,
    ) -> tuple[Array, Array]:
        """Attention out [T, K, G, H], and the pages."""
        ...
