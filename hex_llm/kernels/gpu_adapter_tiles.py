"""What adapters add to products of prompts on an NVIDIA GPU, by a Pallas-Triton kernel.

A step's rows are put into tiles once, each of rows of one slot, wherever these lie. A program goes along the
outputs of a tile; of gates and ups it makes what goes on, and of that the ranks for the product behind, which
need not read it then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels.adapters import Fused, Owners, Tiles
from hex_llm.kernels.experts import Activation
from hex_llm.kernels.gpu_launch import (
    MIN_DOT,
    both,
    dot,
    index_grid,
    launched,
    next_power,
    quick,
    read_tile,
)

FEW_ROWS = 256  # decodes
ROWS = 64  # of a tile
MIN_PROGRAMS = 8 * 132  # of so many multiprocessors


class Tiling(NamedTuple):
    rows: int  # at most ROWS
    columns: int  # of the result at a time, all of one module
    most: int  # such stretches of a program, where rows are many
    warps: int
    stages: int


GATES = Tiling(ROWS, 64, 8, 4, 2)
OTHERS = Tiling(16, 256, 16, 8, 3)


class Part(NamedTuple):
    """Outputs of one module, and what adapters multiply for them."""

    output: Array  # [C]
    factor: Array  # [R, ranks]


class Asked(NamedTuple):
    """What the rows of a tile ask of their slot, in kernels."""

    ranks: Any  # [splits, T, modules * ranks]
    up: Any  # [slots, outputs, ranks]
    slot: Array  # counted from 1; 0: none
    row: Array  # [R]

    def factor(self, module: Any) -> Array:
        """[R, ranks] of a module."""
        rank, inside = ranks_of(self.up.shape[2])
        at = module * self.up.shape[2] + rank
        splits = [
            read_tile(self.ranks, (jnp.int32(i),), self.row, at, inside) for i in range(len(self.ranks))
        ]
        return jnp.where(self.slot > 0, sum(splits[1:], splits[0]), 0).astype(self.up.dtype)

    def added(self, part: Part) -> Array:
        """To outputs."""
        rank, inside = ranks_of(self.up.shape[2])
        up = read_tile(self.up, (jnp.maximum(self.slot - 1, 0),), part.output, rank, inside)
        return dot(part.factor, up.T)


def tiles_of_many(which: Array, num_slots: int) -> Tiles | None:
    """See kernels.adapters.AdapterKernels. Few rows need none."""
    return tiles_of(which, num_slots) if len(which) > FEW_ROWS else None


def tiles_of(which: Array, num_slots: int) -> Tiles:
    num = len(which)
    is_own = which[:, None] == jnp.arange(num_slots + 1)
    ends = jnp.cumsum(pl.cdiv(jnp.sum(is_own, axis=0, dtype=jnp.int32), ROWS))  # of the slots' tiles
    starts = jnp.append(0, ends[:-1])
    nth = jnp.cumsum(is_own, axis=0, dtype=jnp.int32) - 1 + starts * ROWS
    most = num // ROWS + num_slots + 1
    rows = jnp.full(most * ROWS, num, jnp.int32)
    rows = rows.at[jnp.sum(jnp.where(is_own, nth, 0), axis=1)].set(jnp.arange(num, dtype=jnp.int32))
    slots = jnp.sum(jnp.arange(most)[:, None] >= ends, axis=1, dtype=jnp.int32)
    return Tiles(jnp.where(slots > num_slots, 0, slots), rows.reshape(most, ROWS))


def tiles_for(owners: Owners, num_slots: int, num_rows: int) -> Tiles:
    """So many rows to a tile."""
    tiles = owners.tiles or tiles_of(owners.which, num_slots)
    return Tiles(jnp.repeat(tiles.slots, ROWS // num_rows), tiles.rows.reshape(-1, num_rows))


def ranks_of(num_ranks: int) -> tuple[Array, Array | None]:
    """So many as can be multiplied, and which of them are there."""
    rank = lax.iota(jnp.int32, max(next_power(num_ranks), MIN_DOT))
    return rank, None if len(rank) == num_ranks else rank < num_ranks


class Inputs(NamedTuple):
    """What is None is not there."""

    base: Any  # [T, outputs]
    ranks: Any  # [splits, T, modules * ranks]
    up: Any  # [slots, outputs, ranks]
    tiles: Any  # Tiles
    following: Any  # [slots, ranks, outputs]: first factors of who multiplies the result


class Outputs(NamedTuple):
    out: Any  # [T, outputs, or half as many]
    ranks: Any  # [splits, T, ranks]: of the following, to be summed over splits


class Product(NamedTuple):
    """Which outputs it has, and what is made of them."""

    fused: Fused
    num_inner: int  # outputs behind the axis of the modules
    num_along: int  # outputs along it
    activation: Activation | None

    @classmethod
    def of(cls, outputs: Sequence[int], fused: Fused, activation: Activation | None) -> Product:
        return cls(fused, math.prod(outputs[fused.axis + 1 :]), outputs[fused.axis], activation)

    @property
    def modules(self) -> list[int]:
        """Of gates and of ups; of all outputs; or none: it depends."""
        if self.activation is not None:
            return [0, self.fused.num_modules - 1]
        return [] if self.fused.starts else [0]

    def module_of(self, output: Array) -> Array:
        along = lax.rem(lax.div(output, self.num_inner), self.num_along)
        return sum(((along >= start).astype(jnp.int32) for start in self.fused.starts), jnp.zeros_like(along))

    def columns(self, most: int) -> int:
        """So many of the result are of one module."""
        return most if self.modules else min(most, self.num_inner & -self.num_inner)


def add_in_tiles(
    base: Array | None,
    ranks: Array,
    up: Array,
    fused: Fused,
    owners: Owners,
    activation: Activation | None = None,
    following: Array | None = None,
    tiling: Tiling | None = None,
) -> tuple[Array, Array | None]:
    """base [T, outputs] and what adapters add; without one that alone. And ranks, as of
    gpu_adapters.ranks_of_rows, of what comes out, if something follows."""
    (num_slots, *outputs, num_ranks), num_rows = up.shape, len(owners.which)
    product, width = Product.of(outputs, fused, activation), math.prod(outputs)
    width = width if activation is None else width // 2
    tiling = tiling or (OTHERS if activation is None else GATES)
    tiling = tiling._replace(columns=product.columns(tiling.columns))
    tiles = tiles_for(owners, num_slots, tiling.rows)
    stretches = pl.cdiv(width, tiling.columns)
    length = min(max(len(tiles.slots) * stretches // MIN_PROGRAMS, 1), tiling.most)
    grid = len(tiles.slots), pl.cdiv(stretches, length)
    inputs = Inputs(base, ranks, up.reshape(num_slots, -1, num_ranks), tiles, following)
    result = Outputs(jax.ShapeDtypeStruct((num_rows, width), up.dtype), None)
    if following is not None:
        shape = grid[1], num_rows, following.shape[1]
        result = result._replace(ranks=jax.ShapeDtypeStruct(shape, jnp.float32))
    aliases = {0: 0} if activation is None and base is not None else {}
    kernel = partial(_tile_kernel, product=product, tiling=tiling, length=length)
    [made] = launched(kernel, grid, [result], tiling.warps, tiling.stages, aliases)(inputs)
    return made.out, None if made.ranks is None else _summed(made.ranks, up.dtype)


def _summed(ranks: Array, dtype: Any) -> Array:
    """As adapters multiply them."""
    return jnp.sum(ranks, axis=0, keepdims=True).astype(dtype)


def _tile_kernel(inputs: Inputs, outputs: Outputs, *, product: Product, tiling: Tiling, length: int) -> None:
    tile, split, (num_rows, width) = pl.program_id(0), pl.program_id(1), outputs.out.shape
    row = plgpu.load(inputs.tiles.rows.at[tile, lax.iota(jnp.int32, tiling.rows)])
    # What is not there is read from somewhere else instead, and not stored.
    source, there = jnp.minimum(row, num_rows - 1), row < num_rows
    asked = Asked(inputs.ranks, inputs.up, inputs.tiles.slots[tile], source)
    size = tiling.columns

    def go_along() -> None:
        factors = [asked.factor(module) for module in product.modules]

        def make(i: Array, ranks: list[Array]) -> list[Array]:
            column = i * size + lax.iota(jnp.int32, size)
            inside = None if width % size == 0 else column < width
            out = _made(inputs.base, product, asked, i * size, size, width, factors).astype(outputs.out.dtype)
            mask = both(there, inside, out.shape)
            plgpu.store(outputs.out.at[index_grid(row, column[None, :])], out, mask=mask)
            return [total + _ranks(inputs.following, asked.slot, out, column, inside) for total in ranks]

        rank, inside = ranks_of(1 if outputs.ranks is None else outputs.ranks.shape[2])
        begin = [] if outputs.ranks is None else [jnp.zeros((len(row), len(rank)), jnp.float32)]
        last = jnp.minimum((split + 1) * length, pl.cdiv(width, size))
        for ranks in lax.fori_loop(split * length, last, make, begin):
            at = jnp.broadcast_to(split, ranks.shape), *index_grid(row, rank[None, :])
            plgpu.store(outputs.ranks.at[at], ranks, mask=both(there, inside, ranks.shape))

    pl.when(jnp.min(row) < num_rows)(go_along)  # others only fill up


def _made(
    base_ref: Any, product: Product, asked: Asked, first: Array, size: int, width: int, factors: list[Array]
) -> Array:
    """[R, size] of the result, from the column `first` on."""
    # Gates and ups lie by turns: one read of all, in the order of memory.
    each = 1 if product.activation is None else 2
    output = each * first + lax.iota(jnp.int32, each * size)
    output = output if width % size == 0 else jnp.minimum(output, each * width - 1)
    if base_ref is None:
        base = jnp.zeros((len(asked.row), each * size), jnp.float32)
    else:
        base = plgpu.load(base_ref.at[index_grid(asked.row, output[None, :])])
    if product.activation is None:
        factor = factors[0] if factors else asked.factor(product.module_of(first))
        return base.astype(jnp.float32) + asked.added(Part(output, factor))
    column = first + lax.iota(jnp.int32, size)
    column = column if width % size == 0 else jnp.minimum(column, width - 1)
    gate, up = jnp.unstack(base.reshape(len(base), size, 2), axis=2)
    gate = gate.astype(jnp.float32) + asked.added(Part(2 * column, factors[0]))
    up = up.astype(jnp.float32) + asked.added(Part(2 * column + 1, factors[1]))
    return quick(product.activation)(gate) * up


def _ranks(following: Any, slot: Array, out: Array, column: Array, inside: Array | None) -> Array:
    """What the slot makes of these columns of the following product's inputs."""
    num_ranks = following.shape[1]
    here = jnp.minimum(ranks_of(num_ranks)[0], num_ranks - 1)
    return dot(out, read_tile(following, (jnp.maximum(slot - 1, 0),), here, column, inside).T)
