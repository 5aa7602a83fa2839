"""What adapters add to a product on an NVIDIA GPU, by Pallas-Triton kernels, for each of their two factors.

The first leaves for each row the ranks of its own slot. The second adds to the base's product: to heads
where they are made (gpu_heads.py); of gates and ups it makes what goes on, so that these are read once, as
without adapters. Of decodes a program has a row and asks its slot, behind attention and feed-forward in a
kernel that also norms; where outputs are many it has a tile of rows, which asks all slots. Of prompts, whose
rows of one adapter follow each other, a tile asks the one or two that its rows have, and behind attention and
feed-forward makes only what they add, which cuBLAS adds. docs/kernels.md tells what was measured.
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

from hex_llm.kernels.adapters import AdapterKernels, Fused, Norm, Pending
from hex_llm.kernels.experts import Activation
from hex_llm.kernels.gpu_launch import MIN_DOT, dot, index_grid, launched, next_power, quick, read_tile

FEW_ROWS = 256  # decodes
MANY_OUTPUTS = 8192  # so many are read once for all rows
MIN_SPLIT = 512  # the fewest inputs that are worth a program
SPREAD_DEPTH = 64  # ranks of all slots at a time
BY_ROW = "by row"
JOIN_COLUMNS, JOIN_WARPS = 4096, 16  # at a time; of a row


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
    return Ranking(64, 128, 8 if num_rows <= FEW_ROWS else 1, 4, 4)


def ranking_beside(num_rows: int, num_outputs: int) -> Ranking:
    """Beside a product that leaves a third of the multiprocessors alone: few enough programs to need no
    others, and enough to end with it. The more outputs, the longer it takes for an input."""
    splits = max(min(8192 // num_outputs, 8), 2)
    return ranking(num_rows)._replace(splits=splits)


def adding(num_rows: int, num_outputs: int, gated: bool) -> Adding:
    if num_rows < MIN_DOT or (num_rows <= FEW_ROWS and num_outputs <= MANY_OUTPUTS):
        return Adding(BY_ROW, 1, 256, 4, 2)
    if num_rows <= FEW_ROWS:
        return Adding("spread", 64, 64, 4, 4)
    return Adding("used", 32, 64 if gated else 128, 4, 2)


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
    up [slots, *outputs, ranks]; which [T] counts slots from 1, 0: none."""
    ranks = ranks_of_rows(x, down, which, first)
    if activation is None and len(x) > FEW_ROWS:
        return out + _added(None, ranks, up, fused, which, None, second).reshape(out.shape)
    added = _added(out.reshape(len(x), -1), ranks, up, fused, which, activation, second)
    return added.reshape(out.shape) if activation is None else added


def begin_adapters(x: Array, down: Array, up: Array, fused: Fused, which: Array) -> Pending:
    """See kernels.adapters.BeginAdapters."""
    return Pending(ranks_of_rows(x, down, which), up, fused, which)


def join_adapters(
    around: Array, out: Array, x: Array, down: Array, up: Array, which: Array, norm: Norm
) -> tuple[Array, Array | None]:
    """See kernels.adapters.JoinAdapters. Of prompts what adapters add comes first: then cuBLAS adds all that
    to the product."""
    if len(x) > FEW_ROWS:
        return _added(around, ranks_of_rows(x, down, which), up, Fused(), which, None, None) + out, None
    base, ranks = around + out, ranks_of_rows(x, down, which, ranking_beside(len(x), out.shape[1]))
    kernel = partial(_join_kernel, eps=norm.eps, offset=norm.offset)
    call = launched(kernel, (len(x),), [base, base], JOIN_WARPS, 1, {0: 0})
    joined, normed = call(base, ranks, up, which, norm.weight)
    return joined, normed


# ---- the first factor


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


# ---- the second factor


class Cut(NamedTuple):
    """Adding, and of what."""

    how: Adding
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
    num_slots, *outputs, num_ranks = up.shape
    num_rows, num_outputs = len(which), math.prod(outputs)
    how = how or adding(num_rows, num_outputs, activation is not None)
    how = how if how.form == BY_ROW else how._replace(rows=_tile_rows(num_rows, how.rows))
    inner, along = math.prod(outputs[fused.axis + 1 :]), outputs[fused.axis]
    if activation is None and fused.starts:
        how = how._replace(columns=min(how.columns, inner & -inner))
    if how.form == "spread":
        ranks = _spread(ranks, which, num_slots, num_ranks, up.dtype)
    cut = Cut(how, fused, inner, along, activation)
    out = jax.ShapeDtypeStruct((num_rows, num_outputs // (1 if activation is None else 2)), up.dtype)
    aliases = {0: 0} if activation is None and base is not None else {}
    grid = (pl.cdiv(num_rows, how.rows), pl.cdiv(out.shape[1], how.columns))
    whose: Any = which if how.form == BY_ROW else None  # ranks that are spread say it themselves
    if how.form == "used":
        whose = which, shared_slots(which, how.rows)
    given = (ranks, up.reshape(num_slots, -1, num_ranks), whose)
    kernel = _row_kernel if how.form == BY_ROW else _tile_kernel
    call = launched(partial(kernel, cut=cut), grid, out, how.warps, how.stages, aliases)
    result: Array = call(*given) if base is None else call(base, *given)
    return result


def _spread(ranks: Array, which: Array, num_slots: int, num_ranks: int, dtype: Any) -> Array:
    """[1, T, modules * slots * ranks]: each module's ranks at its row's slot, zeros at others."""
    own = jnp.sum(ranks.astype(jnp.float32), axis=0).astype(dtype).reshape(len(which), -1, 1, num_ranks)
    is_own = which[:, None] == jnp.arange(1, num_slots + 1)
    return jnp.where(is_own[:, None, :, None], own, 0).reshape(1, len(which), -1)


def shared_slots(which: Array, num_rows: int) -> Array:
    """The slot that all rows of a tile have, counted from 1; 0: there is none."""
    tiles = jnp.pad(which, (0, -len(which) % num_rows), mode="edge").reshape(-1, num_rows)
    return jnp.where(jnp.all(tiles == tiles[:, :1], axis=1), tiles[:, 0], 0)


def _join_kernel(
    base_ref: Any,
    ranks_ref: Any,
    up_ref: Any,
    which_ref: Any,
    weight_ref: Any,
    out_ref: Any,
    normed_ref: Any,
    *,
    eps: float,
    offset: float,
) -> None:
    """A row, all of which its norm must know."""
    row, width = pl.program_id(0), out_ref.shape[1]
    size = min(next_power(width), JOIN_COLUMNS)
    is_whole = width % size == 0
    columns = [first + lax.iota(jnp.int32, size) for first in range(0, width, size)]
    inside = [None if is_whole else column < width for column in columns]
    # What is not there is read from somewhere else instead, and not stored.
    source = [column if is_whole else jnp.minimum(column, width - 1) for column in columns]
    add = row_adder(ranks_ref, up_ref, which_ref, row, jnp.int32(0))
    base = [plgpu.load(base_ref.at[row, column]).astype(jnp.float32) for column in source]
    weights = [plgpu.load(weight_ref.at[column]).astype(jnp.float32) for column in source]
    total = [(x + add(column)).astype(out_ref.dtype) for x, column in zip(base, source, strict=True)]
    squares = [jnp.square(x.astype(jnp.float32)) for x in total]
    squares = [x if i is None else jnp.where(i, x, 0) for x, i in zip(squares, inside, strict=True)]
    factor = lax.rsqrt(sum(map(jnp.sum, squares)) / width + eps)
    for column, mask, x, weight in zip(columns, inside, total, weights, strict=True):
        normed = x.astype(jnp.float32) * factor * (weight + offset)
        plgpu.store(out_ref.at[row, column], x, mask=mask)
        plgpu.store(normed_ref.at[row, column], normed.astype(normed_ref.dtype), mask=mask)


def _row_kernel(
    base_ref: Any, ranks_ref: Any, up_ref: Any, which_ref: Any, out_ref: Any, *, cut: Cut
) -> None:
    row, first, width = pl.program_id(0), pl.program_id(1) * cut.how.columns, out_ref.shape[1]
    column = first + lax.iota(jnp.int32, cut.how.columns)
    here = column if width % cut.how.columns == 0 else jnp.minimum(column, width - 1)

    def add(output: Array, module: Array) -> Array:
        base = plgpu.load(base_ref.at[row, output]).astype(jnp.float32)
        return base + row_adder(ranks_ref, up_ref, which_ref, row, module)(output)

    if cut.activation is None:
        out = add(here, _module(cut, first))
    else:
        out = quick(cut.activation)(add(2 * here, jnp.int32(0)))
        out *= add(2 * here + 1, jnp.int32(cut.fused.num_modules - 1))
    plgpu.store(out_ref.at[row, column], out.astype(out_ref.dtype), mask=column < width)


def row_adder(
    ranks_ref: Any, up_ref: Any, which_ref: Any, row: Array, module: Array
) -> Callable[[Array], Array]:
    """outputs [*modules, C] of these modules -> float32: what the row's own adapter adds to them. `up_ref`
    [slots, outputs, ranks]."""
    num_ranks, which = up_ref.shape[2], plgpu.load(which_ref.at[row])
    rank = lax.iota(jnp.int32, next_power(num_ranks))

    def read(ref: Any, *index: Array) -> Array:
        """The last index is where the ranks begin."""
        shape = (*index[-1].shape, len(rank))
        *places, start = (jnp.broadcast_to(one[..., None], shape) for one in index)
        at = jnp.broadcast_to(rank, shape)
        mask = None if len(rank) == num_ranks else at < num_ranks
        return plgpu.load(ref.at[(*places, start + at)], mask=mask, other=None if mask is None else 0)

    splits = [read(ranks_ref, jnp.int32(i), row, module * num_ranks) for i in range(len(ranks_ref))]
    # As tiles have them, in which they are multiplied in the type of the second factor.
    ranks = sum(splits[1:], splits[0]).astype(up_ref.dtype).astype(jnp.float32)[..., None, :]

    def add(output: Array) -> Array:
        up = read(up_ref, jnp.maximum(which - 1, 0), output, jnp.zeros_like(output))
        return jnp.where(which > 0, jnp.sum(up.astype(jnp.float32) * ranks, axis=-1), 0)

    return add


def _tile_kernel(*refs: Any, cut: Cut) -> None:
    *base_ref, ranks_ref, up_ref, whose_refs, out_ref = refs
    how, (num_rows, width), tile = cut.how, out_ref.shape, pl.program_id(0)
    row = tile * how.rows + lax.iota(jnp.int32, how.rows)
    source = jnp.minimum(row, num_rows - 1)
    first = pl.program_id(1) * how.columns
    column = first + lax.iota(jnp.int32, how.columns)
    here = column if width % how.columns == 0 else jnp.minimum(column, width - 1)

    def read(output: Array) -> Array:
        if not base_ref:
            return jnp.zeros((len(source), len(output)), jnp.float32)
        return plgpu.load(base_ref[0].at[index_grid(source, output[None, :])])

    if cut.activation is None:
        parts = [Part(read(here).astype(jnp.float32), here, _module(cut, first))]
    else:
        gate, up = _both(read, first, width, how)
        last = cut.fused.num_modules - 1
        parts = [
            Part(gate.astype(jnp.float32), 2 * here, 0),
            Part(up.astype(jnp.float32), 2 * here + 1, last),
        ]
    out, *others = FORMS[how.form](ranks_ref, up_ref, source, whose_refs, parts)
    if cut.activation is not None:
        out = quick(cut.activation)(out) * others[0]
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


# ---- forms of the second product in tiles: the parts' totals, and what the rows' own slots add to them


class Part(NamedTuple):
    total: Array  # [R, C]
    output: Array  # [C], all of one module
    module: Any


class Used(NamedTuple):
    """What the rows of a tile ask, in kernels. Factors are each part's first ones."""

    ranks: Any  # [1, T, modules * ranks]
    up: Any  # [slots, outputs, ranks]
    which: Any  # [T]
    shared: Array  # the slot that all rows have, as but for few tiles; 0: there is none
    row: Array

    def factors(self, parts: list[Part]) -> list[Array]:
        rank, inside = self._rank()
        places = [part.module * self.up.shape[2] + rank for part in parts]
        own = [read_tile(self.ranks, (jnp.int32(0),), self.row, at, inside) for at in places]
        return [one.astype(self.up.dtype) for one in own]

    def add_one(self, parts: list[Part], factors: list[Array]) -> list[Array]:
        """Where there is a shared one."""
        found = self._products(self.shared - 1, parts, factors)
        return [part.total + product for part, product in zip(parts, found, strict=True)]

    def add_several(self, parts: list[Part], factors: list[Array]) -> list[Array]:
        """Where there is none."""
        which = plgpu.load(self.which.at[self.row])

        def add(slot: Array, totals: list[Array]) -> list[Array]:
            is_own = which == slot + 1

            def added() -> list[Array]:
                # Rows of other slots throw away what its product says: so the first factor stays as it is.
                found = self._products(slot, parts, factors)
                return [x + jnp.where(is_own[:, None], y, 0) for x, y in zip(totals, found, strict=True)]

            return lax.cond(jnp.sum(is_own.astype(jnp.int32)) > 0, added, lambda: totals)

        lowest = jnp.min(jnp.where(which > 0, which, len(self.up) + 1)) - 1
        return list(lax.fori_loop(lowest, jnp.max(which), add, [part.total for part in parts]))

    def _products(self, slot: Array, parts: list[Part], factors: list[Array]) -> list[Array]:
        rank, inside = self._rank()
        ups = [read_tile(self.up, (slot,), part.output, rank, inside) for part in parts]
        return [dot(factor, up.T) for factor, up in zip(factors, ups, strict=True)]

    def _rank(self) -> tuple[Array, Array | None]:
        num_ranks = self.up.shape[2]
        rank = lax.iota(jnp.int32, max(next_power(num_ranks), MIN_DOT))
        return rank, None if len(rank) == num_ranks else rank < num_ranks


def _used(ranks_ref: Any, up_ref: Any, row: Array, whose_refs: Any, parts: list[Part]) -> list[Array]:
    used = Used(ranks_ref, up_ref, whose_refs[0], whose_refs[1][pl.program_id(0)], row)
    given = parts, used.factors(parts)
    return lax.cond(used.shared > 0, partial(used.add_one, *given), partial(used.add_several, *given))


def _all_spread(ranks_ref: Any, up_ref: Any, row: Array, _: Any, parts: list[Part]) -> list[Array]:
    """All slots as one product, of rows that are zeros but for their own."""
    num_slots, _, num_ranks = up_ref.shape
    num = num_slots * num_ranks
    depth = min(max(next_power(num), MIN_DOT), SPREAD_DEPTH)

    def add(part: Part, i: Array, total: Array) -> Array:
        place = i * depth + lax.iota(jnp.int32, depth)
        inside = None if num % depth == 0 else place < num
        ranks = read_tile(ranks_ref, (jnp.int32(0),), row, part.module * num + place, inside)
        slot, rank = lax.div(place, num_ranks), lax.rem(place, num_ranks)
        output, rank = index_grid(part.output, rank[None, :])
        mask = None if inside is None else jnp.broadcast_to(inside[None, :], rank.shape)
        at = (jnp.broadcast_to(slot[None, :], rank.shape), output, rank)
        up = plgpu.load(up_ref.at[at], mask=mask, other=None if mask is None else 0)
        return total + dot(ranks, up.T)

    return [lax.fori_loop(0, pl.cdiv(num, depth), partial(add, part), part.total) for part in parts]


FORMS = {"used": _used, "spread": _all_spread}
KERNELS = AdapterKernels(add_adapters, begin_adapters, join_adapters, slots_first=True)
