"""Products with quantized matrices on an NVIDIA GPU; those of few rows by one Pallas-Triton kernel.

A matrix lies in words of 16 bits. Word r of a block holds the codes of its inputs r, r + 32 and so on: one
shift of all words gives the codes of 32 inputs that follow each other. They become floats, two at a time, by
putting their bits below an exponent (gpu_codes.py), since this is what the time goes into. Of few rows the
sums are scaled, in float32; of more that costs more than scaling the weights, which are then rounded as the
activations are. Where rows are many, the matrix is expanded and multiplied by XLA. docs/kernels.md tells what
was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from hex_llm.kernels import gpu_launch
from hex_llm.kernels.codes import doubled_e2m1
from hex_llm.kernels.experts import GatedMatrix
from hex_llm.kernels.gpu_codes import CENTRE, MAGIC, assembled, floats, tiny_floats, whole_numbers
from hex_llm.kernels.gpu_launch import dot, index_grid, launched, next_power

SLAB = 32  # inputs that one shift gives
WORD = 16  # bits
MAX_ROWS = 256  # of the kernel; more are multiplied by XLA sooner, although it must expand the matrix
MIN_TILE, MAX_TILE = 16, 128  # rows of a program
SCALED_SUMS = 16  # a tile of more rows has its weights scaled instead
COLUMNS = 128  # of a program
WARPS, STAGES = 4, 3


def can_multiply(bits: int, group: int, dtype: DTypeLike, is_float: bool = False) -> bool:
    if is_float and jnp.dtype(dtype) != jnp.bfloat16:  # float16 has too few exponents
        return False
    return bits in CENTRE and group % SLAB == 0 and jnp.dtype(dtype) in MAGIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWords(GatedMatrix):
    """A Matrix (models/linear.py) [*outputs, inputs]: a weight is (code - zero point) * scale; of floats, the
    float times the scale, and of those of 4 bits (e2m1), twice the float."""

    words: Any  # uint16 [N, blocks * SLAB]
    # [groups, N]: float32; or uint32, of float16 each the scale below the zero point; or uint8, the exponent
    scales: Any
    outputs: tuple[int, ...] = field(metadata={"static": True})
    num_inputs: int = field(metadata={"static": True})
    bits: int = field(metadata={"static": True})
    group: int = field(metadata={"static": True})
    zero: int = field(metadata={"static": True})  # where groups have none of their own
    is_float: bool = field(default=False, metadata={"static": True})

    @property
    def codes_per_word(self) -> int:
        return WORD // self.bits

    def matmul(self, x: Array) -> Array:
        if len(x) <= MAX_ROWS and x.dtype in MAGIC:
            out = multiply(x, self)
        else:
            # Not before its turn: else all matrices could be expanded at once.
            matrix, x = lax.optimization_barrier((self, x))
            out = lax.dot_general(x, matrix.expanded(x.dtype), (((1,), (1,)), ((), ())))
        return out.reshape(len(x), *self.outputs)

    def rows(self, which: Array) -> Array:
        return self._expanded(self.words[which], self.scales[:, which])

    def expanded(self, dtype: DTypeLike) -> Array:
        """[N, inputs]"""
        return self._expanded(self.words, self.scales).astype(dtype)

    def _expanded(self, words: Array, scales: Array) -> Array:
        shifts = jnp.arange(self.codes_per_word, dtype=jnp.uint16) * self.bits
        codes = words.reshape(len(words), -1, 1, SLAB) >> shifts[:, None] & (2**self.bits - 1)
        codes = self.signed(codes)
        scale, zero = (jnp.asarray(one).T[..., None] for one in self.scale_and_zero(scales))
        values = (codes.astype(jnp.float32).reshape(*scales.T.shape, self.group) - zero) * scale
        return values.reshape(len(words), -1)[:, : self.num_inputs]

    def signed(self, codes: Array) -> Array:
        """What stands in so many bits, with its sign."""
        if self.bits == 8:
            return codes.astype(jnp.uint8).view(jnp.float8_e4m3fn if self.is_float else jnp.int8)
        return doubled_e2m1(codes) if self.is_float else codes

    def scale_and_zero(self, scales: Array) -> tuple[Array, Array | int]:
        """float32, of what was read of `scales`."""
        if scales.dtype == jnp.float32:
            return scales, self.zero
        if scales.dtype == jnp.uint8:
            return lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32), 0
        halves = ((scales >> shift).astype(jnp.uint16) for shift in (0, WORD))
        scale, zero = (lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) for half in halves)
        return scale, zero


@partial(jax.jit, static_argnames=("num_output_axes", "bits", "zero", "is_float"))
def to_words(
    codes: Array,
    scales: Array,
    offsets: Array | None,
    *,
    num_output_axes: int,
    bits: int,
    zero: int,
    is_float: bool = False,
) -> QuantizedWords:
    """codes [*outputs, *inputs], one in each place; scales and offsets for groups along the last axis: a
    weight is (code - zero) * scale + offset. Offsets become zero points, and these and the scales are rounded
    to float16, which is what files have that were made for GPUs. `is_float`: codes are float8_e4m3fn; or of 4
    bits, e2m1, whose scales are powers of two."""
    outputs = codes.shape[:num_output_axes]
    codes, scales = codes.reshape(math.prod(outputs), -1), scales.reshape(math.prod(outputs), -1)
    num_inputs = codes.shape[1]
    group, per_word = num_inputs // scales.shape[1], WORD // bits
    if offsets is not None:
        offsets = offsets.reshape(scales.shape)
        # Without a scale all weights are the offset: it counts -(-1) times.
        is_flat = scales == 0
        codes = jnp.where(is_flat.repeat(group, axis=1), 0, codes)
        zeros = jnp.where(is_flat, -1, zero - offsets / jnp.where(is_flat, 1, scales))
        halves = (jnp.where(is_flat, offsets, scales), zeros)
        low, high = (one.astype(jnp.float16).view(jnp.uint16).astype(jnp.uint32) for one in halves)
        scales = low | high << WORD
    elif is_float and bits == 4:
        scales = (lax.bitcast_convert_type(scales.astype(jnp.float32), jnp.uint32) >> 23).astype(jnp.uint8)
    missing = -num_inputs % (per_word * SLAB)
    places = jnp.pad(codes.view(jnp.uint8), ((0, 0), (0, missing))).reshape(len(codes), -1, per_word, SLAB)
    shifts = jnp.arange(per_word, dtype=jnp.uint16) * bits
    words = jnp.sum(places.astype(jnp.uint16) << shifts[:, None], axis=2, dtype=jnp.uint16)
    scales = jnp.pad(scales, ((0, 0), (0, pl.cdiv(missing, group)))).T
    words = words.reshape(len(codes), -1)
    return QuantizedWords(words, scales, outputs, num_inputs, bits, group, zero, is_float)


@dataclass(frozen=True)
class Tiling:
    """How a product is cut; all of it is chosen from shapes alone."""

    rows: int
    splits: int  # programs that share the inputs of a tile


def tiling_for(num_rows: int, num_outputs: int, num_blocks: int) -> Tiling:
    rows = min(max(next_power(num_rows), MIN_TILE), MAX_TILE)
    wanted = 384 if rows <= 16 else 224 if rows <= 64 else 192
    tiles = pl.cdiv(num_outputs, COLUMNS) * pl.cdiv(num_rows, rows)
    splits = min(next_power(pl.cdiv(wanted, tiles)), next_power(num_blocks + 1) // 2)
    return Tiling(rows, splits)


def multiply(x: Array, matrix: QuantizedWords, tiling: Tiling | None = None) -> Array:
    """x [T, K] times the matrix [N, K] -> [T, N]."""
    num_outputs, num_blocks = len(matrix.words), matrix.words.shape[1] // SLAB
    tiling = tiling or tiling_for(len(x), num_outputs, num_blocks)
    grid = (pl.cdiv(len(x), tiling.rows), pl.cdiv(num_outputs, COLUMNS), tiling.splits)
    dtype = x.dtype if tiling.splits == 1 else jnp.float32
    out = jax.ShapeDtypeStruct((tiling.splits, len(x), num_outputs), dtype)
    kernel = partial(_multiply_kernel, matrix=matrix, tiling=tiling)
    call = launched(kernel, grid, out, WARPS, STAGES)
    parts: Array = call(x, matrix.words, matrix.scales)
    return parts[0] if tiling.splits == 1 else jnp.sum(parts, axis=0).astype(x.dtype)


def _multiply_kernel(
    x_ref: Any, words_ref: Any, scales_ref: Any, out_ref: Any, *, matrix: QuantizedWords, tiling: Tiling
) -> None:
    num_rows, num_columns = len(x_ref), len(words_ref)
    row = pl.program_id(0) * tiling.rows + lax.iota(jnp.int32, tiling.rows)
    column = pl.program_id(1) * COLUMNS + lax.iota(jnp.int32, COLUMNS)
    # What is not there is read from somewhere else instead, and not stored.
    source = jnp.minimum(row, num_rows - 1)
    here = column if num_columns % COLUMNS == 0 else jnp.minimum(column, num_columns - 1)
    per_word, slab = matrix.codes_per_word, lax.iota(jnp.int32, SLAB)
    num_blocks = words_ref.shape[1] // SLAB
    scaled_sums = tiling.rows <= SCALED_SUMS
    together = min(matrix.group // SLAB, per_word)  # slabs of a block that share scales

    def read_x(slab_index: Array) -> Array:
        place = slab_index * SLAB + slab
        inside = None
        if matrix.num_inputs % (per_word * SLAB):
            inside = jnp.broadcast_to((place < matrix.num_inputs)[None, :], (tiling.rows, SLAB))
            place = jnp.minimum(place, matrix.num_inputs - 1)
        return plgpu.load(
            x_ref.at[index_grid(source, place[None, :])], mask=inside, other=None if inside is None else 0
        )

    def add_block(block: Array, total: Array) -> Array:
        words = plgpu.load(words_ref.at[index_grid(here, (block * SLAB + slab)[None, :])])
        for first in range(0, per_word, together):
            scale, rest = read_scales(scales_ref, here, block * per_word + first, matrix)
            part, sums = jnp.zeros_like(total), jnp.zeros(tiling.rows, jnp.float32)
            for j in range(first, first + together):
                x = read_x(block * per_word + j)
                if scaled_sums:
                    part += dot(_numbers(words, j, matrix, x.dtype), x.T)
                    sums += jnp.sum(x.astype(jnp.float32), axis=1)
                else:
                    total += dot(weights_of(words, j, matrix, scale, rest, x.dtype), x.T)
            if scaled_sums:
                total += scale[:, None] * part
                if rest is not None:
                    total += rest[:, None] * sums[None, :]
        return total

    length, split = pl.cdiv(num_blocks, tiling.splits), pl.program_id(2)
    first = split * length
    # A number of turns that the compiler knows is worth a case of its own.
    turns = length if num_blocks % tiling.splits == 0 else jnp.minimum(length, num_blocks - first)
    total = jnp.zeros((COLUMNS, tiling.rows), jnp.float32)
    total = lax.fori_loop(0, turns, lambda i, total: add_block(first + i, total), total)
    at = (split, *index_grid(row, column[None, :]))
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    plgpu.store(out_ref.at[at], total.T.astype(out_ref.dtype), mask=mask)


def read_scales(
    scales_ref: Any, output: Array, slab: Array, matrix: QuantizedWords
) -> tuple[Array, Array | None]:
    """float32 of these outputs and the slab's inputs: the scales, and what a weight is besides its number
    (see _numbers) times the scale; None: nothing."""
    read = plgpu.load(scales_ref.at[lax.div(slab * SLAB, matrix.group), output])
    scale, zero = matrix.scale_and_zero(read)
    centre = 0 if matrix.is_float else CENTRE[matrix.bits]
    return scale, None if zero is centre else (centre - zero) * scale


def _numbers(words: Array, j: int, matrix: QuantizedWords, dtype: Any) -> Array:
    """The j-th code of each word, less CENTRE; of e2m1, twice the float."""
    if gpu_launch.interpreted():
        codes = matrix.signed(words >> (matrix.bits * j) & (2**matrix.bits - 1))
        is_signed = matrix.is_float or matrix.bits == 8
        return (codes if is_signed else codes.astype(jnp.int32) - CENTRE[4]).astype(dtype)
    return assembled(f"{_assembly(j, matrix, dtype)} mov.b32 $0, f;", dtype, words)


def weights_of(
    words: Array, j: int, matrix: QuantizedWords, scale: Array, rest: Array | None, dtype: Any
) -> Array:
    """That number times the scale, and the rest."""
    rest = jnp.zeros_like(scale) if rest is None else rest
    each = [jnp.broadcast_to(one.astype(dtype)[:, None], words.shape) for one in (scale, rest)]
    if gpu_launch.interpreted():
        return _numbers(words, j, matrix, dtype) * each[0] + each[1]
    multiplied = f"fma.rn.{MAGIC[dtype][0]} $0, f, $2, $3;"
    return assembled(f"{_assembly(j, matrix, dtype)} {multiplied}", dtype, words, *each)


def _assembly(j: int, matrix: QuantizedWords, dtype: Any) -> str:
    if matrix.is_float:
        return tiny_floats(j) if matrix.bits == 4 else floats(j)
    return whole_numbers(j, matrix.bits, dtype)
