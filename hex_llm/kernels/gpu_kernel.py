"""Attention over pages as one Pallas-Triton kernel for decodes and prefills, and the write of K and V.

A program takes a block of rows of one sequence, one KV head and one split of the keys; the G query heads of
each row lie one after another in its tile, so that they share what is read. A decode is a block of one row.
Of the splits of a block the one that ends last merges them. Keys are found through the block table, one slot
each, so any block size does. What no row of the block sees is not read. Where something else has attended to
the keys of the step itself, a program goes on from there over the cached ones. It does not know how its work
is best cut: that is gpu.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels.attention import Mask, first_key

HIDDEN = -1e30  # a score that is not seen; finite, so that rows without any key yet stay numbers
NO_PEAK = -1e20  # the maximum of no scores: far below any that is seen, far above HIDDEN
LAST = 2**31 - 1  # after every position
LOG2_E = math.log2(math.e)

# (scores' running maximum, their weights' running sum, the running sum of weighted values)
Softmax = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class Tiling:
    """How the work is cut; all of it is chosen from shapes alone."""

    rows: int  # of the score tile: rows of the batch times query heads per KV head, rounded up
    keys: int  # of the score tile
    splits: int  # programs that share the keys of a block of rows, at most
    min_split: int  # the fewest keys that are worth a split; a multiple of `keys`
    warps: int
    stages: int


@dataclass(frozen=True)
class Options:
    mask: Mask
    scale: float
    softcap: float | None


class PartialSoftmax(NamedTuple):
    """Attention of rows to the keys of their own step, to be continued over those before it."""

    out: jax.Array  # [T, K, G, H]
    logs: jax.Array  # [S, K * G, T] log of the sum of a row's weights, at its place in its sequence's rows
    cached: jax.Array  # [blocks of rows] keys of the sequence before the step; -1: padding, which becomes 0


def write_kv(k: jax.Array, v: jax.Array, pages: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The pages with k and v [T, K, H] at the slots, in place where the pages are donated; and semaphores
    [T, K], all 0: splits draw them at their block's first row to learn which of them ends last."""
    num_rows, num_kv_heads, head_dim = k.shape
    width = num_kv_heads * 2 * head_dim
    flat = pages.reshape(-1, width)
    # As the pages lie: what makes k and v, usually a rotation, then writes both in one go.
    kv = jnp.stack([k, v], axis=2).astype(pages.dtype).reshape(num_rows, width)

    def write_kernel(slots_ref: Any, kv_ref: Any, _: Any, pages_ref: Any, semaphores_ref: Any) -> None:
        row, place = pl.program_id(0), lax.iota(jnp.int32, next_power(width))
        inside = place < width
        value = plgpu.load(kv_ref.at[row, place], mask=inside)
        plgpu.store(pages_ref.at[slots_ref[row], place], value, mask=inside)
        head = lax.iota(jnp.int32, next_power(num_kv_heads))
        plgpu.store(semaphores_ref.at[row, head], jnp.zeros_like(head), mask=head < num_kv_heads)

    semaphores = jax.ShapeDtypeStruct((num_rows, num_kv_heads), jnp.int32)
    call = launched(write_kernel, (num_rows,), [flat, semaphores], warps=4, stages=1, aliases={2: 0})
    new_pages, new_semaphores = call(slots, kv, flat)
    return new_pages.reshape(pages.shape), new_semaphores


def attend(
    q: jax.Array,
    positions: jax.Array,
    blocks: tuple[jax.Array, jax.Array] | None,  # sequences of rows, starts of blocks; None: rows are single
    pages: jax.Array,
    tables: jax.Array,
    semaphores: jax.Array,
    options: Options,
    tiling: Tiling,
    partial_softmax: PartialSoftmax | None = None,
) -> jax.Array:
    num_rows, num_kv_heads, group, head_dim = q.shape
    arguments = [
        positions,
        *(blocks or ()),
        tables,
        q.reshape(num_rows, -1),
        pages.reshape(-1, num_kv_heads * 2 * head_dim),
    ]
    heads = num_kv_heads * group
    out = [jax.ShapeDtypeStruct((num_rows, heads * head_dim), q.dtype)]
    aliases = {}
    if partial_softmax is not None:  # in place: rows without cached keys are not even read
        aliases[len(arguments)] = 0
        arguments += [partial_softmax.out.reshape(num_rows, -1), partial_softmax.logs, partial_softmax.cached]
    if tiling.splits > 1:
        aliases[len(arguments)] = 1
        arguments.append(semaphores)
        parts = jax.ShapeDtypeStruct((tiling.splits, num_rows, heads * head_dim), jnp.float32)
        totals = jax.ShapeDtypeStruct((tiling.splits, num_rows, heads), jnp.float32)
        out += [jax.ShapeDtypeStruct(semaphores.shape, semaphores.dtype), parts, totals]
    kernel = partial(
        _attend_kernel,
        options=options,
        tiling=tiling,
        group=group,
        head_dim=head_dim,
        block_size=pages.shape[1],
        one_row=blocks is None,
        goes_on=partial_softmax is not None,
    )
    # Splits come last: a program without keys waits for room as any other does, so let it hold up none.
    grid = (num_kv_heads, num_rows if blocks is None else len(blocks[1]) - 1, tiling.splits)
    return launched(kernel, grid, out, tiling.warps, tiling.stages, aliases)(*arguments)[0].reshape(q.shape)


def _attend_kernel(
    positions_ref: Any,  # [T]
    *refs: Any,
    options: Options,
    tiling: Tiling,
    group: int,
    head_dim: int,
    block_size: int,
    one_row: bool,
    goes_on: bool,
) -> None:
    """After the positions: where rows are not single their sequences [T] and the starts of blocks [N + 1];
    tables [S, B]; q [T, K * G * H]; pages [slots, K * 2 * H]; the fields of PartialSoftmax where it goes on
    from them; with splits the semaphores as they were; out [T, K * G * H]; with splits the semaphores [T, K],
    and the parts and totals of _merge."""
    sequences_ref, starts_ref, *refs = (None, None, *refs) if one_row else refs  # type: ignore[assignment]
    tables_ref, q_ref, pages_ref, *refs = refs  # type: ignore[assignment]
    partial_refs, refs = (refs[:3], refs[3:]) if goes_on else ((), refs)
    out_ref, *merge_refs = refs[1:] if tiling.splits > 1 else refs
    head, block, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    if not one_row:  # the last blocks of a prompt have the most keys: they go first
        block = pl.num_programs(1) - 1 - block
    start, end = (block, block + 1) if one_row else (starts_ref[block], starts_ref[block + 1])
    column = lax.iota(jnp.int32, next_power(head_dim))
    inside = None if len(column) == head_dim else column < head_dim
    cached: Any = partial_refs[2][block] if goes_on else None

    @pl.when((start < end) & (cached != 0) if goes_on else start < end)
    def _() -> None:
        tile = lax.iota(jnp.int32, tiling.rows)
        row, query_head = start + lax.div(tile, group), head * group + lax.rem(tile, group)
        valid, at = row < end, query_head[:, None] * head_dim + column
        if one_row:
            sequence, lowest = block, positions_ref[block]
            position, highest = jnp.broadcast_to(lowest, row.shape), lowest
        else:
            sequence, position = sequences_ref[start], plgpu.load(positions_ref.at[row], mask=valid, other=0)
            lowest, highest = jnp.min(jnp.where(valid, position, LAST)), jnp.max(position)
        end_key = cached if goes_on else highest + 1
        first, length, num_splits = _splits(first_key(lowest, options.mask), end_key, tiling)
        begin = first + split * length
        stop = jnp.minimum(begin + length, end_key)
        mask = _both(valid, inside, at.shape)

        def store(out: jax.Array) -> None:
            plgpu.store(out_ref.at[index_grid(row, at)], out.astype(out_ref.dtype), mask=mask)

        if goes_on:
            pl.when((cached < 0) & (split == 0))(lambda: store(jnp.zeros(at.shape)))

        @pl.when(split < num_splits)
        def _() -> None:
            query = _load(q_ref, row, at, valid, inside)

            def add(masked: bool, i: jax.Array, running: Softmax) -> Softmax:
                place = i * tiling.keys + lax.iota(jnp.int32, tiling.keys)
                there: Any = place < stop if masked else None
                slot = _slots(tables_ref, sequence, i * tiling.keys, tiling.keys, block_size)
                at = head * 2 * head_dim + column[None, :]
                scores = dot(query, _load(pages_ref, slot, at, there, inside).T)
                values = _load(pages_ref, slot, at + head_dim, there, inside)
                visible: Any = _visible(position[:, None], place[None, :], options.mask) if masked else None
                if goes_on and masked:
                    visible &= there[None, :]
                return _accumulate(running, scores, visible, values, options)

            running = _start(tiling.rows, len(column))
            if goes_on:  # the first split does, the others are added to it
                taken, nth = valid & (split == 0), position - cached
                running = _continued(
                    partial_refs, (sequence, row, nth, query_head, at), taken, inside, options
                )
            all_from = None if options.mask == Mask() else first_key(highest, options.mask)
            for masked, low, high in _stretches(begin, stop, lowest + 1, all_from, one_row, tiling.keys):
                running = lax.fori_loop(low, high, partial(add, masked), running)
            peak, total, values = running
            total = jnp.maximum(total, 1e-30)
            out = values / total[:, None]
            pl.when(num_splits == 1)(lambda: store(out))
            if tiling.splits > 1:
                semaphores_ref, parts_ref, totals_ref = merge_refs

                @pl.when(num_splits > 1)
                def _() -> None:
                    plgpu.store(parts_ref.at[(split, *index_grid(row, at))], out, mask=mask)
                    logs = peak * _factor(options) + jnp.log2(total)
                    plgpu.store(totals_ref.at[split, row, query_head], logs, mask=valid)
                    if not _interpreted():
                        plgpu.debug_barrier()
                    ticket = plgpu.atomic_add(semaphores_ref.at[start, head], (), jnp.int32(1))

                    @pl.when(ticket == num_splits - 1)
                    def _() -> None:
                        places = row, query_head, at
                        store(_merge(parts_ref, totals_ref, places, valid, inside, num_splits))


def _continued(
    partial_refs: tuple[Any, ...],  # out [T, heads * H], logs [S, heads, T], and keys that are cached
    places: tuple[
        jax.Array, ...
    ],  # the sequence, rows [R], their places in it [R], heads [R], columns [R, C]
    taken: jax.Array,
    inside: jax.Array | None,
    options: Options,
) -> Softmax:
    """The softmax as it was begun in the rows that are taken, else at its start: one weight, of all that was
    seen."""
    (out_ref, logs_ref, _), (sequence, row, nth, head, at) = partial_refs, places
    logs = plgpu.load(logs_ref.at[sequence, head, nth], mask=taken, other=0)
    peak = jnp.where(taken, logs * (LOG2_E / _factor(options)), NO_PEAK)
    return peak, taken.astype(jnp.float32), _load(out_ref, row, at, taken, inside).astype(jnp.float32)


def _merge(
    parts_ref: Any,  # [splits, T, heads * H]
    totals_ref: Any,  # [splits, T, heads]: log2 of the sum of a split's weights
    places: tuple[jax.Array, jax.Array, jax.Array],  # rows [R], their heads [R], their columns [R, C]
    valid: jax.Array,
    inside: jax.Array | None,
    num_splits: jax.Array,
) -> jax.Array:
    row, head, at = places
    together = 8 if at.size <= 2**11 else 1  # splits whose reads overlap

    def add(i: jax.Array, running: Softmax) -> Softmax:
        splits = [i * together + j for j in range(together)]
        there = [valid & (split < num_splits) for split in splits]
        logs = [
            plgpu.load(totals_ref.at[split, row, head], mask=mask, other=HIDDEN)
            for split, mask in zip(splits, there, strict=True)
        ]
        parts = [
            plgpu.load(
                parts_ref.at[(split, *index_grid(row, at))], mask=_both(mask, inside, at.shape), other=0
            )
            for split, mask in zip(splits, there, strict=True)
        ]
        peak, total, sums = running
        new_peak = reduce(jnp.maximum, logs, peak)
        shrink = jnp.exp2(peak - new_peak)
        weights = [jnp.exp2(log - new_peak) for log in logs]
        sums = sum((p * w[:, None] for p, w in zip(parts, weights, strict=True)), sums * shrink[:, None])
        return new_peak, sum(weights, total * shrink), sums

    _, total, sums = lax.fori_loop(0, pl.cdiv(num_splits, together), add, _start(*at.shape))
    return sums / jnp.maximum(total, 1e-30)[:, None]


def _splits(first: jax.Array, stop: jax.Array, tiling: Tiling) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where the splits of these keys begin, in whole tiles; the length of one; and their number, below 1
    where there are no keys."""
    first = lax.div(first, tiling.keys) * tiling.keys
    length = pl.cdiv(stop - first, tiling.splits * tiling.keys) * tiling.keys
    length = jnp.maximum(length, tiling.min_split)
    return first, length, pl.cdiv(stop - first, length)


def _stretches(
    begin: jax.Array,
    stop: jax.Array,
    all_before: jax.Array,
    all_from: jax.Array | None,
    one_row: bool,
    keys: int,
) -> list[tuple[bool, jax.Array, jax.Array]]:
    """Tiles [low, high) to visit, and whether some row does not see all of them. All rows see the keys from
    `all_from` (None: the first) to `all_before`."""
    low, high = lax.div(begin, keys), pl.cdiv(stop, keys)
    if one_row:  # masks cost nothing where memory is waited for
        return [(True, low, high)]
    middle = low if all_from is None else jnp.clip(pl.cdiv(all_from, keys), low, high)
    middle_end = jnp.clip(lax.div(jnp.minimum(all_before, stop), keys), middle, high)
    before = [] if all_from is None else [(True, low, middle)]
    return [*before, (False, middle, middle_end), (True, middle_end, high)]


def _visible(query: jax.Array, key: jax.Array, mask: Mask) -> jax.Array:
    return (key <= query) & (key >= first_key(query, mask))


def _slots(tables_ref: Any, sequence: jax.Array, start: jax.Array, keys: int, block_size: int) -> jax.Array:
    """Where the keys from `start` on lie; those past the table lie anywhere."""
    place = lax.iota(jnp.int32, keys)
    if block_size % keys == 0:
        return (
            tables_ref[sequence, lax.div(start, block_size)] * block_size + lax.rem(start, block_size) + place
        )
    place += start
    block = jnp.minimum(lax.div(place, block_size), tables_ref.shape[1] - 1)
    return tables_ref[jnp.broadcast_to(sequence, block.shape), block] * block_size + lax.rem(
        place, block_size
    )


def _accumulate(
    running: Softmax, scores: jax.Array, visible: jax.Array | None, values: jax.Array, options: Options
) -> Softmax:
    peak, total, sums = running
    if options.softcap is not None:
        scores = jnp.tanh(scores * (options.scale / options.softcap)) * options.softcap
    if visible is not None:
        scores = jnp.where(visible, scores, HIDDEN)
    exp2 = _fast_exp2 if values.dtype != jnp.float32 and not _interpreted() else jnp.exp2
    factor, new_peak = _factor(options), jnp.maximum(peak, jnp.max(scores, axis=1))
    weights = exp2(scores * factor - (new_peak * factor)[:, None])  # exactly 0 where hidden
    shrink = exp2((peak - new_peak) * factor)
    added = dot(weights.astype(values.dtype), values)
    return new_peak, total * shrink + jnp.sum(weights, axis=1), sums * shrink[:, None] + added


def _factor(options: Options) -> float:
    """From the scores that _accumulate compares to powers of 2."""
    return LOG2_E if options.softcap is not None else options.scale * LOG2_E


def _fast_exp2(x: jax.Array) -> jax.Array:
    """Far more exact than bfloat16; the plain one takes care of numbers that it would round to 0."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    code = "ex2.approx.ftz.f32 $0, $1;"
    [out] = plgpu.elementwise_inline_asm(
        code, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape]
    )
    return out


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    exact = a.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _load(
    ref: Any, row: jax.Array, column: jax.Array, there: jax.Array | None, inside: jax.Array | None
) -> jax.Array:
    """ref[row [R], column [1 or R, C]]; 0 where a row is not there or a column not inside."""
    shape = (len(row), column.shape[1])
    mask = _both(there, inside, shape)
    return plgpu.load(ref.at[index_grid(row, column)], mask=mask, other=None if mask is None else 0)


def index_grid(row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (len(row), column.shape[1])
    return jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column, shape)


def _both(there: jax.Array | None, inside: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    rows = None if there is None else jnp.broadcast_to(there[:, None], shape)
    columns = None if inside is None else jnp.broadcast_to(inside[None, :], shape)
    if rows is None or columns is None:
        return columns if rows is None else rows
    return rows & columns


def _start(rows: int, columns: int) -> Softmax:
    return jnp.full(rows, NO_PEAK), jnp.zeros(rows), jnp.zeros((rows, columns))


def launched(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    out: Any,
    warps: int,
    stages: int,
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """A kernel that sees all arrays whole, since it finds its way through tables."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out),
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=_interpreted(),
    )


def _interpreted() -> bool:
    return jax.default_backend() == "cpu"


def next_power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
