"""Heads on NVIDIA GPUs, by a Pallas-Triton kernel: queries and keys are normed and turned, keys and values
are written into pages. XLA makes up to eight kernels of this, and where tokens are few, starting them is most
of the time. A program then takes a token's heads that share a key; of prompts it takes those of some tokens,
head by head, for programs that wait for one token each read a third as fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels.attention import KVPages, Projected, QuantizedPages, quantized
from hex_llm.kernels.gpu_adapter_tiles import FEW_ROWS, Asked, Part, tiles_for
from hex_llm.kernels.gpu_adapters import row_adder
from hex_llm.kernels.gpu_launch import index_grid, launched, next_power

Halves = list[Array]  # of heads: the first and the second

TILE_ROWS, TILE_WARPS = 16, 2  # of prompts
WARPS, STAGES = 4, 3  # of a program; of a tile's loop over heads


def write_kv(k: Array, v: Array, pages: KVPages, slots: Array) -> tuple[KVPages, Array]:
    """The pages with k and v [T, K, H] at the slots, in place where the pages are donated; and semaphores
    [T, K], all 0: at their block's first row splits count who has ended, and the last one merges."""
    # Together: what makes k and v, usually a rotation, then writes both in one go.
    return place_heads(Projected(jnp.stack([k, v], axis=2)), pages, slots)[2:]


class Inputs(NamedTuple):
    """What `place_heads` hands to a kernel, which sees refs in their places. What is None is not there."""

    slots: Any  # [T]
    qkv: Any  # [T, K, G + 2, H], or parts
    norms: Any  # of queries and of keys, [H]
    table: Any  # cos and sin [T, H / 2]
    pending: Any  # ranks, second factors [slots, outputs, ranks], and whose ranks rows have
    pages: Any  # [slots, K * 2 * H]; of quantized ones half as wide, and scales [N, 2, K, block]


class Outputs(NamedTuple):
    pages: Any  # in place of the inputs'
    semaphores: Any  # [T, K]
    q: Any = None  # [T, K, G, H]
    kv: Any = None  # two of [T, K, H]


class Program(NamedTuple):
    inputs: Inputs
    outputs: Outputs
    kv_head: Array
    dtype: Any  # of the product
    eps: float
    offset: float
    write: Callable[..., None]
    starts: tuple[int, ...]  # of the modules of adapters, among the heads

    @property
    def group(self) -> int:
        return self.inputs.qkv.shape[-2] - 2

    @property
    def half(self) -> int:
        return self.inputs.qkv.shape[-1] // 2


class Tile(NamedTuple):
    """The tokens of a program of prompts."""

    row: Array  # [R]
    source: Array  # [R] what is not there is read from somewhere else instead, and not stored
    here: Array  # [C] columns of half a head, likewise
    inside: Array  # [C]
    slot: Array  # [R]
    source_at: tuple[Array, Array]  # [R, C] rows and columns that are read
    at: tuple[Array, Array]  # and that are stored
    mask: Array  # [R, C] whether they are there
    table: Halves | None


def place_heads(
    heads: Projected, pages: KVPages, slots: Array, keep: bool = False
) -> tuple[Any, Any, KVPages, Array]:
    """Queries [T, K, G, H], if there are any; keys and values [T, K, H], if they are kept; pages and
    semaphores, as those of `write_kv`."""
    num_rows, num_kv_heads, num_heads, head_dim = heads.whole.shape
    if isinstance(pages, QuantizedPages):
        held, *scales = pages.words, pages.scales
        write = partial(_write_quantized, block_size=pages.shape[1], dtype=pages.dtype)
    else:
        held, scales, write = pages, [], partial(_write_plain)
    arrays = [held.reshape(-1, math.prod(held.shape[2:])), *scales]

    def made(*num: int) -> Any:
        return jax.ShapeDtypeStruct((num_rows, num_kv_heads, *num, head_dim), heads.whole.dtype)

    semaphores = jax.ShapeDtypeStruct((num_rows, num_kv_heads), jnp.int32)
    is_few = num_rows <= FEW_ROWS
    assert is_few or heads.dtype is None, "parts are added up token by token"
    pending, starts = _pending_of(heads, is_few)
    inputs = Inputs(slots, heads.qkv, heads.norms, heads.table, pending, arrays)
    first = len(jax.tree.leaves(inputs)) - len(arrays)
    aliases = {first + i: i for i in range(len(arrays))}
    settings: Any = {"dtype": heads.whole.dtype, "eps": heads.eps, "offset": heads.offset}
    settings |= {"write": write, "starts": starts}
    kernel = partial(_token_kernel if is_few else _tile_kernel, **settings)
    grid = num_kv_heads, num_rows if is_few else _num_tiles(num_rows, pending)  # in the order of memory
    q, kv = made(num_heads - 2) if num_heads > 2 else None, [made(), made()] if keep else None
    outputs = Outputs(arrays, semaphores, q, kv)
    warps = WARPS if is_few else TILE_WARPS
    [out] = launched(kernel, grid, [outputs], warps, STAGES, aliases)(inputs)
    new = out.pages[0].reshape(held.shape)
    if isinstance(pages, QuantizedPages):
        new = replace(pages, words=new, scales=out.pages[1])
    return out.q, out.kv, new, out.semaphores


def _pending_of(heads: Projected, is_few: bool) -> tuple[Any, tuple[int, ...]]:
    """As a kernel gets it, and where modules begin."""
    if heads.pending is None:
        return None, ()
    ranks, up, (_, starts), owners = heads.pending
    whose = owners.which if is_few else tiles_for(owners, len(up), TILE_ROWS)
    return (ranks, up.reshape(len(up), -1, up.shape[-1]), whose), starts


def _num_tiles(num_rows: int, pending: Any) -> int:
    """Of prompts."""
    if pending is None:
        return pl.cdiv(num_rows, TILE_ROWS)
    _, _, tiles = pending
    return len(tiles.slots)


# ---- token by token


def _token_kernel(inputs: Inputs, outputs: Outputs, **settings: Any) -> None:
    program = Program(inputs, outputs, pl.program_id(0), **settings)
    row, kv_head, group, half = pl.program_id(1), program.kv_head, program.group, program.half
    head, column = lax.iota(jnp.int32, next_power(group + 1)), lax.iota(jnp.int32, next_power(half))
    at, inside = index_grid(head, column[None, :]), column < half

    def halves(ref: Any, index: Any, column: Array, mask: Array) -> Halves:
        places = [(*index, column + start) for start in (0, half)]
        return [plgpu.load(ref.at[place], mask=mask, other=0).astype(jnp.float32) for place in places]

    def product(head: Any, column: Array, mask: Array) -> Halves:
        if inputs.qkv.ndim == 4:
            return halves(inputs.qkv, (row, kv_head, head), column, mask)
        parts = [halves(inputs.qkv, (i, row, kv_head, head), column, mask) for i in range(len(inputs.qkv))]
        return _as_product(program, [reduce(jnp.add, half) for half in zip(*parts, strict=True)])

    # The key lies behind its queries, and is one of them until it is written.
    qk = product(at[0], at[1], (head <= group)[:, None] & inside[None, :])
    v = product(group + 1, column, inside)
    if inputs.pending is not None:
        qk = _with_adapter(program, row, jnp.minimum(head, group), column, qk)
        v = _with_adapter(program, row, jnp.int32(group + 1), column, v)
    if inputs.norms is not None:
        of_q, of_k = (halves(ref, (), column, inside) for ref in inputs.norms)
        weights = [jnp.where((head < group)[:, None], *both) for both in zip(of_q, of_k, strict=True)]
        qk = _normed(program, qk, weights)
    if inputs.table is not None:
        table = [plgpu.load(ref.at[row, column], mask=inside, other=0)[None] for ref in inputs.table]
        qk = _turned(qk, *table)
    if outputs.q is not None:
        for start, x in zip((0, half), qk, strict=True):
            mask = (head < group)[:, None] & inside[None, :]
            # What is not stored would have another place here, where nothing is.
            place = row, kv_head, jnp.where(mask, at[0], group), at[1] + start
            plgpu.store(outputs.q.at[place], x.astype(outputs.q.dtype), mask=mask)
    k = [jnp.sum(jnp.where((head == group)[:, None], x, 0), axis=0) for x in qk]
    _store_kv(program, inputs.slots[row], row, column, inside, k, v)
    outputs.semaphores[row, kv_head] = 0


def _with_adapter(program: Program, row: Array, head: Array, column: Array, parts: Halves) -> Halves:
    """What the row's own adds to these heads."""
    ranks_ref, up_ref, which_ref = program.inputs.pending
    half, inside = program.half, column < program.half
    added = row_adder(ranks_ref, up_ref, which_ref, row, _module_of(program, head))
    first = ((program.kv_head * (program.group + 2) + head) * (2 * half))[..., None]
    outputs = [first + jnp.minimum(column, half - 1) + start for start in (0, half)]
    sums = [x + jnp.where(inside, added(output), 0) for x, output in zip(parts, outputs, strict=True)]
    return _as_product(program, sums)


# ---- in tiles of tokens, head by head


def _tile_kernel(inputs: Inputs, outputs: Outputs, **settings: Any) -> None:
    program, nth = Program(inputs, outputs, pl.program_id(0), **settings), pl.program_id(1)
    in_tile, asked = lax.iota(jnp.int32, TILE_ROWS), None
    if inputs.pending is None:
        tile = _tile_of(program, nth * TILE_ROWS + in_tile)
    else:
        ranks_ref, up_ref, tiles = inputs.pending
        tile = _tile_of(program, plgpu.load(tiles.rows.at[nth, in_tile]))
        asked = Asked(ranks_ref, up_ref, tiles.slots[nth], tile.source)
    pl.when(jnp.min(tile.row) < len(inputs.qkv))(lambda: _make_heads(program, tile, asked))


def _tile_of(program: Program, row: Array) -> Tile:
    inputs, half, there = program.inputs, program.half, row < len(program.inputs.qkv)
    source, column = jnp.minimum(row, len(inputs.qkv) - 1), lax.iota(jnp.int32, next_power(half))
    # Where nothing is written, past all slots: interpreted, what is not stored keeps what was there.
    slot = jnp.where(there, plgpu.load(inputs.slots.at[source]), len(program.outputs.pages[0]))
    at, inside = index_grid(row, column[None, :]), column < half
    mask, here = there[:, None] & inside[None, :], jnp.minimum(column, half - 1)
    source_at = index_grid(source, here[None, :])
    table = None if inputs.table is None else [plgpu.load(ref.at[source_at]) for ref in inputs.table]
    return Tile(row, source, here, inside, slot, source_at, at, mask, table)


def _make_heads(program: Program, tile: Tile, asked: Asked | None) -> None:
    inputs, q_ref, group = program.inputs, program.outputs.q, program.group

    def made(head: Array, norm_ref: Any) -> Halves:
        parts = _read_head(program, tile, head, asked)
        if norm_ref is not None:
            places = [tile.here + start for start in (0, program.half)]
            weights = [plgpu.load(norm_ref.at[place]).astype(jnp.float32)[None] for place in places]
            parts = _normed(program, parts, weights)
        return parts if tile.table is None else _turned(parts, *tile.table)

    def make_query(head: Array, _: None) -> None:
        for start, x in zip((0, program.half), made(head, of_q), strict=True):
            place = tile.at[0], program.kv_head, head, tile.at[1] + start
            plgpu.store(q_ref.at[place], x.astype(q_ref.dtype), mask=tile.mask)

    of_q, of_k = (None, None) if inputs.norms is None else inputs.norms
    if group:
        lax.fori_loop(0, group, make_query, None)
    k = made(jnp.int32(group), of_k)
    v = _read_head(program, tile, jnp.int32(group + 1), asked)
    _store_kv(program, tile.slot, *tile.at, tile.mask, k, v)
    there = tile.row < len(inputs.qkv)
    plgpu.store(
        program.outputs.semaphores.at[tile.row, program.kv_head], jnp.zeros_like(tile.row), mask=there
    )


def _read_head(program: Program, tile: Tile, head: Array, asked: Asked | None) -> Halves:
    """With what adapters add, zeros where there is nothing."""
    qkv_ref, kv_head, half = program.inputs.qkv, program.kv_head, program.half
    row, column = tile.source_at
    parts = [plgpu.load(qkv_ref.at[row, kv_head, head, column + i]) for i in (0, half)]
    parts = [x.astype(jnp.float32) for x in parts]
    if asked is not None:
        first = (kv_head * (program.group + 2) + head) * (2 * half) + tile.here
        factor = asked.factor(_module_of(program, head))
        added = [asked.added(Part(first + i, factor)) for i in (0, half)]
        parts = _as_product(program, [x + y for x, y in zip(parts, added, strict=True)])
    return [jnp.where(tile.inside[None, :], x, 0) for x in parts]


# ---- what both do


def _module_of(program: Program, head: Array) -> Array:
    """Of adapters."""
    return sum(((head >= start).astype(jnp.int32) for start in program.starts), jnp.zeros_like(head))


def _as_product(program: Program, sums: Halves) -> Halves:
    """In the type in which a product would have been."""
    return [x.astype(program.dtype).astype(jnp.float32) for x in sums]


def _normed(program: Program, parts: Halves, weights: Halves) -> Halves:
    mean = sum(jnp.sum(x * x, axis=1, keepdims=True) for x in parts) / (2 * program.half)
    factor = lax.rsqrt(mean + program.eps)
    normed = [x * factor * (w + program.offset) for x, w in zip(parts, weights, strict=True)]
    return _as_product(program, normed)


def _turned(parts: Halves, cos: Array, sin: Array) -> Halves:
    return [parts[0] * cos - parts[1] * sin, parts[1] * cos + parts[0] * sin]


def _store_kv(
    program: Program, slot: Array, row: Array, column: Array, mask: Array, k: Halves, v: Halves
) -> None:
    """In pages, and by row if they are kept. Of one token, [C], or of some, [R, C]."""
    refs, half = program.outputs.kv, program.half
    for i, both in enumerate(_contained(k, v, program.dtype)):
        which = 2 * program.kv_head + i
        program.write(slot, which, both, column, mask, half, *program.outputs.pages)
        if refs is not None:
            for start, x in zip((0, half), both, strict=True):
                plgpu.store(refs[i].at[row, program.kv_head, column + start], x, mask=mask)


def _contained(k: Halves, v: Halves, dtype: Any) -> tuple[Halves, Halves]:
    """See decoder.contained."""
    finite = [jnp.abs(x) < jnp.inf for x in v]
    k = [jnp.where(is_finite, x, jnp.nan).astype(dtype) for is_finite, x in zip(finite, k, strict=True)]
    v = [jnp.where(is_finite, x, 0).astype(dtype) for is_finite, x in zip(finite, v, strict=True)]
    return k, v


def _write_plain(
    slot: Array, which: Array, values: Halves, column: Array, mask: Array, half: int, pages_ref: Any
) -> None:
    """`which`: of the keys and values of all heads, in turns."""
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
