"""What adapters add to a product on an NVIDIA GPU: two Pallas-Triton kernels, one for each of their factors.

Rows are taken in tiles, and a tile asks only the slots that its rows have: of prompts, whose rows of one
adapter follow each other, one or two; of decodes perhaps all. The first kernel leaves for each row the ranks
of its own slot. The second adds to the base's product in place; of gates and ups it makes what goes on, so
that these are read once, as without adapters. docs/kernels.md tells what was measured.
"""

from __future__ import annotations

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
DEPTH = 128  # inputs at a time
MIN_SPLIT = 4 * DEPTH  # the fewest inputs that are worth a program
WANTED, MAX_SPLITS = 256, 16  # programs, and how many share the inputs of a row


class Tiles(NamedTuple):
    which: Array  # int32 [T] each row's slot, counted from 1; 0: none
    used: Array  # int32 [tiles, slots], counted from 0: those that rows of a tile have, and 0
    num_used: Array  # int32 [tiles]


def add_adapters(
    out: Array, x: Array, down: Array, up: Array, which: Array, activation: Activation | None = None
) -> Array:
    """out [T, *outputs], and to it of x [T, K] each row's own up [*outputs, slots, ranks] @ down [slots,
    ranks, K]. With an activation: outputs are [F, 2], of which its product [T, F] is made."""
    num_slots, num_ranks = down.shape[:2]
    tiles = _tiles(which, num_slots)
    ranks = _ranks(x, down.reshape(num_slots, num_ranks, -1), tiles)
    flat = out.reshape(len(x), -1)
    added = _added(flat, ranks, up.reshape(-1, num_slots * num_ranks), tiles, activation)
    return added if activation else added.reshape(out.shape)


def _tile_rows(num_rows: int) -> int:
    return min(max(next_power(num_rows), MIN_SIDE), MAX_ROWS)


def _tiles(which: Array, num_slots: int) -> Tiles:
    rows = _tile_rows(len(which))
    tiles = jnp.pad(which, (0, -len(which) % rows)).reshape(-1, rows, 1)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    is_used = jnp.any(tiles == slots + 1, axis=1)
    before = jnp.cumsum(is_used, axis=1) - 1
    is_nth = is_used[:, None] & (before[:, None] == slots[:, None])  # [tiles, nth, slots]
    used = jnp.sum(jnp.where(is_nth, slots, 0), axis=2)
    return Tiles(which, used, jnp.sum(is_used, axis=1, dtype=jnp.int32))


def _ranks(x: Array, down: Array, tiles: Tiles) -> Array:
    """[splits, T, ranks], each row's in its own slot, to be summed over splits; without a slot anything."""
    num_slots, num_ranks, num_inputs = down.shape
    num_tiles = len(tiles.used)
    splits = min(WANTED // (num_tiles * min(num_slots, 8)), num_inputs // MIN_SPLIT, MAX_SPLITS)
    splits = max(splits, 1)
    out = jax.ShapeDtypeStruct((splits, len(x), num_ranks), x.dtype if splits == 1 else jnp.float32)
    kernel = partial(_ranks_kernel, rows=_tile_rows(len(x)), splits=splits)
    call = launched(kernel, (num_tiles, num_slots, splits), out, warps=4, stages=4)
    result: Array = call(x, down, *tiles)
    return result


def _ranks_kernel(
    x_ref: Any,
    down_ref: Any,
    which_ref: Any,
    used_ref: Any,
    num_used_ref: Any,
    out_ref: Any,
    *,
    rows: int,
    splits: int,
) -> None:
    tile, nth, split = (pl.program_id(axis) for axis in range(3))
    num_rows, num_inputs = x_ref.shape
    num_ranks = down_ref.shape[1]

    @pl.when(nth < num_used_ref[tile])
    def multiply() -> None:
        slot = used_ref[tile, nth]
        row = tile * rows + lax.iota(jnp.int32, rows)
        # What is not there is read from somewhere else instead, and not stored.
        source = jnp.minimum(row, num_rows - 1)
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
        is_own = (plgpu.load(which_ref.at[source]) == slot + 1) & (row < num_rows)
        mask = is_own[:, None] & (rank < num_ranks)[None, :]
        at = (split, *index_grid(row, rank[None, :]))
        plgpu.store(out_ref.at[at], total.astype(out_ref.dtype), mask=mask)


def _added(base: Array, ranks: Array, up: Array, tiles: Tiles, activation: Activation | None) -> Array:
    num_rows, num_outputs = base.shape
    num_tiles = len(tiles.used)
    if num_tiles > 4:
        columns, together = 128, 1
    else:  # so that there is work for all multiprocessors
        columns, together = (128 if num_outputs > 16384 else 64 if num_outputs > 4096 else 32), 4
    kernel = partial(
        _added_kernel, rows=_tile_rows(num_rows), columns=columns, together=together, activation=activation
    )
    width = num_outputs if activation is None else num_outputs // 2
    out = jax.ShapeDtypeStruct((num_rows, width), base.dtype)
    aliases = {0: 0} if activation is None else {}
    grid = (num_tiles, pl.cdiv(num_outputs, columns))
    result: Array = launched(kernel, grid, out, 4, 2, aliases)(base, ranks, up, *tiles)
    return result


def _added_kernel(
    base_ref: Any,
    ranks_ref: Any,
    up_ref: Any,
    which_ref: Any,
    used_ref: Any,
    num_used_ref: Any,
    out_ref: Any,
    *,
    rows: int,
    columns: int,
    together: int,
    activation: Activation | None,
) -> None:
    splits, num_rows, num_ranks = ranks_ref.shape
    num_outputs, tile = base_ref.shape[1], pl.program_id(0)
    num_used = num_used_ref[tile]
    row = tile * rows + lax.iota(jnp.int32, rows)
    source = jnp.minimum(row, num_rows - 1)
    column = pl.program_id(1) * columns + lax.iota(jnp.int32, columns)
    here = column if num_outputs % columns == 0 else jnp.minimum(column, num_outputs - 1)
    which = plgpu.load(which_ref.at[source])
    rank = lax.iota(jnp.int32, max(next_power(num_ranks), MIN_SIDE))
    is_rank = None if num_ranks == len(rank) else rank < num_ranks
    has = (which > 0)[:, None] & (rank < num_ranks)[None, :]
    parts = [
        plgpu.load(ranks_ref.at[(split, *index_grid(source, rank[None, :]))], mask=has, other=0)
        for split in range(splits)
    ]
    ranks = sum(parts[1:], parts[0]).astype(up_ref.dtype)

    def add(i: Array, total: Array) -> Array:
        """Of some slots, whose reads overlap."""
        for j in range(together):
            nth = i * together + j
            slot = used_ref[tile, jnp.minimum(nth, used_ref.shape[1] - 1)]
            is_own = (which == slot + 1) & (nth < num_used)
            own = jnp.where(is_own[:, None], ranks, jnp.zeros_like(ranks))
            total += dot(own, read_tile(up_ref, (), here, slot * num_ranks + rank, is_rank).T)
        return total

    total = plgpu.load(base_ref.at[index_grid(source, here[None, :])]).astype(jnp.float32)
    total = lax.fori_loop(0, pl.cdiv(num_used, together), add, total)
    if activation is not None:
        gate, up = _gates_and_ups(total)
        total = activation(gate) * up
        column = pl.program_id(1) * (columns // 2) + lax.iota(jnp.int32, columns // 2)
    mask = (row < num_rows)[:, None] & (column < out_ref.shape[1])[None, :]
    plgpu.store(out_ref.at[index_grid(row, column[None, :])], total.astype(out_ref.dtype), mask=mask)


def _gates_and_ups(both: Array) -> tuple[Array, Array]:
    """Of [R, 2 * C], where they lie by turns."""
    pairs = both.reshape(len(both), -1, 2)
    is_gate = lax.broadcasted_iota(jnp.int32, pairs.shape, 2) == 0
    return jnp.sum(jnp.where(is_gate, pairs, 0), axis=2), jnp.sum(jnp.where(is_gate, 0, pairs), axis=2)
