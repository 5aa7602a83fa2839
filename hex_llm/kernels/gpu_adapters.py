"""What adapters add to a product on an NVIDIA GPU: two Pallas-Triton kernels, one for each of their factors.

The first leaves for each row the ranks of its own slot. The second adds to the base's product in place; of
gates and ups it makes what goes on, so that these are read once, as without adapters. Rows are taken in
tiles. Of few tiles, decodes, each asks all slots at once: what is waited for are reads, and none depends on
another. Of many, prompts, whose rows of one adapter follow each other, a tile asks the one or two that its
rows have. docs/kernels.md tells what was measured.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels.experts import Activation
from hex_llm.kernels.gpu_kernel import dot, index_grid, launched, next_power, read_tile

MIN_SIDE, MAX_ROWS = 16, 64  # of a tile
FEW_TILES = 4
DEPTH = 128  # inputs at a time
MIN_SPLIT = 4 * DEPTH  # the fewest inputs that are worth a program
MAX_SPLITS = 16  # programs that share the inputs of a row
SPREAD = 256  # ranks of the slots that are asked at once


class Fused(NamedTuple):
    """How the modules of a matrix share its outputs: one after another along one axis."""

    axis: int = 0
    starts: tuple[int, ...] = ()  # of the second and later ones

    @property
    def num_modules(self) -> int:
        return 1 + len(self.starts)

    def range_of(self, module: int, size: int) -> tuple[int, int]:
        ends = (0, *self.starts, size)
        return ends[module], ends[module + 1]


def add_adapters(
    out: Array,
    x: Array,
    down: Array,
    up: Array,
    fused: Fused,
    which: Array,
    activation: Activation | None = None,
) -> Array:
    """See models.adapters.AddAdapters. out [T, *outputs], x [T, K], down [slots, modules * ranks, K],
    up [*outputs, slots, ranks]; which [T] counts slots from 1, 0: none."""
    flat = out.reshape(len(x), -1)
    ranks = _ranks(x, down.reshape(*down.shape[:2], -1), which)
    if activation is None:
        return _added(flat, ranks, up, fused, which).reshape(out.shape)
    return _added(flat, ranks, up, fused, which, activation)


def _tile_rows(num_rows: int) -> int:
    return min(max(next_power(num_rows), MIN_SIDE), MAX_ROWS)


def _ranks(x: Array, down: Array, which: Array) -> Array:
    """[splits, T, ranks], each row's in its own slot, to be summed over splits; without a slot anything."""
    num_slots, num_ranks, num_inputs = down.shape
    rows = _tile_rows(len(x))
    num_tiles = pl.cdiv(len(x), rows)
    wanted = MAX_SPLITS if num_tiles <= FEW_TILES else 512 // num_tiles
    splits = max(min(wanted, num_inputs // MIN_SPLIT), 1)
    out = jax.ShapeDtypeStruct((splits, len(x), num_ranks), x.dtype if splits == 1 else jnp.float32)
    kernel = partial(_ranks_kernel, rows=rows, splits=splits)
    result: Array = launched(kernel, (num_tiles, num_slots, splits), out, 4, 4)(x, down, which)
    return result


def _ranks_kernel(x_ref: Any, down_ref: Any, which_ref: Any, out_ref: Any, *, rows: int, splits: int) -> None:
    tile, slot, split = (pl.program_id(axis) for axis in range(3))
    num_rows, num_inputs = x_ref.shape
    num_ranks = down_ref.shape[1]
    row = tile * rows + lax.iota(jnp.int32, rows)
    # What is not there is read from somewhere else instead, and not stored.
    source = jnp.minimum(row, num_rows - 1)
    is_own = plgpu.load(which_ref.at[source]) == slot + 1

    @pl.when(jnp.sum(is_own.astype(jnp.int32)) > 0)
    def multiply() -> None:
        rank = lax.iota(jnp.int32, max(next_power(num_ranks), MIN_SIDE))
        here = jnp.minimum(rank, num_ranks - 1)

        def add(i: Array, total: Array) -> Array:
            deep = i * DEPTH + lax.iota(jnp.int32, DEPTH)
            inside = None if num_inputs % DEPTH == 0 else deep < num_inputs
            x = read_tile(x_ref, (), source, deep, inside)
            return total + dot(x, read_tile(down_ref, (slot,), here, deep, inside).T)

        length = pl.cdiv(pl.cdiv(num_inputs, DEPTH), splits)
        last = jnp.minimum((split + 1) * length, pl.cdiv(num_inputs, DEPTH))
        total = lax.fori_loop(split * length, last, add, jnp.zeros((rows, len(rank)), jnp.float32))
        mask = (is_own & (row < num_rows))[:, None] & (rank < num_ranks)[None, :]
        at = (split, *index_grid(row, rank[None, :]))
        plgpu.store(out_ref.at[at], total.astype(out_ref.dtype), mask=mask)


class Adding(NamedTuple):
    """How the second product is cut."""

    rows: int
    columns: int  # of the result
    together: int  # slots that are asked at once; 1: only those that some row has
    fused: Fused
    num_inner: int  # outputs behind the axis of the modules
    num_along: int  # outputs along it
    activation: Activation | None


def _added(
    base: Array, ranks: Array, up: Array, fused: Fused, which: Array, activation: Activation | None = None
) -> Array:
    num_rows, width = base.shape[0], base.shape[1] // (1 if activation is None else 2)
    *outputs, num_slots, num_ranks = up.shape
    rows = _tile_rows(num_rows)
    num_tiles = pl.cdiv(num_rows, rows)
    if num_tiles > FEW_TILES:
        columns, together = 128 if activation is None else 64, 1
    else:  # so that there is work for all multiprocessors
        columns = 64 if width > 4096 else 32
        together = min(max(SPREAD // next_power(num_ranks), 1), next_power(num_slots))
    inner, along = math.prod(outputs[fused.axis + 1 :]), outputs[fused.axis]
    how = Adding(rows, columns, together, fused, inner, along, activation)
    out = jax.ShapeDtypeStruct((num_rows, width), base.dtype)
    aliases = {0: 0} if activation is None else {}
    call = launched(partial(_added_kernel, how=how), (num_tiles, pl.cdiv(width, columns)), out, 4, 2, aliases)
    result: Array = call(base, ranks, up.reshape(-1, num_slots, num_ranks), which)
    return result


def _added_kernel(
    base_ref: Any, ranks_ref: Any, up_ref: Any, which_ref: Any, out_ref: Any, *, how: Adding
) -> None:
    num_rows, width = out_ref.shape
    row = pl.program_id(0) * how.rows + lax.iota(jnp.int32, how.rows)
    source = jnp.minimum(row, num_rows - 1)
    first = pl.program_id(1) * how.columns
    column = first + lax.iota(jnp.int32, how.columns)
    here = column if width % how.columns == 0 else jnp.minimum(column, width - 1)
    which = plgpu.load(which_ref.at[source])
    add = partial(_add, ranks_ref, up_ref, source, which, how)
    if how.activation is None:
        total = plgpu.load(base_ref.at[index_grid(source, here[None, :])]).astype(jnp.float32)
        if how.num_inner % how.columns == 0 or not how.fused.starts:
            total = add(total, here, _module(how, first))
        else:
            modules = _module(how, here)
            for module in range(how.fused.num_modules):
                added = add(jnp.zeros_like(total), here, module)
                total += jnp.where((modules == module)[None, :], added, 0)
    else:
        both = 2 * first + lax.iota(jnp.int32, 2 * how.columns)
        both = jnp.minimum(both, 2 * width - 1)
        gate, up = _by_turns(plgpu.load(base_ref.at[index_grid(source, both[None, :])]).astype(jnp.float32))
        gate, up = add(gate, 2 * here, 0), add(up, 2 * here + 1, how.fused.num_modules - 1)
        total = how.activation(gate) * up
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    plgpu.store(out_ref.at[index_grid(row, column[None, :])], total.astype(out_ref.dtype), mask=mask)


def _add(
    ranks_ref: Any,
    up_ref: Any,
    row: Array,
    which: Array,
    how: Adding,
    total: Array,
    output: Array,
    module: Any,
) -> Array:
    """total [R, C], and what the rows' own slots add to these outputs, which are of one module."""
    _, num_slots, num_ranks = up_ref.shape
    rank = lax.iota(jnp.int32, next_power(num_ranks))
    has = (which > 0)[:, None] & (rank < num_ranks)[None, :]
    places = module * num_ranks + jnp.minimum(rank, num_ranks - 1)
    parts = [
        plgpu.load(ranks_ref.at[(split, *index_grid(row, places[None, :]))], mask=has, other=0)
        for split in range(len(ranks_ref))
    ]
    ranks = sum(parts[1:], parts[0]).astype(up_ref.dtype)
    size = max(how.together * len(rank), MIN_SIDE)  # a product of fewer is none
    place = lax.iota(jnp.int32, size)

    def of_slots(first: Any, total: Array) -> Array:
        slot, nth = first + lax.div(place, len(rank)), lax.rem(place, len(rank))
        there = (slot < jnp.minimum(first + how.together, num_slots)) & (nth < num_ranks)
        at = (index_grid(output, jnp.minimum(slot, num_slots - 1)[None, :]), jnp.minimum(nth, num_ranks - 1))
        index = (*at[0], jnp.broadcast_to(at[1][None, :], (len(output), size)))
        weights = plgpu.load(up_ref.at[index], mask=jnp.broadcast_to(there[None, :], index[0].shape), other=0)
        spread = jnp.broadcast_to(ranks[:, None, :], (len(row), size // len(rank), len(rank)))
        is_own = which[:, None] == slot[None, :] + 1
        own = jnp.where(is_own & there[None, :], spread.reshape(len(row), size), jnp.zeros((), ranks.dtype))
        return total + dot(own, weights.T)

    if how.together > 1:
        for first in range(0, num_slots, how.together):
            total = of_slots(first, total)
        return total
    lowest = jnp.min(jnp.where(which > 0, which, num_slots + 1)) - 1

    def of_slot(slot: Array, total: Array) -> Array:
        is_used = jnp.sum((which == slot + 1).astype(jnp.int32)) > 0
        return lax.cond(is_used, of_slots, lambda _, total: total, slot, total)

    return lax.fori_loop(lowest, jnp.max(which), of_slot, total)


def _module(how: Adding, column: Array) -> Array:
    along = lax.rem(lax.div(column, how.num_inner), how.num_along)
    return sum(((along >= start).astype(jnp.int32) for start in how.fused.starts), jnp.zeros_like(along))


def _by_turns(both: Array) -> tuple[Array, Array]:
    """The even and the odd columns."""
    pairs = both.reshape(len(both), -1, 2)
    is_even = lax.broadcasted_iota(jnp.int32, pairs.shape, 2) == 0
    return jnp.sum(jnp.where(is_even, pairs, 0), axis=2), jnp.sum(jnp.where(is_even, 0, pairs), axis=2)
