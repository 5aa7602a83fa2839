"""What adapters add to a product on an NVIDIA GPU: two Pallas-Triton kernels, one for each of their factors.

The first leaves for each row the ranks of its own slot. The second adds to the base's product in place; of
gates and ups it makes what goes on, so that these are read once, as without adapters. Rows are taken in
tiles. Of few rows, decodes, each tile asks all slots: what is waited for are reads, and so none depends on
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

from hex_llm.kernels.adapters import Fused
from hex_llm.kernels.experts import Activation
from hex_llm.kernels.gpu_launch import MIN_DOT, dot, index_grid, launched, next_power, read_tile

FEW_ROWS = 256  # decodes
DEPTH = 128  # inputs at a time
MIN_SPLIT = 4 * DEPTH  # the fewest inputs that are worth a program
MAX_SPLITS = 4  # programs that share the inputs of a row; all of the second product read what each leaves
TOGETHER = 8  # slots of decodes whose reads overlap


def add_adapters(
    out: Array,
    x: Array,
    down: Array,
    up: Array,
    fused: Fused,
    which: Array,
    activation: Activation | None = None,
) -> Array:
    """See kernels.adapters.AddAdapters. out [T, *outputs], x [T, K], down [slots, modules * ranks, K],
    up [*outputs, slots, ranks]; which [T] counts slots from 1, 0: none."""
    flat = out.reshape(len(x), -1)
    ranks = _ranks(x, down.reshape(*down.shape[:2], -1), which)
    if activation is None:
        return _added(flat, ranks, up, fused, which).reshape(out.shape)
    return _added(flat, ranks, up, fused, which, activation)


def _tile_rows(num_rows: int) -> int:
    return min(max(next_power(num_rows), MIN_DOT), 64 if num_rows <= FEW_ROWS else 128)


def _ranks(x: Array, down: Array, which: Array) -> Array:
    """[splits, T, ranks], each row's in its own slot, to be summed over splits; without a slot anything."""
    num_slots, num_ranks, num_inputs = down.shape
    rows = _tile_rows(len(x))
    num_tiles = pl.cdiv(len(x), rows)
    splits = max(min(MAX_SPLITS, num_inputs // MIN_SPLIT), 1) if len(x) <= FEW_ROWS else 1
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
        rank = lax.iota(jnp.int32, max(next_power(num_ranks), MIN_DOT))
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
    columns: int  # of the result, all of one module
    num_slots: int
    asks_all: bool  # slots, whether some row has them or not
    fused: Fused
    num_inner: int  # outputs behind the axis of the modules
    num_along: int  # outputs along it
    activation: Activation | None


def _added(
    base: Array, ranks: Array, up: Array, fused: Fused, which: Array, activation: Activation | None = None
) -> Array:
    *outputs, num_slots, num_ranks = up.shape
    num_rows, width = len(base), math.prod(outputs) // (1 if activation is None else 2)
    rows, is_few = _tile_rows(num_rows), num_rows <= FEW_ROWS
    # Of few rows, so that there is work for all multiprocessors.
    columns = (32 if width <= 8192 else 64) if is_few else 128 if activation is None else 64
    inner, along = math.prod(outputs[fused.axis + 1 :]), outputs[fused.axis]
    if activation is None and fused.starts:
        columns = min(columns, inner & -inner)
    how = Adding(rows, columns, num_slots, is_few, fused, inner, along, activation)
    out = jax.ShapeDtypeStruct((num_rows, width), base.dtype)
    aliases = {0: 0} if activation is None else {}
    grid = (pl.cdiv(num_rows, rows), pl.cdiv(width, columns))
    call = launched(partial(_added_kernel, how=how), grid, out, 4 if is_few else 8, 2, aliases)
    result: Array = call(base, ranks, up.reshape(-1, num_slots * num_ranks), which)
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

    def sums(output: Array, module: Any) -> Array:
        base = plgpu.load(base_ref.at[index_grid(source, output[None, :])]).astype(jnp.float32)
        return _with_slots(base, ranks_ref, up_ref, source, output, module, which, how)

    if how.activation is None:
        out = sums(here, _module(how, first))
    else:
        gate, up = sums(2 * here, 0), sums(2 * here + 1, how.fused.num_modules - 1)
        out = how.activation(gate) * up
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    plgpu.store(out_ref.at[index_grid(row, column[None, :])], out.astype(out_ref.dtype), mask=mask)


def _module(how: Adding, column: Array) -> Array:
    along = lax.rem(lax.div(column, how.num_inner), how.num_along)
    return sum(((along >= start).astype(jnp.int32) for start in how.fused.starts), jnp.zeros_like(along))


def _with_slots(
    total: Array,
    ranks_ref: Any,
    up_ref: Any,
    row: Array,
    output: Array,
    module: Any,
    which: Array,
    how: Adding,
) -> Array:
    """total [R, C], and what the rows' own slots add to these outputs of one module."""
    num_slots, num_ranks = how.num_slots, up_ref.shape[1] // how.num_slots
    rank = lax.iota(jnp.int32, max(next_power(num_ranks), MIN_DOT))
    inside = None if len(rank) == num_ranks else rank < num_ranks
    has = (which > 0)[:, None] & (rank < num_ranks)[None, :]
    at = index_grid(row, (module * num_ranks + rank)[None, :])
    parts = [plgpu.load(ranks_ref.at[(i, *at)], mask=has, other=0) for i in range(len(ranks_ref))]
    ranks = sum(parts[1:], parts[0]).astype(up_ref.dtype)

    def read(slot: Any) -> Array:
        return read_tile(up_ref, (), output, slot * num_ranks + rank, inside)

    def add(slot: Any, weights: Array, total: Array) -> Array:
        is_own = (which == slot + 1)[:, None]
        return total + dot(jnp.where(is_own, ranks, jnp.zeros_like(ranks)), weights.T)

    if how.asks_all:
        for begin in range(0, num_slots, TOGETHER):
            slots = range(begin, min(begin + TOGETHER, num_slots))
            for slot, weights in [(slot, read(slot)) for slot in slots]:
                total = add(slot, weights, total)
        return total

    def add_used(slot: Array, total: Array) -> Array:
        is_used = jnp.sum((which == slot + 1).astype(jnp.int32)) > 0
        return lax.cond(is_used, lambda total: add(slot, read(slot), total), lambda total: total, total)

    lowest = jnp.min(jnp.where(which > 0, which, num_slots + 1)) - 1
    return lax.fori_loop(lowest, jnp.max(which), add_used, total)
