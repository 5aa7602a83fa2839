"""Heads on NVIDIA GPUs, by a Pallas-Triton kernel: queries and keys are normed and turned, keys and values
are written into pages. A program takes a token's heads that share a key. XLA makes up to eight kernels of
this, and where tokens are few, starting them is most of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels.attention import KVPages, Projected, QuantizedPages, quantized
from hex_llm.kernels.gpu_adapters import row_adder
from hex_llm.kernels.gpu_launch import index_grid, launched, next_power

Halves = list[Array]  # of heads: the first and the second


def write_kv(k: Array, v: Array, pages: KVPages, slots: Array) -> tuple[KVPages, Array]:
    """The pages with k and v [T, K, H] at the slots, in place where the pages are donated; and semaphores
    [T, K], all 0: at their block's first row splits count who has ended, and the last one merges."""
    # Together: what makes k and v, usually a rotation, then writes both in one go.
    return place_heads(Projected(jnp.stack([k, v], axis=2)), pages, slots)[2:]


def place_heads(
    heads: Projected, pages: KVPages, slots: Array, keep: bool = False
) -> tuple[Any, Any, KVPages, Array]:
    """Queries [T, K, G, H], if there are any; keys and values [T, K, 2, H], if they are kept; pages and
    semaphores, as those of `write_kv`."""
    num_rows, num_kv_heads, num_heads, head_dim = heads.qkv.shape
    if isinstance(pages, QuantizedPages):
        held, *scales = pages.words, pages.scales
        write = partial(_write_quantized, block_size=pages.shape[1], dtype=pages.dtype)
    else:
        held, scales, write = pages, [], partial(_write_plain)
    arrays = [held.reshape(-1, math.prod(held.shape[2:])), *scales]

    def made(num: int) -> Any:
        return jax.ShapeDtypeStruct((num_rows, num_kv_heads, num, head_dim), heads.qkv.dtype) if num else None

    semaphores = jax.ShapeDtypeStruct((num_rows, num_kv_heads), jnp.int32)
    out = [arrays, semaphores, made(num_heads - 2), made(2 * keep)]
    pending: Any = None
    starts: tuple[int, ...] = ()
    if heads.pending is not None:
        ranks, up, (_, starts), which = heads.pending
        pending = ranks, up.reshape(len(up), -1, up.shape[-1]), which
    given = slots, heads.qkv, heads.norms, heads.table, pending
    first = len(jax.tree.leaves(given))
    aliases = {first + i: i for i in range(len(arrays))}
    kernel = partial(_heads_kernel, eps=heads.eps, offset=heads.offset, write=write)
    kernel = partial(kernel, starts=starts)
    call = launched(kernel, (num_rows, num_kv_heads), out, warps=4, stages=1, aliases=aliases)
    (new, *new_scales), new_semaphores, q, kv = call(*given, arrays)
    new = new.reshape(held.shape)
    if isinstance(pages, QuantizedPages):
        new = replace(pages, words=new, scales=new_scales[0])
    return q, kv, new, new_semaphores


def _heads_kernel(
    slots_ref: Any,
    qkv_ref: Any,
    norm_refs: Any,
    table_refs: Any,
    pending_refs: Any,
    _: Any,
    pages_refs: Any,
    semaphores_ref: Any,
    q_ref: Any,
    kv_ref: Any,
    *,
    eps: float,
    offset: float,
    write: Callable[..., None],
    starts: tuple[int, ...],
) -> None:
    """What is None is not there."""
    row, kv_head = pl.program_id(0), pl.program_id(1)
    group, half = qkv_ref.shape[2] - 2, qkv_ref.shape[3] // 2
    head, column = lax.iota(jnp.int32, next_power(group + 1)), lax.iota(jnp.int32, next_power(half))
    at, inside = index_grid(head, column[None, :]), column < half

    def halves(ref: Any, index: Any, column: Array, mask: Array) -> Halves:
        places = [(*index, column + start) for start in (0, half)]
        return [plgpu.load(ref.at[place], mask=mask, other=0).astype(jnp.float32) for place in places]

    # The key lies behind its queries, and is one of them until it is written.
    qk = halves(qkv_ref, (row, kv_head, at[0]), at[1], (head <= group)[:, None] & inside[None, :])
    v = halves(qkv_ref, (row, kv_head, group + 1), column, inside)
    if pending_refs is not None:
        ranks_ref, up_ref, which_ref = pending_refs

        def add(parts: Halves, head: Array) -> Halves:
            """In the type in which a product would have been."""
            module = sum(((head >= start).astype(jnp.int32) for start in starts), jnp.zeros_like(head))
            added = row_adder(ranks_ref, up_ref, which_ref, row, module)
            first = ((kv_head * (group + 2) + head) * (2 * half))[..., None]
            outputs = [first + jnp.minimum(column, half - 1) + start for start in (0, half)]
            sums = [x + jnp.where(inside, added(output), 0) for x, output in zip(parts, outputs, strict=True)]
            return [x.astype(qkv_ref.dtype).astype(jnp.float32) for x in sums]

        qk, v = add(qk, jnp.minimum(head, group)), add(v, jnp.int32(group + 1))
    if norm_refs is not None:
        of_q, of_k = (halves(ref, (), column, inside) for ref in norm_refs)
        weights = [jnp.where((head < group)[:, None], *both) for both in zip(of_q, of_k, strict=True)]
        mean = sum(jnp.sum(x * x, axis=1, keepdims=True) for x in qk) / (2 * half)
        normed = [x * lax.rsqrt(mean + eps) * (w + offset) for x, w in zip(qk, weights, strict=True)]
        qk = [x.astype(qkv_ref.dtype).astype(jnp.float32) for x in normed]
    if table_refs is not None:
        cos, sin = (plgpu.load(ref.at[row, column], mask=inside, other=0)[None, :] for ref in table_refs)
        qk = [qk[0] * cos - qk[1] * sin, qk[1] * cos + qk[0] * sin]
    if q_ref is not None:
        for start, x in zip((0, half), qk, strict=True):
            mask = (head < group)[:, None] & inside[None, :]
            # What is not stored would have another place here, where nothing is.
            place = row, kv_head, jnp.where(mask, at[0], group), at[1] + start
            plgpu.store(q_ref.at[place], x.astype(q_ref.dtype), mask=mask)
    k = [jnp.sum(jnp.where((head == group)[:, None], x, 0), axis=0).astype(qkv_ref.dtype) for x in qk]
    finite = [jnp.abs(x) < jnp.inf for x in v]
    k = [jnp.where(is_finite, x, jnp.nan) for is_finite, x in zip(finite, k, strict=True)]
    v = [jnp.where(is_finite, x, 0).astype(qkv_ref.dtype) for is_finite, x in zip(finite, v, strict=True)]
    for i, both in enumerate((k, v)):
        write(slots_ref[row], 2 * kv_head + i, both, column, half, *pages_refs)
        if kv_ref is not None:
            for start, x in zip((0, half), both, strict=True):
                plgpu.store(kv_ref.at[row, kv_head, i, column + start], x, mask=inside)
    semaphores_ref[row, kv_head] = 0


def _write_plain(slot: Array, which: Array, values: Halves, column: Array, half: int, pages_ref: Any) -> None:
    """`which`: of the keys and values of all heads, in turns."""
    for start, x in zip((0, half), values, strict=True):
        place = slot, (2 * which) * half + start + column
        plgpu.store(pages_ref.at[place], x.astype(pages_ref.dtype), mask=column < half)


def _write_quantized(
    slot: Array,
    which: Array,
    values: Halves,
    column: Array,
    half: int,
    words_ref: Any,
    scales_ref: Any,
    *,
    block_size: int,
    dtype: Any,
) -> None:
    words, scale = quantized(values, dtype)
    plgpu.store(words_ref.at[slot, which * half + column], words, mask=column < half)
    scales_ref[lax.div(slot, block_size), lax.rem(which, 2), lax.div(which, 2), lax.rem(slot, block_size)] = (
        scale
    )
