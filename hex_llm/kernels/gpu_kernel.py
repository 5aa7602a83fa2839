"""Attention over pages as one Pallas-Triton kernel for decodes and prefills.

A program takes a work item, which is a block of tokens of one row and one split of the keys, for one KV head;
the G query heads of each token lie one after another in its tile, so that they share what is read. A decode
is a block of one token. Of the splits of a block the one that ends last merges them. Keys are found through
the block table, one slot each, so any block size does. What no token of the block sees is not read. Where
something else has attended to the keys of the step itself, a program goes on from there over the cached ones.
Of quantized pages the halves of a head are multiplied apart, as they come out of words; the scales of keys
multiply scores, those of values weights.
It does not know how its work is best cut: that is gpu.py's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels import gpu_codes, gpu_launch
from hex_llm.kernels.attention import (
    BYTE,
    HIDDEN,
    NO_PEAK,
    Batch,
    KVPages,
    Mask,
    Options,
    QuantizedPages,
    first_key,
)
from hex_llm.kernels.gpu_launch import (
    LOG2_E,
    MIN_DOT,
    both,
    dot,
    index_grid,
    launched,
    load_rows,
    next_power,
)

LAST = 2**31 - 1  # after every position

Parts = tuple[Array, ...]  # of the columns of a head: one, or its halves
# (scores' running maximum, their weights' running sum, the running sum of weighted values)
Softmax = tuple[Array, Array, Parts]


@dataclass(frozen=True)
class Tiling:
    """How the work is cut; all of it is chosen from shapes alone."""

    rows: int  # of the score tile: tokens of a block times query heads per KV head, rounded up
    keys: int  # of the score tile
    num_tokens: int  # of a block, at most
    num_blocks: int  # at most
    num_spare: int  # work items besides one for each block: so much can be split
    min_split: int  # the fewest keys that are worth a split; a multiple of `keys`
    warps: int
    stages: int
    is_exact: bool = False  # how a block is split does not depend on the others


class Cache(NamedTuple):
    """The keys and values that rows attend to."""

    pages: KVPages
    tables: Array  # [R, B]
    semaphores: Array  # [T, K], see gpu_heads.py


class WorkItem(NamedTuple):
    """Tokens [start, end) of one row, none: nothing to do; and the keys [begin, stop) of a split."""

    start: Any
    end: Any
    begin: Any
    stop: Any
    stop_all: Any  # where the last split ends; below 0: there are no keys, and it becomes 0
    split: Any
    num_splits: Any
    part: Any  # where it leaves its part, next to those of the other splits


class Begun(NamedTuple):
    """What others have left, [T, K, G, H], to be written in place; with logs, attention to the keys of the
    step itself, to be continued over those before it."""

    out: Any
    # [1 + chunks, K * G, T] of the sum of a token's weights, at its place in its chunk; later chunks were not
    # begun.
    logs: Any = None


class Inputs(NamedTuple):
    """What `attend` hands to the kernel, which sees refs in their places."""

    items: Any  # [fields of WorkItem, num_items]
    positions: Any  # [T]
    rows: Any  # [T]
    num_decodes: Any  # [1]
    tables: Any  # [R, B]
    q: Any  # [T, K * G * H]
    pages: Any  # [slots, K * 2 * H], of quantized ones half as wide
    scales: Any = None  # [N, 2, K, block]
    sinks: Any = None  # [K * G]
    begun: Any = None  # to go on from, with `out` as here
    semaphores: Any = None  # [T, K], with splits


class Outputs(NamedTuple):
    out: Any  # [T, K * G * H]; in place of what was begun
    semaphores: Any = None  # with splits, as the rest: in place of the inputs'
    parts: Any = None  # [num_items, tokens of a block, K * G * H]
    totals: Any = None  # [num_items, tokens of a block, K * G] log2 of the sum of a split's weights


class Program(NamedTuple):
    inputs: Inputs
    outputs: Outputs
    head: Array  # of K and V
    column: Array  # [C] of a part of a head
    inside: Array | None  # [C] whether the part has that column; None: all
    head_dim: int
    code_dtype: Any  # of quantized pages
    group: int
    block_size: int
    options: Options
    tiling: Tiling

    @property
    def width(self) -> int:
        """Of a part, in columns."""
        return self.head_dim if self.code_dtype is None else self.head_dim // 2

    @property
    def is_single(self) -> bool:
        """A block has one token."""
        return self.tiling.num_tokens == 1

    @property
    def continues(self) -> bool:
        """Attention was begun."""
        return self.inputs.begun is not None and self.inputs.begun.logs is not None


class Block(NamedTuple):
    """The tokens of a program as R places of a tile, the query heads of a token one after another."""

    item: WorkItem
    table: Array  # its row in the tables
    row: Array  # [R]
    head: Array  # [R]
    position: Array  # [R]
    valid: Array  # [R] whether the token is one of the block's
    at: Parts  # [R, C] columns of q and out
    mask: Array | None  # [R, C] valid and inside
    lowest: Array  # of the positions
    highest: Array


def attend(
    q: Array,
    batch: Batch,
    items: WorkItem,
    cache: Cache,
    options: Options,
    tiling: Tiling,
    begun: Begun | None = None,
) -> Array:
    """[T, K, G, H]: what the items compute, the rest as it was begun."""
    num_rows, num_kv_heads, group, head_dim = q.shape
    pages, width, scales, code_dtype = cache.pages, num_kv_heads * group * head_dim, None, None
    if isinstance(pages, QuantizedPages):
        scales, code_dtype, pages = pages.scales, pages.dtype, pages.words
    flat_q, flat_pages = q.reshape(num_rows, width), pages.reshape(-1, math.prod(pages.shape[2:]))
    where = (batch.positions, batch.rows, batch.num_decodes[None], cache.tables)
    sinks, options = options.sinks, options._replace(sinks=None)  # which is no constant
    sinks = None if sinks is None else sinks.reshape(-1)
    inputs = Inputs(jnp.stack(items), *where, flat_q, flat_pages, scales, sinks)
    outputs = Outputs(jax.ShapeDtypeStruct((num_rows, width), q.dtype))
    aliases = {}
    if begun is not None:
        aliases[len(jax.tree.leaves(inputs))] = 0
        inputs = inputs._replace(begun=begun._replace(out=begun.out.reshape(num_rows, width)))
    if tiling.num_spare:
        aliases[len(jax.tree.leaves(inputs))] = 1
        inputs = inputs._replace(semaphores=cache.semaphores)
        parts = (len(items.start), tiling.num_tokens)
        outputs = Outputs(
            outputs.out,
            cache.semaphores,
            jax.ShapeDtypeStruct((*parts, width), jnp.float32),
            jax.ShapeDtypeStruct((*parts, num_kv_heads * group), jnp.float32),
        )
    settings: Any = {"group": group, "block_size": pages.shape[1], "options": options, "tiling": tiling}
    kernel = partial(_attend_kernel, head_dim=head_dim, code_dtype=code_dtype, **settings)
    grid = (num_kv_heads, len(items.start))
    [results] = launched(kernel, grid, [outputs], tiling.warps, tiling.stages, aliases)(inputs)
    return results.out.reshape(q.shape)


def _attend_kernel(
    inputs: Inputs, outputs: Outputs, *, head_dim: int, code_dtype: Any, **settings: Any
) -> None:
    head, nth = pl.program_id(0), pl.program_id(1)
    item = WorkItem(*(inputs.items[field, nth] for field in range(len(WorkItem._fields))))
    width = head_dim if code_dtype is None else head_dim // 2
    column = lax.iota(jnp.int32, max(next_power(width), MIN_DOT))
    inside = None if len(column) == width else column < width
    program = Program(inputs, outputs, head, column, inside, head_dim, code_dtype, **settings)
    pl.when(item.start < item.end)(lambda: _attend_block(program, item))


def _attend_block(program: Program, item: WorkItem) -> None:
    """Finds where the tokens of an item stand, then attends."""
    inputs, start = program.inputs, item.start
    tile = lax.iota(jnp.int32, program.tiling.rows)
    row = start + lax.div(tile, program.group)
    head = program.head * program.group + lax.rem(tile, program.group)
    valid, at = row < item.end, head[:, None] * program.head_dim + program.column
    parts = tuple(at + start for start in range(0, program.head_dim, program.width))
    if program.is_single:
        lowest = highest = inputs.positions[start]
        position = jnp.broadcast_to(lowest, row.shape)
    else:
        position = plgpu.load(inputs.positions.at[row], mask=valid, other=0)
        lowest, highest = jnp.min(jnp.where(valid, position, LAST)), jnp.max(position)
    mask = both(valid, program.inside, at.shape)
    block = Block(item, inputs.rows[start], row, head, position, valid, parts, mask, lowest, highest)
    if program.continues:
        pl.when(item.stop_all < 0)(lambda: _store(program, block, (jnp.zeros(at.shape),) * len(parts)))
    pl.when(item.begin < item.stop)(lambda: _attend_split(program, block))


def _attend_split(program: Program, block: Block) -> None:
    """Attends to the keys of a split and stores the result, of a block with several splits a part of it."""
    inputs, tiling = program.inputs, program.tiling
    query = tuple(load_rows(inputs.q, block.row, at, block.valid, program.inside) for at in block.at)
    running = _start(block.at)
    if program.continues:
        running = _continued(program, block)
    elif inputs.sinks is not None:
        running = _with_sinks(program, block, running)
    for masked, low, high in _stretches(block, program.options.mask, program.is_single, tiling.keys):
        running = lax.fori_loop(low, high, partial(_attend_tile, program, block, query, masked), running)
    peak, total, values = running
    total = jnp.maximum(total, 1e-30)
    out = tuple(part / total[:, None] for part in values)
    pl.when(block.item.num_splits == 1)(lambda: _store(program, block, out))
    if tiling.num_spare:
        pl.when(block.item.num_splits > 1)(lambda: _store_part(program, block, (peak, total, out)))


def _with_sinks(program: Program, block: Block, running: Softmax) -> Softmax:
    """The softmax with the sinks seen, in the first split only."""
    taken = block.valid & (block.item.split == 0)
    sinks = plgpu.load(program.inputs.sinks.at[block.head], mask=block.valid, other=0).astype(jnp.float32)
    peak = jnp.where(taken, sinks * (LOG2_E / _factor(program.options)), NO_PEAK)
    return peak, taken.astype(jnp.float32), running[2]


def _continued(program: Program, block: Block) -> Softmax:
    """The softmax as it was begun, one weight for all that was seen; at its start in chunks that were not,
    and in all splits but the first, to which they are added."""
    state, item = program.inputs.begun, block.item
    chunk = block.table - program.inputs.num_decodes[0] + 1
    taken = block.valid & (item.split == 0) & (chunk < len(state.logs))
    nth = block.position - item.stop_all
    logs = plgpu.load(state.logs.at[chunk, block.head, nth], mask=taken, other=0)
    peak = jnp.where(taken, logs * (LOG2_E / _factor(program.options)), NO_PEAK)
    out = (load_rows(state.out, block.row, at, taken, program.inside).astype(jnp.float32) for at in block.at)
    return peak, taken.astype(jnp.float32), tuple(out)


def _attend_tile(
    program: Program, block: Block, query: Parts, masked: bool, i: Array, running: Softmax
) -> Softmax:
    """The softmax with the i-th tile of keys; masked: some row may not see all of them."""
    inputs, keys = program.inputs, program.tiling.keys
    place = i * keys + lax.iota(jnp.int32, keys)
    there: Any = place < block.item.stop if masked else None
    slot = _slots(inputs.tables, block.table, i * keys, keys, program.block_size)
    read = partial(_read, program, slot, there, query[0].dtype)
    (key, key_scales), (values, value_scales) = read(0), read(1)
    scores = reduce(jnp.add, (dot(q, part.T) for q, part in zip(query, key, strict=True)))
    if key_scales is not None:
        scores *= key_scales[None, :]
    mask = program.options.mask
    visible: Any = _visible(block.position[:, None], place[None, :], mask) if masked else None
    if program.continues and masked:
        visible &= there[None, :]
    return _accumulate(running, scores, visible, values, value_scales, program.options)


def _read(program: Program, slot: Array, there: Any, dtype: Any, nth: int) -> tuple[Parts, Array | None]:
    """Keys (the 0th of a slot) or values; and their scales, if they have any, yet to be applied."""
    inputs, code_dtype = program.inputs, program.code_dtype
    at = (program.head * 2 + nth) * program.width + program.column[None, :]
    held = load_rows(inputs.pages, slot, at, there, program.inside)
    if code_dtype is None:
        return (held.astype(dtype),), None
    size = program.block_size
    where = (lax.div(slot, size), nth, program.head, lax.rem(slot, size))
    scales = plgpu.load(inputs.scales.at[where], mask=there, other=None if there is None else 0)
    return tuple(_codes(held, j, code_dtype, dtype) for j in range(2)), scales


def _codes(words: Array, j: int, code_dtype: Any, dtype: Any) -> Array:
    """The low or high codes of words."""
    is_whole = code_dtype == jnp.int8
    in_assembly = dtype == jnp.bfloat16 or (is_whole and dtype == jnp.float16)
    if gpu_launch.interpreted() or not in_assembly:
        code = (words.astype(jnp.int32) >> BYTE * j).astype(jnp.uint8)
        return lax.bitcast_convert_type(code, code_dtype).astype(dtype)
    body = gpu_codes.whole_numbers(j, BYTE, dtype) if is_whole else gpu_codes.floats(j)
    return gpu_codes.assembled(f"{body} mov.b32 $0, f;", dtype, words)


def _store(program: Program, block: Block, out: Parts) -> None:
    ref = program.outputs.out
    for at, part in zip(block.at, out, strict=True):
        plgpu.store(ref.at[index_grid(block.row, at)], part.astype(ref.dtype), mask=block.mask)


def _store_part(program: Program, block: Block, running: Softmax) -> None:
    """Leaves a split's part, its values divided by their weights, to the one that ends last: that merges."""
    outputs, item, (peak, total, out) = program.outputs, block.item, running
    nth = block.row - item.start
    for at, part in zip(block.at, out, strict=True):
        plgpu.store(outputs.parts.at[(item.part, *index_grid(nth, at))], part, mask=block.mask)
    logs = peak * _factor(program.options) + jnp.log2(total)
    plgpu.store(outputs.totals.at[item.part, nth, block.head], logs, mask=block.valid)
    if not gpu_launch.interpreted():
        plgpu.debug_barrier()
    num_ended = plgpu.atomic_add(outputs.semaphores.at[item.start, program.head], (), jnp.int32(1))
    is_last = num_ended == item.num_splits - 1
    pl.when(is_last)(lambda: _store(program, block, tuple(_merged(program, block, at) for at in block.at)))


def _merged(program: Program, block: Block, at: Array) -> Array:
    outputs, item, nth = program.outputs, block.item, block.row - block.item.start
    together = 8 if at.size <= 2**11 else 1  # splits whose reads overlap

    def add(i: Array, running: Softmax) -> Softmax:
        splits = [i * together + j for j in range(together)]
        there = [block.valid & (split < item.num_splits) for split in splits]
        places = [item.part - item.split + split for split in splits]
        logs = [
            plgpu.load(outputs.totals.at[place, nth, block.head], mask=mask, other=HIDDEN)
            for place, mask in zip(places, there, strict=True)
        ]
        parts = [
            plgpu.load(
                outputs.parts.at[(place, *index_grid(nth, at))],
                mask=both(mask, program.inside, at.shape),
                other=0,
            )
            for place, mask in zip(places, there, strict=True)
        ]
        peak, total, (sums,) = running
        new_peak = reduce(jnp.maximum, logs, peak)
        shrink = jnp.exp2(peak - new_peak)
        weights = [jnp.exp2(log - new_peak) for log in logs]
        sums = sum((p * w[:, None] for p, w in zip(parts, weights, strict=True)), sums * shrink[:, None])
        return new_peak, sum(weights, total * shrink), (sums,)

    _, total, (sums,) = lax.fori_loop(0, pl.cdiv(item.num_splits, together), add, _start((at,)))
    return sums / jnp.maximum(total, 1e-30)[:, None]


def _stretches(block: Block, mask: Mask, is_single: bool, keys: int) -> list[tuple[bool, Array, Array]]:
    """Tiles [low, high) of a split's keys, and whether some token does not see all of them."""
    # All tokens see the keys from `all_from` (None: the first) to `all_before`.
    all_from = None if mask == Mask() else first_key(block.highest, mask)
    all_before = block.lowest + 1
    low, high = lax.div(block.item.begin, keys), pl.cdiv(block.item.stop, keys)
    if is_single:  # masks cost nothing where memory is waited for
        return [(True, low, high)]
    middle = low if all_from is None else jnp.clip(pl.cdiv(all_from, keys), low, high)
    middle_end = jnp.clip(lax.div(jnp.minimum(all_before, block.item.stop), keys), middle, high)
    before = [] if all_from is None else [(True, low, middle)]
    return [*before, (False, middle, middle_end), (True, middle_end, high)]


def _visible(query: Array, key: Array, mask: Mask) -> Array:
    return (key <= query) & (key >= first_key(query, mask))


def _slots(tables_ref: Any, row: Array, start: Array, keys: int, block_size: int) -> Array:
    """Where the keys from `start` on lie; those past the table lie anywhere."""
    place = lax.iota(jnp.int32, keys)
    if block_size % keys == 0:
        block = tables_ref[row, lax.div(start, block_size)]
        return block * block_size + lax.rem(start, block_size) + place
    place += start
    nth = jnp.minimum(lax.div(place, block_size), tables_ref.shape[1] - 1)
    block = tables_ref[jnp.broadcast_to(row, nth.shape), nth]
    return block * block_size + lax.rem(place, block_size)


def _accumulate(
    running: Softmax,
    scores: Array,
    visible: Array | None,
    values: Parts,
    value_scales: Array | None,
    options: Options,
) -> Softmax:
    peak, total, sums = running
    if options.softcap is not None:
        scores = jnp.tanh(scores * (options.scale / options.softcap)) * options.softcap
    if visible is not None:
        scores = jnp.where(visible, scores, HIDDEN)
    dtype = values[0].dtype
    exp2 = _fast_exp2 if dtype != jnp.float32 and not gpu_launch.interpreted() else jnp.exp2
    factor, new_peak = _factor(options), jnp.maximum(peak, jnp.max(scores, axis=1))
    weights = exp2(scores * factor - (new_peak * factor)[:, None])  # exactly 0 where hidden
    shrink = exp2((peak - new_peak) * factor)
    total = total * shrink + jnp.sum(weights, axis=1)
    weights = (weights if value_scales is None else weights * value_scales[None, :]).astype(dtype)
    pairs = zip(sums, values, strict=True)
    return new_peak, total, tuple(sums * shrink[:, None] + dot(weights, part) for sums, part in pairs)


def _factor(options: Options) -> float:
    """From the scores that _accumulate compares to powers of 2."""
    return LOG2_E if options.softcap is not None else options.scale * LOG2_E


def _fast_exp2(x: Array) -> Array:
    """Far more exact than bfloat16; the plain one takes care of numbers that it would round to 0."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    code = "ex2.approx.ftz.f32 $0, $1;"
    [out] = plgpu.elementwise_inline_asm(
        code, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape]
    )
    return out


def _start(parts: Parts) -> Softmax:
    rows = len(parts[0])
    return jnp.full(rows, NO_PEAK), jnp.zeros(rows), tuple(jnp.zeros(part.shape) for part in parts)
