"""What adapters add to a product on an NVIDIA GPU, by Pallas-Triton kernels, for each of their two factors.

The first leaves for each row the ranks of its own slot. The second adds to the base's product: to heads
where they are made (gpu_heads.py); of gates and ups it makes what goes on, so that these are read once, as
without adapters. Of decodes a program has a row and asks its slot, behind attention and feed-forward in a
kernel that also norms; where outputs are many it has a tile of rows, which asks all slots. Prompts are added
to in tiles (gpu_adapter_tiles.py), behind attention and feed-forward before the product, which cuBLAS then
adds. docs/kernels.md tells what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels.adapters import AdapterKernels, Fused, Norm, Owners, Pending, Ranked, Tiles
from hex_llm.kernels.experts import Activation
from hex_llm.kernels.gpu_adapter_tiles import (
    FEW_ROWS,
    Product,
    add_in_tiles,
    tiles_for,
    tiles_of_many,
)
from hex_llm.kernels.gpu_launch import (
    MIN_DOT,
    ROW_WARPS,
    Place,
    dot,
    index_grid,
    launched,
    next_power,
    places,
    quick,
    read_place,
    read_tile,
    store_joined,
    store_row,
)

MANY_OUTPUTS = 8192  # so many are read once for all rows
MIN_SPLIT = 512  # the fewest inputs that are worth a program
SPREAD_DEPTH = 64  # ranks of all slots at a time


class Ranking(NamedTuple):
    """How the first product is cut."""

    rows: int
    depth: int  # inputs at a time
    splits: int  # at most: programs that share the inputs of a row; all of the second product read each part
    warps: int
    stages: int


class Adding(NamedTuple):
    """How the second product of few rows is cut."""

    rows: int  # 1: a program has one, and asks its slot; others ask all
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


def adding(num_rows: int, num_outputs: int) -> Adding:
    if num_rows < MIN_DOT or num_outputs <= MANY_OUTPUTS:
        return Adding(1, 256, 4, 2)
    return Adding(64, 64, 4, 4)


def add_adapters(
    out: Array,
    x: Array | Ranked,
    down: Array,
    up: Array,
    fused: Fused,
    owners: Owners,
    activation: Activation | None = None,
    following: Array | None = None,
    first: Ranking | None = None,
    second: Any = None,
) -> Array | Ranked:
    """See kernels.adapters.AddAdapters. out [T, *outputs], x [T, K], down [slots, modules * ranks, K],
    up [slots, *outputs, ranks]. `second`: an Adding of few rows, of others a Tiling."""
    base, ranks = out.reshape(len(out), -1), ranks_of_rows(x, down, owners, first)
    if len(base) <= FEW_ROWS:
        added = _added(base, ranks, up, Product.of(up.shape[1:-1], fused, activation), owners.which, second)
        return added.reshape(out.shape) if activation is None else added
    if activation is None:
        return out + add_in_tiles(None, ranks, up, fused, owners, tiling=second)[0].reshape(out.shape)
    made, ranks_behind = add_in_tiles(base, ranks, up, fused, owners, activation, following, second)
    return made if ranks_behind is None else Ranked(made, ranks_behind)


def begin_adapters(x: Array, down: Array, up: Array, fused: Fused, owners: Owners) -> Pending:
    """See kernels.adapters.BeginAdapters."""
    return Pending(ranks_of_rows(x, down, owners), up, fused, owners)


def join_adapters(
    around: Array, out: Array, x: Array | Ranked, down: Array, up: Array, owners: Owners, norm: Norm
) -> tuple[Array, Array | None]:
    """See kernels.adapters.JoinAdapters. Of prompts what adapters add comes first: then cuBLAS adds all that
    to the product."""
    num_rows = len(out)
    if num_rows > FEW_ROWS:
        return add_in_tiles(around, ranks_of_rows(x, down, owners), up, Fused(), owners)[0] + out, None
    base, ranks = around + out, ranks_of_rows(x, down, owners, ranking_beside(num_rows, out.shape[1]))
    kernel = partial(_join_kernel, eps=norm.eps, offset=norm.offset)
    call = launched(kernel, (num_rows,), [base, base], ROW_WARPS, 1, {0: 0})
    joined, normed = call(base, ranks, up, owners.which, norm.weight)
    return joined, normed


# ---- the first factor


def ranks_of_rows(x: Array | Ranked, down: Array, owners: Owners, how: Ranking | None = None) -> Array:
    """[splits, T, ranks], each row's in its own slot, to be summed over splits; without a slot anything."""
    if isinstance(x, Ranked):
        return x.ranks
    down, how = down.reshape(*down.shape[:2], -1), how or ranking(len(x))
    num_slots, num_ranks, num_inputs = down.shape
    splits = max(min(how.splits, num_inputs // MIN_SPLIT), 1)
    how = how._replace(rows=_tile_rows(len(x), how.rows), splits=splits)
    out = jax.ShapeDtypeStruct((splits, len(x), num_ranks), x.dtype if splits == 1 else jnp.float32)
    whose: Any = owners.which
    grid: tuple[int, ...] = splits, pl.cdiv(len(x), how.rows), num_slots  # each tile for each slot
    if len(x) > FEW_ROWS:
        whose = tiles_for(owners, num_slots, how.rows)
        grid = splits, len(whose.slots)
    call = launched(partial(_ranks_kernel, how=how), grid, out, how.warps, how.stages)
    result: Array = call(x, down, whose)
    return result


def _tile_rows(num_rows: int, most: int) -> int:
    return min(max(next_power(num_rows), MIN_DOT), most)


def _ranks_kernel(x_ref: Any, down_ref: Any, whose: Any, out_ref: Any, *, how: Ranking) -> None:
    split, tile = pl.program_id(0), pl.program_id(1)
    (num_rows, num_inputs), num_ranks = x_ref.shape, down_ref.shape[1]
    nth = lax.iota(jnp.int32, how.rows)
    # What is not there is read from somewhere else instead, and not stored.
    if isinstance(whose, Tiles):
        rows: Any = whose.rows
        slot, row = whose.slots[tile] - 1, plgpu.load(rows.at[tile, nth])
        source = jnp.minimum(row, num_rows - 1)
        is_own = (row < num_rows) & (slot >= 0)
    else:
        slot, row = pl.program_id(2), tile * how.rows + nth
        source = jnp.minimum(row, num_rows - 1)
        is_own = (plgpu.load(whose.at[source]) == slot + 1) & (row < num_rows)

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
        at = (split, *index_grid(row, rank[None, :]))
        mask = is_own[:, None] & (rank < num_ranks)[None, :]
        plgpu.store(out_ref.at[at], total.astype(out_ref.dtype), mask=mask)


# ---- the second factor


def _added(base: Array, ranks: Array, up: Array, product: Product, which: Array, how: Adding | None) -> Array:
    """[T, outputs] of few rows."""
    num_slots, num_ranks, num_rows = len(up), up.shape[-1], len(which)
    how = how or adding(num_rows, base.shape[1])
    by_row = how.rows == 1
    how = how._replace(
        rows=1 if by_row else _tile_rows(num_rows, how.rows), columns=product.columns(how.columns)
    )
    width = base.shape[1] // (1 if product.activation is None else 2)
    whose = [which] if by_row else []  # ranks that are spread say it themselves
    ranks = ranks if by_row else _spread(ranks, which, num_slots, num_ranks, up.dtype)
    kernel = partial(_row_kernel if by_row else _spread_kernel, how=how, product=product)
    grid = (pl.cdiv(num_rows, how.rows), pl.cdiv(width, how.columns))
    aliases = {0: 0} if product.activation is None else {}
    out = jax.ShapeDtypeStruct((num_rows, width), up.dtype)
    call = launched(kernel, grid, out, how.warps, how.stages, aliases)
    result: Array = call(base, ranks, up.reshape(num_slots, -1, num_ranks), *whose)
    return result


def _spread(ranks: Array, which: Array, num_slots: int, num_ranks: int, dtype: Any) -> Array:
    """[1, T, modules * slots * ranks]: each module's ranks at its row's slot, zeros at others."""
    own = jnp.sum(ranks.astype(jnp.float32), axis=0).astype(dtype).reshape(len(which), -1, 1, num_ranks)
    is_own = which[:, None] == jnp.arange(1, num_slots + 1)
    return jnp.where(is_own[:, None, :, None], own, 0).reshape(1, len(which), -1)


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
    all_places = places(width)
    add = row_adder(ranks_ref, up_ref, which_ref, row, jnp.int32(0))

    def joined(place: Place) -> Array:
        base, (column, mask) = read_place(base_ref, place, row).astype(jnp.float32), place
        if mask is not None:  # what is added there is read from somewhere else instead
            total = jnp.where(mask, base + add(jnp.minimum(column, width - 1)), 0)
        else:
            total = base + add(column)
        return total.astype(out_ref.dtype).astype(jnp.float32)

    total = [joined(place) for place in all_places]
    normed = store_joined(total, row, all_places, weight_ref, out_ref, eps, offset)
    store_row(normed_ref, row, all_places, normed)


def _row_kernel(
    base_ref: Any, ranks_ref: Any, up_ref: Any, which_ref: Any, out_ref: Any, *, how: Adding, product: Product
) -> None:
    row, first, width = pl.program_id(0), pl.program_id(1) * how.columns, out_ref.shape[1]
    column = first + lax.iota(jnp.int32, how.columns)
    here = column if width % how.columns == 0 else jnp.minimum(column, width - 1)

    def add(output: Array, module: Array) -> Array:
        base = plgpu.load(base_ref.at[row, output]).astype(jnp.float32)
        return base + row_adder(ranks_ref, up_ref, which_ref, row, module)(output)

    if product.activation is None:
        out = add(here, product.module_of(first))
    else:
        out = quick(product.activation)(add(2 * here, jnp.int32(0)))
        out *= add(2 * here + 1, jnp.int32(product.fused.num_modules - 1))
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


def _spread_kernel(
    base_ref: Any, ranks_ref: Any, up_ref: Any, out_ref: Any, *, how: Adding, product: Product
) -> None:
    """A tile asks all slots as one product, of rows that are zeros but for their own."""
    num_rows, width = out_ref.shape
    row = pl.program_id(0) * how.rows + lax.iota(jnp.int32, how.rows)
    source = jnp.minimum(row, num_rows - 1)
    first = pl.program_id(1) * how.columns
    column = first + lax.iota(jnp.int32, how.columns)
    here = column if width % how.columns == 0 else jnp.minimum(column, width - 1)

    def read(output: Array) -> Array:
        return plgpu.load(base_ref.at[index_grid(source, output[None, :])])

    def add(base: Array, output: Array, module: Any) -> Array:
        return _with_all(ranks_ref, up_ref, source, base.astype(jnp.float32), output, module)

    if product.activation is None:
        out = add(read(here), here, product.module_of(first))
    else:
        # Gates and ups lie by turns: one read of all, in the order of memory.
        output = 2 * first + lax.iota(jnp.int32, 2 * how.columns)
        both = read(output if width % how.columns == 0 else jnp.minimum(output, 2 * width - 1))
        gate, up = jnp.unstack(both.reshape(how.rows, how.columns, 2), axis=2)
        out = quick(product.activation)(add(gate, 2 * here, 0))
        out *= add(up, 2 * here + 1, product.fused.num_modules - 1)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    plgpu.store(out_ref.at[index_grid(row, column[None, :])], out.astype(out_ref.dtype), mask=mask)


def _with_all(ranks_ref: Any, up_ref: Any, row: Array, base: Array, output: Array, module: Any) -> Array:
    """base [R, C], of outputs [C] of one module."""
    num_slots, _, num_ranks = up_ref.shape
    num = num_slots * num_ranks
    depth = min(max(next_power(num), MIN_DOT), SPREAD_DEPTH)

    def add(i: Array, total: Array) -> Array:
        place = i * depth + lax.iota(jnp.int32, depth)
        inside = None if num % depth == 0 else place < num
        ranks = read_tile(ranks_ref, (jnp.int32(0),), row, module * num + place, inside)
        slot, rank = lax.div(place, num_ranks), lax.rem(place, num_ranks)
        outputs, rank = index_grid(output, rank[None, :])
        mask = None if inside is None else jnp.broadcast_to(inside[None, :], rank.shape)
        at = (jnp.broadcast_to(slot[None, :], rank.shape), outputs, rank)
        up = plgpu.load(up_ref.at[at], mask=mask, other=None if mask is None else 0)
        return total + dot(ranks, up.T)

    return lax.fori_loop(0, pl.cdiv(num, depth), add, base)


KERNELS = AdapterKernels(add_adapters, begin_adapters, join_adapters, tiles_of_many, slots_first=True)
