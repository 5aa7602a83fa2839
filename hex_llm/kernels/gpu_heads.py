"""Heads on NVIDIA GPUs, by a Pallas-Triton kernel: queries and keys are normed and turned, keys and values
are written into pages. XLA makes up to eight kernels of this, and where tokens are few, starting them is most
of the time. A program then takes a token's heads that share a key; of prompts it takes those of some tokens,
head by head, for programs that wait for one token each read a third as fast.
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
from hex_llm.kernels.gpu_adapters import FEW_ROWS, Part, Used, row_adder, shared_slots
from hex_llm.kernels.gpu_launch import index_grid, launched, next_power

Halves = list[Array]  # of heads: the first and the second

TILE_ROWS = 16  # of prompts
WARPS, STAGES = 4, 3  # of a program; of a tile's loop over heads


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
    is_few = num_rows <= FEW_ROWS
    pending: Any = None
    starts: tuple[int, ...] = ()
    if heads.pending is not None:
        ranks, up, (_, starts), which = heads.pending
        whose = which if is_few else (which, shared_slots(which, TILE_ROWS))
        pending = ranks, up.reshape(len(up), -1, up.shape[-1]), whose
    given = slots, heads.qkv, heads.norms, heads.table, pending
    first = len(jax.tree.leaves(given))
    aliases = {first + i: i for i in range(len(arrays))}
    settings: Any = {"eps": heads.eps, "offset": heads.offset, "write": write, "starts": starts}
    kernel = partial(_heads_kernel if is_few else _tile_kernel, **settings)
    grid = num_kv_heads, num_rows if is_few else pl.cdiv(num_rows, TILE_ROWS)  # in the order of memory
    call = launched(kernel, grid, out, WARPS, STAGES, aliases)
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
    kv_head, row = pl.program_id(0), pl.program_id(1)
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
        qk = _normed(qk, weights, 2 * half, eps, offset, qkv_ref.dtype)
    if table_refs is not None:
        qk = _turned(qk, *(plgpu.load(ref.at[row, column], mask=inside, other=0)[None] for ref in table_refs))
    if q_ref is not None:
        for start, x in zip((0, half), qk, strict=True):
            mask = (head < group)[:, None] & inside[None, :]
            # What is not stored would have another place here, where nothing is.
            place = row, kv_head, jnp.where(mask, at[0], group), at[1] + start
            plgpu.store(q_ref.at[place], x.astype(q_ref.dtype), mask=mask)
    k = [jnp.sum(jnp.where((head == group)[:, None], x, 0), axis=0) for x in qk]
    for i, both in enumerate(_contained(k, v, qkv_ref.dtype)):
        write(slots_ref[row], 2 * kv_head + i, both, column, inside, half, *pages_refs)
        if kv_ref is not None:
            for start, x in zip((0, half), both, strict=True):
                plgpu.store(kv_ref.at[row, kv_head, i, column + start], x, mask=inside)
    semaphores_ref[row, kv_head] = 0


def _tile_kernel(
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
    """The same for TILE_ROWS tokens, head by head."""
    kv_head, tile, num_rows = pl.program_id(0), pl.program_id(1), len(qkv_ref)
    group, half = qkv_ref.shape[2] - 2, qkv_ref.shape[3] // 2
    row = tile * TILE_ROWS + lax.iota(jnp.int32, TILE_ROWS)
    # What is not there is read from somewhere else instead, and not stored.
    source, there = jnp.minimum(row, num_rows - 1), row < num_rows
    column = lax.iota(jnp.int32, next_power(half))
    here, inside = jnp.minimum(column, half - 1), column < half
    at, mask = index_grid(row, column[None, :]), there[:, None] & inside[None, :]
    from_row, from_column = index_grid(source, here[None, :])
    # Where nothing is written, past all slots: interpreted, what is not stored keeps what was there.
    slot = jnp.where(there, plgpu.load(slots_ref.at[source]), len(pages_refs[0]))
    if table_refs is not None:
        table = [plgpu.load(ref.at[from_row, from_column]) for ref in table_refs]

    def make(add: Callable[[list[Part], list[Array]], Halves] | None) -> None:
        def read(head: Array) -> Halves:
            """Zeros where there is nothing."""
            parts = [plgpu.load(qkv_ref.at[from_row, kv_head, head, from_column + i]) for i in (0, half)]
            parts = [x.astype(jnp.float32) for x in parts]
            if add is not None:
                module = sum(((head >= start).astype(jnp.int32) for start in starts), jnp.int32(0))
                first = (kv_head * (group + 2) + head) * (2 * half) + here
                asked = [Part(x, first + i, module) for x, i in zip(parts, (0, half), strict=True)]
                sums = add(asked, used.factors(asked))
                # In the type in which a product would have been.
                parts = [x.astype(qkv_ref.dtype).astype(jnp.float32) for x in sums]
            return [jnp.where(inside[None, :], x, 0) for x in parts]

        def made(head: Array, norm_ref: Any) -> Halves:
            parts = read(head)
            if norm_refs is not None:
                weights = [plgpu.load(norm_ref.at[here + i]).astype(jnp.float32)[None] for i in (0, half)]
                parts = _normed(parts, weights, 2 * half, eps, offset, qkv_ref.dtype)
            return parts if table_refs is None else _turned(parts, *table)

        def make_query(head: Array, _: None) -> None:
            for start, x in zip((0, half), made(head, norm_refs and norm_refs[0]), strict=True):
                plgpu.store(q_ref.at[at[0], kv_head, head, at[1] + start], x.astype(q_ref.dtype), mask=mask)

        if group:
            lax.fori_loop(0, group, make_query, None)
        k, v = made(jnp.int32(group), norm_refs and norm_refs[1]), read(jnp.int32(group + 1))
        for i, both in enumerate(_contained(k, v, qkv_ref.dtype)):
            write(slot, 2 * kv_head + i, both, at[1], mask, half, *pages_refs)
            if kv_ref is not None:
                for start, x in zip((0, half), both, strict=True):
                    plgpu.store(kv_ref.at[at[0], kv_head, i, at[1] + start], x, mask=mask)

    if pending_refs is None:
        make(None)
    else:  # two loops: what a branch holds is not read ahead
        ranks_ref, up_ref, (which_ref, shared_ref) = pending_refs
        used = Used(ranks_ref, up_ref, which_ref, shared_ref[tile], source)
        pl.when(used.shared > 0)(partial(make, used.add_one))
        pl.when(used.shared == 0)(partial(make, used.add_several))
    plgpu.store(semaphores_ref.at[row, kv_head], jnp.zeros_like(row), mask=there)


def _normed(parts: Halves, weights: Halves, width: int, eps: float, offset: float, dtype: Any) -> Halves:
    mean = sum(jnp.sum(x * x, axis=1, keepdims=True) for x in parts) / width
    normed = [x * lax.rsqrt(mean + eps) * (w + offset) for x, w in zip(parts, weights, strict=True)]
    return [x.astype(dtype).astype(jnp.float32) for x in normed]


def _turned(parts: Halves, cos: Array, sin: Array) -> Halves:
    return [parts[0] * cos - parts[1] * sin, parts[1] * cos + parts[0] * sin]


def _contained(k: Halves, v: Halves, dtype: Any) -> tuple[Halves, Halves]:
    """See decoder.contained."""
    finite = [jnp.abs(x) < jnp.inf for x in v]
    k = [jnp.where(is_finite, x, jnp.nan).astype(dtype) for is_finite, x in zip(finite, k, strict=True)]
    v = [jnp.where(is_finite, x, 0).astype(dtype) for is_finite, x in zip(finite, v, strict=True)]
    return k, v


def _write_plain(
    slot: Array, which: Array, values: Halves, column: Array, mask: Array, half: int, pages_ref: Any
) -> None:
    """`which`: of the keys and values of all heads, in turns. Of one token, [C], or of some, [R, C]."""
    for start, x in zip((0, half), values, strict=True):
        place = _beside(slot, column), (2 * which) * half + start + column
        plgpu.store(pages_ref.at[place], x.astype(pages_ref.dtype), mask=mask)


def _write_quantized(
    slot: Array,
    which: Array,
    values: Halves,
    column: Array,
    mask: Array,
    half: int,
    words_ref: Any,
    scales_ref: Any,
    *,
    block_size: int,
    dtype: Any,
) -> None:
    words, scale = quantized(values, dtype)
    plgpu.store(words_ref.at[_beside(slot, column), which * half + column], words, mask=mask)
    nth, head = lax.rem(which, 2), lax.div(which, 2)
    place = lax.div(slot, block_size), nth, head, lax.rem(slot, block_size)
    if slot.ndim == 0:
        scales_ref[place] = scale
    else:
        plgpu.store(scales_ref.at[place], scale, mask=jnp.sum(mask.astype(jnp.int32), axis=1) > 0)


def _beside(slot: Array, column: Array) -> Array:
    return slot if slot.ndim == 0 else jnp.broadcast_to(slot[:, None], column.shape)
