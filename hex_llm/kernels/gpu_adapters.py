"""What adapters add to a product on an NVIDIA GPU: two Pallas-Triton kernels, one for each of their factors.

The first leaves for each row the ranks of its own slot. The second adds to the base's product in place; of
gates and ups it makes what goes on, so that these are read once, as without adapters. A program has one of
very few rows, and its slot. Of more rows it has a tile: of decodes each tile asks all slots, for what is
waited for are reads, and so none depends on another; of prompts, whose rows of one adapter follow each other,
it asks the one or two that its rows have, and makes, but for gates and ups, only what they add, which cuBLAS
adds. docs/kernels.md tells what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
MIN_SPLIT = 512  # the fewest inputs that are worth a program
SPREAD_DEPTH = 64  # ranks of all slots at a time
BY_ROW = "by row"


class Ranking(NamedTuple):
    """How the first product is cut."""

    rows: int
    depth: int  # inputs at a time
    splits: int  # at most: programs that share the inputs of a row; all of the second product read each part
    warps: int
    stages: int


class Adding(NamedTuple):
    """How the second product is cut."""

    form: str  # a name in FORMS, or BY_ROW
    rows: int
    columns: int  # of the result, all of one module
    warps: int
    stages: int


def ranking(num_rows: int) -> Ranking:
    return Ranking(64, 128, 8, 4, 4) if num_rows <= FEW_ROWS else Ranking(128, 128, 1, 4, 4)


def adding(num_rows: int, width: int, gated: bool) -> Adding:
    if num_rows < MIN_DOT:
        return Adding(BY_ROW, 1, 256, 4, 2)
    if num_rows <= FEW_ROWS:  # so that there is work for all multiprocessors
        return Adding("spread" if gated else "selected", 64, 32 if width <= 8192 else 64, 4, 4)
    return Adding("used", 64, 64 if gated else 128, 4, 2)


def add_adapters(
    out: Array,
    x: Array,
    down: Array,
    up: Array,
    fused: Fused,
    which: Array,
    activation: Activation | None = None,
    first: Ranking | None = None,
    second: Adding | None = None,
) -> Array:
    """See kernels.adapters.AddAdapters. out [T, *outputs], x [T, K], down [slots, modules * ranks, K],
    up [*outputs, slots, ranks]; which [T] counts slots from 1, 0: none."""
    ranks = ranks_of_rows(x, down, which, first)
    if activation is None and len(x) > FEW_ROWS:
        return out + _added(None, ranks, up, fused, which, None, second).reshape(out.shape)
    added = _added(out.reshape(len(x), -1), ranks, up, fused, which, activation, second)
    return added.reshape(out.shape) if activation is None else added


def ranks_of_rows(x: Array, down: Array, which: Array, how: Ranking | None = None) -> Array:
    """[splits, T, ranks], each row's in its own slot, to be summed over splits; without a slot anything."""
    down, how = down.reshape(*down.shape[:2], -1), how or ranking(len(x))
    num_slots, num_ranks, num_inputs = down.shape
    splits = max(min(how.splits, num_inputs // MIN_SPLIT), 1)
    how = how._replace(rows=_tile_rows(len(x), how.rows), splits=splits)
    out = jax.ShapeDtypeStruct((splits, len(x), num_ranks), x.dtype if splits == 1 else jnp.float32)
    grid = (pl.cdiv(len(x), how.rows), num_slots, splits)
    call = launched(partial(_ranks_kernel, how=how), grid, out, how.warps, how.stages)
    result: Array = call(x, down, which)
    return result


def _tile_rows(num_rows: int, most: int) -> int:
    return min(max(next_power(num_rows), MIN_DOT), most)


def _ranks_kernel(x_ref: Any, down_ref: Any, which_ref: Any, out_ref: Any, *, how: Ranking) -> None:
    tile, slot, split = (pl.program_id(axis) for axis in range(3))
    num_rows, num_inputs = x_ref.shape
    num_ranks = down_ref.shape[1]
    row = tile * how.rows + lax.iota(jnp.int32, how.rows)
    # What is not there is read from somewhere else instead, and not stored.
    source = jnp.minimum(row, num_rows - 1)
    is_own = plgpu.load(which_ref.at[source]) == slot + 1

    @pl.when(jnp.sum(is_own.astype(jnp.int32)) > 0)
    def multiply() -> None:
        rank = lax.iota(jnp.int32, max(next_power(num_ranks), MIN_DOT))
        here = jnp.minimum(rank, num_ranks - 1)

        def add(i: Array, total: Array) -> Array:
            deep = i * how.depth + lax.iota(jnp.int32, how.depth)
            inside = None if num_inputs % how.depth == 0 else deep < num_inputs
            x = read_tile(x_ref, (), source, deep, inside)
            return total + dot(x, read_tile(down_ref, (slot,), here, deep, inside).T)

        length = pl.cdiv(pl.cdiv(num_inputs, how.depth), how.splits)
        last = jnp.minimum((split + 1) * length, pl.cdiv(num_inputs, how.depth))
        total = lax.fori_loop(split * length, last, add, jnp.zeros((how.rows, len(rank)), jnp.float32))
        mask = (is_own & (row < num_rows))[:, None] & (rank < num_ranks)[None, :]
        at = (split, *index_grid(row, rank[None, :]))
        plgpu.store(out_ref.at[at], total.astype(out_ref.dtype), mask=mask)


class Cut(NamedTuple):
    """Adding, and of what."""

    how: Adding
    num_slots: int
    num_ranks: int
    fused: Fused
    num_inner: int  # outputs behind the axis of the modules
    num_along: int  # outputs along it
    activation: Activation | None


def _added(
    base: Array | None,
    ranks: Array,
    up: Array,
    fused: Fused,
    which: Array,
    activation: Activation | None,
    how: Adding | None,
) -> Array:
    """[T, outputs]; without a base what is added to it."""
    *outputs, num_slots, num_ranks = up.shape
    num_rows, width = len(which), math.prod(outputs) // (1 if activation is None else 2)
    how = how or adding(num_rows, width, activation is not None)
    how = how if how.form == BY_ROW else how._replace(rows=_tile_rows(num_rows, how.rows))
    inner, along = math.prod(outputs[fused.axis + 1 :]), outputs[fused.axis]
    if activation is None and fused.starts:
        how = how._replace(columns=min(how.columns, inner & -inner))
    if how.form == "spread":
        ranks = _spread(ranks, which, num_slots, num_ranks, up.dtype)
    cut = Cut(how, num_slots, num_ranks, fused, inner, along, activation)
    out = jax.ShapeDtypeStruct((num_rows, width), up.dtype)
    aliases = {0: 0} if activation is None and base is not None else {}
    grid = (pl.cdiv(num_rows, how.rows), pl.cdiv(width, how.columns))
    kernel = _row_kernel if how.form == BY_ROW else _tile_kernel
    call = launched(partial(kernel, cut=cut), grid, out, how.warps, how.stages, aliases)
    given = (ranks, up.reshape(-1, num_slots * num_ranks), which)
    result: Array = call(*given) if base is None else call(base, *given)
    return result


def _spread(ranks: Array, which: Array, num_slots: int, num_ranks: int, dtype: Any) -> Array:
    """[1, T, modules * slots * ranks]: each module's ranks at its row's slot, zeros at others."""
    own = jnp.sum(ranks.astype(jnp.float32), axis=0).astype(dtype).reshape(len(which), -1, 1, num_ranks)
    is_own = which[:, None] == jnp.arange(1, num_slots + 1)
    return jnp.where(is_own[:, None, :, None], own, 0).reshape(1, len(which), -1)


def _row_kernel(
    base_ref: Any, ranks_ref: Any, up_ref: Any, which_ref: Any, out_ref: Any, *, cut: Cut
) -> None:
    row, first, width = pl.program_id(0), pl.program_id(1) * cut.how.columns, out_ref.shape[1]
    column = first + lax.iota(jnp.int32, cut.how.columns)
    here = column if width % cut.how.columns == 0 else jnp.minimum(column, width - 1)
    which = plgpu.load(which_ref.at[row])
    rank = lax.iota(jnp.int32, next_power(cut.num_ranks))

    def add(output: Array, module: Any) -> Array:
        base = plgpu.load(base_ref.at[row, output]).astype(jnp.float32)
        ranks = _own_ranks(ranks_ref, row[None], module, rank, cut).astype(up_ref.dtype)
        up = _of_slot(up_ref, output, jnp.maximum(which - 1, 0), rank, cut)
        added = jnp.sum(up.astype(jnp.float32) * ranks.astype(jnp.float32), axis=1)
        return base + jnp.where(which > 0, added, 0)

    if cut.activation is None:
        out = add(here, _module(cut, first))
    else:
        out = cut.activation(add(2 * here, 0)) * add(2 * here + 1, cut.fused.num_modules - 1)
    plgpu.store(out_ref.at[row, column], out.astype(out_ref.dtype), mask=column < width)


def _tile_kernel(*refs: Any, cut: Cut) -> None:
    *base_ref, ranks_ref, up_ref, which_ref, out_ref = refs
    how, (num_rows, width) = cut.how, out_ref.shape
    row = pl.program_id(0) * how.rows + lax.iota(jnp.int32, how.rows)
    source = jnp.minimum(row, num_rows - 1)
    first = pl.program_id(1) * how.columns
    column = first + lax.iota(jnp.int32, how.columns)
    here = column if width % how.columns == 0 else jnp.minimum(column, width - 1)
    which = plgpu.load(which_ref.at[source])
    add = partial(FORMS[how.form], ranks_ref, up_ref, source, which, cut)

    def read(output: Array) -> Array:
        if not base_ref:
            return jnp.zeros((len(source), len(output)), jnp.float32)
        return plgpu.load(base_ref[0].at[index_grid(source, output[None, :])])

    if cut.activation is None:
        out = add(read(here).astype(jnp.float32), here, _module(cut, first))
    else:
        gate, up = _both(read, first, width, how)
        gate = add(gate.astype(jnp.float32), 2 * here, 0)
        up = add(up.astype(jnp.float32), 2 * here + 1, cut.fused.num_modules - 1)
        out = cut.activation(gate) * up
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    plgpu.store(out_ref.at[index_grid(row, column[None, :])], out.astype(out_ref.dtype), mask=mask)


def _both(read: Any, first: Array, width: int, how: Adding) -> tuple[Array, Array]:
    """Gates and ups, which lie by turns: one read of all, in the order of memory."""
    output = 2 * first + lax.iota(jnp.int32, 2 * how.columns)
    output = output if width % how.columns == 0 else jnp.minimum(output, 2 * width - 1)
    gate, up = jnp.unstack(read(output).reshape(how.rows, how.columns, 2), axis=2)
    return gate, up


def _module(cut: Cut, column: Array) -> Array:
    along = lax.rem(lax.div(column, cut.num_inner), cut.num_along)
    return sum(((along >= start).astype(jnp.int32) for start in cut.fused.starts), jnp.zeros_like(along))


# ---- forms of the second product: total [R, C], and what the rows' own slots add to these outputs of one
# module


def _own_ranks(ranks_ref: Any, row: Array, module: Any, rank: Array, cut: Cut) -> Array:
    """[R, ranks], anything in rows without a slot."""
    at, inside = module * cut.num_ranks + rank, _inside(rank, cut)
    parts = [read_tile(ranks_ref, (jnp.int32(i),), row, at, inside) for i in range(len(ranks_ref))]
    return sum(parts[1:], parts[0])


def _of_slot(up_ref: Any, output: Array, slot: Any, rank: Array, cut: Cut) -> Array:
    return read_tile(up_ref, (), output, slot * cut.num_ranks + rank, _inside(rank, cut))


def _inside(rank: Array, cut: Cut) -> Array | None:
    return None if len(rank) == cut.num_ranks else rank < cut.num_ranks


def _adder(
    ranks_ref: Any, up_ref: Any, row: Array, which: Array, cut: Cut, output: Array, module: Any
) -> Callable[[Array, Array], Array]:
    """(slot, total) -> total. The rows of other slots throw away what its product says: so the first factor
    stays where it is."""
    rank = lax.iota(jnp.int32, max(next_power(cut.num_ranks), MIN_DOT))
    ranks = _own_ranks(ranks_ref, row, module, rank, cut).astype(up_ref.dtype)

    def add(slot: Array, total: Array) -> Array:
        product = dot(ranks, _of_slot(up_ref, output, slot, rank, cut).T)
        return total + jnp.where((which == slot + 1)[:, None], product, 0)

    return add


def _selected(
    ranks_ref: Any, up_ref: Any, row: Array, which: Array, cut: Cut, total: Array, output: Array, module: Any
) -> Array:
    """All slots, one after another."""
    add = _adder(ranks_ref, up_ref, row, which, cut, output, module)
    return lax.fori_loop(0, cut.num_slots, add, total)


def _used(
    ranks_ref: Any, up_ref: Any, row: Array, which: Array, cut: Cut, total: Array, output: Array, module: Any
) -> Array:
    """The lowest slot at once, which is that of all rows but for few tiles; then others that some row has."""
    add = _adder(ranks_ref, up_ref, row, which, cut, output, module)

    def add_used(slot: Array, total: Array) -> Array:
        is_used = jnp.sum((which == slot + 1).astype(jnp.int32)) > 0
        return lax.cond(is_used, lambda total: add(slot, total), lambda total: total, total)

    lowest = jnp.min(jnp.where(which > 0, which, cut.num_slots)) - 1
    return lax.fori_loop(lowest + 1, jnp.max(which), add_used, add(lowest, total))


def _all_spread(
    ranks_ref: Any, up_ref: Any, row: Array, which: Array, cut: Cut, total: Array, output: Array, module: Any
) -> Array:
    """All slots as one product, of rows that are zeros but for their own."""
    num = up_ref.shape[1]
    depth = min(max(next_power(num), MIN_DOT), SPREAD_DEPTH)

    def add(i: Array, total: Array) -> Array:
        place = i * depth + lax.iota(jnp.int32, depth)
        inside = None if num % depth == 0 else place < num
        ranks = read_tile(ranks_ref, (jnp.int32(0),), row, module * num + place, inside)
        return total + dot(ranks, read_tile(up_ref, (), output, place, inside).T)

    return lax.fori_loop(0, pl.cdiv(num, depth), add, total)


FORMS = {
    "selected": _selected,
    "used": _used,
    "spread": _all_spread,
}
