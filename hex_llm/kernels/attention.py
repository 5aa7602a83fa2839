"""paged_attention: one signature for all platforms, chosen once.

Letters of shapes, here and in the decoder: T tokens, R rows (sequences), B blocks of a row, C = B * block
size, K KV heads, G query heads per KV head, H head size, D model width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from hex_llm.kernels.adapters import Pending

HIDDEN = -1e30  # a score that is not seen; finite, so that rows without any key yet stay numbers
NO_PEAK = -1e20  # the maximum of no scores: far below any that is seen, far above HIDDEN


# The types of 8 bits that pages can have, with the largest number that each holds.
LARGEST: dict[Any, float] = {np.dtype(np.int8): 127.0, np.dtype(jnp.float8_e4m3fn): 448.0}
BYTE = 8  # bits
SMALLEST = 1.2e-38  # of scales: one below it has no inverse, and all its numbers are 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedPages:
    """Pages with 8 bits for each number. The scale of a key or a value is that of its largest number, found
    when it is written. A head's first half lies in the low bytes of its words and the second in the high
    ones, so that kernels get numbers that follow each other from one shift of words that do."""

    words: Array  # uint16 [N, block, K, 2, H / 2]
    scales: Array  # float32 [N, 2, K, block]
    dtype: np.dtype[Any] = field(metadata={"static": True})  # of the numbers

    @property
    def shape(self) -> tuple[int, ...]:
        """As of plain pages."""
        return (*self.words.shape[:-1], 2 * self.words.shape[-1])


KVPages = Array | QuantizedPages  # plain ones: [N, block, K, 2, H]


def empty_pages(shape: tuple[int, ...], dtype: np.dtype[Any]) -> KVPages:
    if dtype not in LARGEST:
        return jnp.zeros(shape, dtype)
    num_blocks, block_size, num_kv_heads, _, head_dim = shape
    words = jnp.zeros((*shape[:-1], head_dim // 2), jnp.uint16)
    return QuantizedPages(words, jnp.zeros((num_blocks, 2, num_kv_heads, block_size)), dtype)


def quantized(halves: Iterable[Array], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Words [..., H / 2] and scales [...] of keys or values, given as their halves."""
    (low, high), scales = coded(halves, dtype)
    return (low | high << BYTE).astype(jnp.uint16), scales


def coded(parts: Iterable[Array], dtype: np.dtype[Any]) -> tuple[list[Array], Array]:
    """The bytes, as int32, and scales [...] of keys or values, given in parts. One with a number that is
    not finite gets NaN for its scale, and so is told."""
    parts = [part.astype(jnp.float32) for part in parts]
    sizes = [jnp.where(jnp.abs(part) < jnp.inf, jnp.abs(part), jnp.inf) for part in parts]
    largest = reduce(jnp.maximum, (jnp.max(size, axis=-1) for size in sizes))
    scales = jnp.where(largest < jnp.inf, largest * (1 / LARGEST[dtype]), jnp.nan)
    factor = jnp.where(scales > SMALLEST, 1 / scales, 0)[..., None]

    def codes(part: Array) -> Array:
        scaled = jnp.where(jnp.abs(part) < jnp.inf, part * factor, 0)
        if dtype == jnp.int8:
            return jnp.floor(scaled + 0.5).astype(jnp.int32) & 0xFF
        return lax.bitcast_convert_type(scaled.astype(dtype), jnp.uint8).astype(jnp.int32)

    return [codes(part) for part in parts], scales


def dequantized(words: Array, scales: Array, dtype: np.dtype[Any]) -> Array:
    """float32 [..., H]."""
    codes = jnp.concatenate([words & 0xFF, words >> BYTE], axis=-1).astype(jnp.uint8)
    return lax.bitcast_convert_type(codes, dtype).astype(jnp.float32) * scales[..., None]


def as_held(x: Array, dtype: DTypeLike) -> Array:
    """Keys or values [..., H] as they will be read from pages of this type."""
    dtype = np.dtype(dtype)
    if dtype not in LARGEST:
        return x.astype(dtype).astype(x.dtype)
    return dequantized(*quantized(jnp.split(x, 2, axis=-1), dtype), dtype).astype(x.dtype)


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


class Projected(NamedTuple):
    """What a layer's projection gives. Queries and keys are normed, if there are weights for it, each head by
    itself, and then turned by angles, if there are any, the first half of a head against the second. Keys and
    values are as decoder.contained has them."""

    qkv: Array  # [T, K, G + 2, H]; or of few tokens in parts [splits, T, K, G + 2, H], float32, to be summed
    norms: tuple[Array, Array] | None = None  # of queries and of keys, [H] each
    table: tuple[Array, Array] | None = None  # cos and sin [T, H / 2]
    eps: float = 0.0
    offset: float = 0.0  # is added to the weights of norms
    pending: Pending | None = None  # is added to qkv first
    dtype: Any = None  # of parts' sum; None: they are whole

    @property
    def whole(self) -> jax.ShapeDtypeStruct:
        """What qkv is, or its parts make."""
        return jax.ShapeDtypeStruct(self.qkv.shape[-4:], self.dtype or self.qkv.dtype)

    @property
    def queries(self) -> jax.ShapeDtypeStruct:
        """[T, K, G, H]"""
        *tokens, num_heads, head_dim = self.whole.shape
        return jax.ShapeDtypeStruct((*tokens, num_heads - 2, head_dim), self.whole.dtype)


class PagedAttention(Protocol):
    """Writes k and v into the pages, then lets every token attend to its sequence through them."""

    def __call__(
        self,
        q: Array,  # [T, K, G, H]
        k: Array,  # [T, K, H]
        v: Array,  # [T, K, H]
        pages: KVPages,
        batch: Batch,
        options: Options,
    ) -> tuple[Array, KVPages]:
        """Attention out [T, K, G, H], and the pages."""
        ...


class ProjectedAttention(Protocol):
    """The same of heads that are yet to be made."""

    def __call__(
        self, heads: Projected, pages: KVPages, batch: Batch, options: Options
    ) -> tuple[Array, KVPages]: ...


class AttentionKernels(NamedTuple):
    """What a platform has for it."""

    attend: PagedAttention
    attend_projected: ProjectedAttention | None = None  # None: it has none
