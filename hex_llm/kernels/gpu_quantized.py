"""Products with quantized matrices on an NVIDIA GPU; those of few rows by one Pallas-Triton kernel.

A matrix lies in words of 16 bits. Word r of a block holds the codes of its inputs r, r + 32 and so on: one
shift of all words gives the codes of 32 inputs that follow each other, a slab. They become floats, two at a
time, by putting their bits below an exponent (gpu_codes.py), are scaled and rounded as the activations are,
and multiplied. The words of a block lie together for 64 outputs, so that memory is read in whole pieces.
Where rows are many, the matrix is expanded and multiplied by XLA. docs/kernels.md tells what was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from hex_llm.kernels import gpu_dense, gpu_launch
from hex_llm.kernels.adapters import Norm
from hex_llm.kernels.codes import doubled_e2m1
from hex_llm.kernels.experts import Activation
from hex_llm.kernels.gpu_codes import (
    CENTRE,
    E2M1_EXPONENT,
    E2M1_PLACES,
    MAGIC,
    SIGN,
    assembled,
    floats,
    tiny_floats,
    twice,
    whole_numbers,
)
from hex_llm.kernels.gpu_launch import (
    both,
    dot,
    has_large_shared_memory,
    index_grid,
    launched,
    load_rows,
    next_power,
)
from hex_llm.kernels.matrix import Begun, PlainMatrix

SLAB = 32  # inputs that one shift gives
TILE = 64  # outputs whose words lie together
WORD = 16  # bits
MAX_ROWS = 256  # of the kernel; more are multiplied by XLA sooner, although it must expand the matrix
MIN_TILE = 16  # rows of a program
COLUMNS = 128  # of a program
WARPS, STAGES = 4, 3
MAX_PARTS = 8  # that who reads a product adds up; of few rows there are more, for too few readers
TOGETHER = 2  # slabs of a product; a row that is alone goes faster through one at a time
# A factor of e2m1 makes up for its exponent, and that it is not doubled, but for a power of two that sums are
# multiplied by: so it is a bfloat16 for any scale from 2**-100 to 2**27.
LEFT_OVER = 26
MADE_UP = 1 - E2M1_EXPONENT - LEFT_OVER


def can_multiply(bits: int, group: int, dtype: DTypeLike, is_float: bool = False) -> bool:
    if is_float and jnp.dtype(dtype) != jnp.bfloat16:  # float16 has too few exponents
        return False
    if is_float and bits == 4 and group != SLAB:
        return False
    return bits in CENTRE and group % SLAB == 0 and jnp.dtype(dtype) in MAGIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWords(PlainMatrix):
    """A Matrix (models/linear.py) [*outputs, inputs]: a weight is (code - zero point) * scale; of floats, the
    float times the scale, and of those of 4 bits (e2m1), twice the float."""

    words: Any  # uint16 [tiles of outputs * blocks of inputs, TILE * SLAB]
    # [groups, N]: float32; or uint32, of float16 each the scale below the zero point. Of e2m1 [blocks, N]:
    # uint32, of each slab the exponent of its factor.
    scales: Any
    outputs: tuple[int, ...] = field(metadata={"static": True})
    num_inputs: int = field(metadata={"static": True})
    bits: int = field(metadata={"static": True})
    group: int = field(metadata={"static": True})
    zero: int = field(metadata={"static": True})  # where groups have none of their own
    is_float: bool = field(default=False, metadata={"static": True})
    fuses_gates: bool = field(default=False, metadata={"static": True})  # the kernel may, of gates and ups

    @property
    def codes_per_word(self) -> int:
        return WORD // self.bits

    @property
    def num_outputs(self) -> int:
        return math.prod(self.outputs)

    @property
    def num_blocks(self) -> int:
        """Of inputs."""
        return pl.cdiv(self.num_inputs, self.codes_per_word * SLAB)

    @property
    def is_e2m1(self) -> bool:
        return self.is_float and self.bits == 4

    def matmul(self, x: Array) -> Array:
        if _is_for_kernel(x):
            out = multiply(x, self)
        else:
            # Not before its turn: else all matrices could be expanded at once.
            matrix, x = lax.optimization_barrier((self, x))
            out = lax.dot_general(x, matrix.expanded(x.dtype), (((1,), (1,)), ((), ())))
        return out.reshape(len(x), *self.outputs)

    def gated(self, x: Array, activation: Activation, bias: Array | None = None) -> Array:
        if self.fuses_gates and bias is None and _is_for_kernel(x):
            tiling = self.tiling(x)
            if tiling.splits == 1 and self.num_outputs % COLUMNS == 0:
                return multiply(x, self, tiling, activation)
        return super().gated(x, activation, bias)

    def begin(self, x: Array, bias: Array | None) -> Begun | None:
        """In parts, if there are several, and not too many for who reads them."""
        if bias is not None or not self._leaves_parts(x) or self.tiling(x).splits == 1:
            return None
        parts = multiplied(x, self)
        return Begun(parts.reshape(*parts.shape[:2], *self.outputs), dtype=x.dtype)

    def join(
        self, around: Array, x: Array, bias: Array | None, norm: Norm, rounds: bool
    ) -> tuple[Array, Array] | None:
        x = x.reshape(len(x), -1)
        if bias is not None or not self._leaves_parts(x):
            return None
        return gpu_dense.join(around, multiplied(x, self), norm)

    def _leaves_parts(self, x: Array) -> bool:
        """Whether who reads the product had better add it up."""
        return _is_for_kernel(x) and self.tiling(x).splits <= MAX_PARTS

    def tiling(self, x: Array) -> Tiling:
        """Of the product with x, by the kernel."""
        return tiling_for(len(x), self.num_outputs, self.num_blocks)

    def rows(self, which: Array) -> Array:
        words = self._tiles()[which // TILE, :, which % TILE]
        return self._expanded(words, self.scales[:, which])

    def expanded(self, dtype: DTypeLike) -> Array:
        """[N, inputs]"""
        words = self._tiles().swapaxes(1, 2).reshape(-1, self.num_blocks, SLAB)
        return self._expanded(words[: self.num_outputs], self.scales).astype(dtype)

    def _tiles(self) -> Array:
        tiles: Array = self.words.reshape(-1, self.num_blocks, TILE, SLAB)
        return tiles

    def _expanded(self, words: Array, scales: Array) -> Array:
        """words [N, blocks, SLAB]"""
        slabs = [self.signed(self.codes(words, j)) for j in range(self.codes_per_word)]
        codes = jnp.stack(slabs, axis=2).astype(jnp.float32)
        scale, zero = (jnp.asarray(one).T[..., None] for one in self.scale_and_zero(scales))
        values = (codes.reshape(*scale.shape[:2], -1) - zero) * scale
        return values.reshape(len(words), -1)[:, : self.num_inputs]

    def codes(self, words: Array, j: int) -> Array:
        """The j-th of each word."""
        if not self.is_e2m1:
            return words >> (self.bits * j) & (2**self.bits - 1)
        size, sign = E2M1_PLACES[j]
        return words >> size & 7 | (words >> sign & 1) << 3

    def signed(self, codes: Array) -> Array:
        """What stands in so many bits, with its sign."""
        if self.bits == 8:
            return codes.astype(jnp.uint8).view(jnp.float8_e4m3fn if self.is_float else jnp.int8)
        return doubled_e2m1(codes) if self.is_float else codes

    def scale_and_zero(self, scales: Array) -> tuple[Array, Array | int]:
        """float32 [groups, N], of what was read of `scales`."""
        if scales.dtype == jnp.float32:
            return scales, self.zero
        if self.is_e2m1:
            exponents = jnp.stack([exponent_of(scales, j) for j in range(self.codes_per_word)], axis=1)
            exponents = jnp.maximum(exponents.reshape(-1, scales.shape[1]).astype(jnp.int32) - MADE_UP, 0)
            return lax.bitcast_convert_type(exponents << 23, jnp.float32), 0
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
    missing = -num_inputs % (per_word * SLAB)
    scales = jnp.pad(scales, ((0, 0), (0, pl.cdiv(missing, group)))).T
    matrix = QuantizedWords(None, scales, outputs, num_inputs, bits, group, zero, is_float)
    places = jnp.pad(codes.view(jnp.uint8), ((0, -len(codes) % TILE), (0, missing))).astype(jnp.uint16)
    places = places.reshape(-1, TILE, matrix.num_blocks, per_word, SLAB)
    if matrix.is_e2m1:
        exponents = lax.bitcast_convert_type(scales, jnp.uint32) >> 23
        exponents = jnp.minimum(exponents + MADE_UP, 254).reshape(matrix.num_blocks, per_word, -1)
        scales = jnp.sum(exponents << 8 * jnp.arange(per_word, dtype=jnp.uint32)[:, None], axis=1)
        moved = [
            (codes & 7) << size | codes >> 3 << sign
            for codes, (size, sign) in zip(jnp.moveaxis(places, 3, 0), E2M1_PLACES, strict=True)
        ]
    else:
        moved = [places[..., j, :] << bits * j for j in range(per_word)]
    words = sum(moved[1:], moved[0]).swapaxes(1, 2).reshape(-1, TILE * SLAB)
    return replace(matrix, words=words, scales=scales)


@dataclass(frozen=True)
class Tiling:
    """How a product is cut; all of it is chosen from shapes alone."""

    rows: int
    splits: int  # programs that share the inputs of a tile


def max_tile() -> int:
    """Rows of a program. GPUs that multiply from registers have too few of these for more."""
    return 128 if has_large_shared_memory() else 64


def tiling_for(num_rows: int, num_outputs: int, num_blocks: int) -> Tiling:
    rows = min(max(next_power(num_rows), MIN_TILE), max_tile())
    wanted = 512 if rows <= 16 else 224 if rows <= 64 else 192
    tiles = pl.cdiv(num_outputs, COLUMNS) * pl.cdiv(num_rows, rows)
    splits = min(next_power(pl.cdiv(wanted, tiles)), next_power(num_blocks + 1) // 2)
    return Tiling(rows, splits)


def _is_for_kernel(x: Array) -> bool:
    return len(x) <= MAX_ROWS and x.dtype in MAGIC


def multiply(
    x: Array, matrix: QuantizedWords, tiling: Tiling | None = None, activation: Activation | None = None
) -> Array:
    """x [T, K] times the matrix [N, K] -> [T, N]; or, of gates and ups, the activation of the gates times the
    ups [T, N / 2], where a program has all inputs of its outputs."""
    parts = multiplied(x, matrix, tiling, activation)
    return parts[0] if len(parts) == 1 else jnp.sum(parts, axis=0).astype(x.dtype)


def multiplied(
    x: Array, matrix: QuantizedWords, tiling: Tiling | None = None, activation: Activation | None = None
) -> Array:
    """The same in parts [splits, T, N], to be summed: of several, in floats of 32 bits."""
    num_outputs = matrix.num_outputs
    tiling = tiling or matrix.tiling(x)
    grid = (pl.cdiv(len(x), tiling.rows), pl.cdiv(num_outputs, COLUMNS), tiling.splits)
    dtype = x.dtype if tiling.splits == 1 else jnp.float32
    width = num_outputs if activation is None else num_outputs // 2
    out = jax.ShapeDtypeStruct((tiling.splits, len(x), width), dtype)
    kernel = partial(_multiply_kernel, matrix=matrix, tiling=tiling, activation=activation)
    call = launched(kernel, grid, out, WARPS, STAGES)
    parts: Array = call(x, matrix.words, matrix.scales)
    return parts


def _multiply_kernel(
    x_ref: Any,
    words_ref: Any,
    scales_ref: Any,
    out_ref: Any,
    *,
    matrix: QuantizedWords,
    tiling: Tiling,
    activation: Activation | None,
) -> None:
    num_rows, num_columns, num_blocks = len(x_ref), matrix.num_outputs, matrix.num_blocks
    row = pl.program_id(0) * tiling.rows + lax.iota(jnp.int32, tiling.rows)
    column = pl.program_id(1) * COLUMNS + lax.iota(jnp.int32, COLUMNS)
    there = None if num_rows % tiling.rows == 0 else row < num_rows
    # What is not there is read from somewhere else instead, and not stored.
    here = column if num_columns % COLUMNS == 0 else jnp.minimum(column, num_columns - 1)
    together = 1 if num_rows == 1 else TOGETHER
    is_filled = matrix.num_inputs % (matrix.codes_per_word * SLAB) == 0

    def add_block(block: Array, total: Array) -> Array:
        words = read_words(words_ref, here, block, matrix)
        scales = read_scales(scales_ref, here, block, matrix)
        for first in range(0, matrix.codes_per_word, together):
            weights = weights_of(words, range(first, first + together), matrix, scales, x_ref.dtype)
            place = inputs_of(block, first, together, matrix)
            inside = None if is_filled else place < matrix.num_inputs
            x = load_rows(x_ref, row, place[None, :], there, inside)
            total += dot(weights, x.T)
        return total

    length, split = pl.cdiv(num_blocks, tiling.splits), pl.program_id(2)
    first = split * length
    # A number of turns that the compiler knows is worth a case of its own.
    turns = length if num_blocks % tiling.splits == 0 else jnp.minimum(length, num_blocks - first)
    total = jnp.zeros((COLUMNS, tiling.rows), jnp.float32)
    total = lax.fori_loop(0, turns, lambda i, total: add_block(first + i, total), total)
    out = made_up(total.T, matrix)
    if activation is not None:
        out = gpu_launch.gated(out, activation, out_ref.dtype)
        column = pl.program_id(1) * (COLUMNS // 2) + lax.iota(jnp.int32, COLUMNS // 2)
    mask = both(there, None if num_columns % COLUMNS == 0 else column < num_columns, out.shape)
    at = (split, *index_grid(row, column[None, :]))
    plgpu.store(out_ref.at[at], out.astype(out_ref.dtype), mask=mask)


def inputs_of(block: Array, first: int, num_slabs: int, matrix: QuantizedWords) -> Array:
    """Of some slabs of a block."""
    return (block * matrix.codes_per_word + first) * SLAB + lax.iota(jnp.int32, num_slabs * SLAB)


def read_words(words_ref: Any, output: Array, block: Array, matrix: QuantizedWords) -> Array:
    """[outputs, SLAB]"""
    tile, lane = lax.div(output, TILE) * matrix.num_blocks + block, lax.rem(output, TILE) * SLAB
    shape = len(output), SLAB
    place = lane[:, None] + lax.iota(jnp.int32, SLAB)[None, :]
    return plgpu.load(words_ref.at[jnp.broadcast_to(tile[:, None], shape), place])


def read_scales(
    scales_ref: Any, output: Array, block: Array, matrix: QuantizedWords
) -> list[tuple[Array, Array | None]]:
    """Of each slab of a block: the scales of these outputs, and what a weight is besides its number (see
    _numbers) times the scale; None: nothing."""
    per_word = matrix.codes_per_word
    if matrix.is_e2m1:
        packed = plgpu.load(scales_ref.at[block, output])
        bits = ((exponent_of(packed, j) << 7).astype(jnp.uint16) for j in range(per_word))
        return [(lax.bitcast_convert_type(one, jnp.bfloat16), None) for one in bits]
    together = min(matrix.group // SLAB, per_word)  # slabs that share scales
    centre = 0 if matrix.is_float else CENTRE[matrix.bits]
    found: list[tuple[Array, Array | None]] = []
    for first in range(0, per_word, together):
        group = lax.div((block * per_word + first) * SLAB, matrix.group)
        scale, zero = matrix.scale_and_zero(plgpu.load(scales_ref.at[group, output]))
        found += [(scale, None if zero is centre else (centre - zero) * scale)] * together
    return found


def exponent_of(packed: Array, j: int) -> Array:
    return packed >> 8 * j & 0xFF


def weights_of(
    words: Array,
    slabs: range,
    matrix: QuantizedWords,
    scales: list[tuple[Array, Array | None]],
    dtype: Any,
) -> Array:
    """[outputs, inputs of these slabs]; of e2m1, still to be made up for."""
    found = [_slab_of(words, j, matrix, *scales[j], dtype) for j in slabs]
    if len(found) == 1:
        return found[0]
    # One after the other: what each thread holds stays where it is.
    return jnp.stack(found, axis=-1).swapaxes(1, 2).reshape(len(words), -1)


def made_up(sums: Array, matrix: QuantizedWords) -> Array:
    return sums * 2.0**LEFT_OVER if matrix.is_e2m1 else sums


def _slab_of(
    words: Array, j: int, matrix: QuantizedWords, scale: Array, rest: Array | None, dtype: Any
) -> Array:
    each = [
        jnp.broadcast_to(one.astype(dtype)[:, None], words.shape) for one in (scale, rest) if one is not None
    ]
    if gpu_launch.interpreted():
        if matrix.is_e2m1:  # by whole numbers: CPUs know no floats as small as these
            exponent = lax.bitcast_convert_type(each[0], jnp.uint16).astype(jnp.int32) >> 7
            exponent = jnp.maximum(exponent - MADE_UP - LEFT_OVER, 0)
            each = [lax.bitcast_convert_type(exponent << 23, jnp.float32)]
        return sum(each[1:], _numbers(words, j, matrix) * each[0]).astype(dtype)
    kind = MAGIC[dtype][0]
    if len(each) == 2:
        multiplied = f"fma.rn.{kind} $0, f, $2, $3;"
    else:  # plus -0: of bfloat16 a product is for newer GPUs alone
        multiplied = f"mov.b32 w, {twice(SIGN)}; fma.rn.{kind} $0, f, $2, w;"
    return assembled(f"{_assembly(j, matrix, dtype)} {multiplied}", dtype, words, *each)


def _numbers(words: Array, j: int, matrix: QuantizedWords) -> Array:
    """float32: the j-th code of each word, less CENTRE; of e2m1, twice the float."""
    codes = matrix.signed(matrix.codes(words, j)).astype(jnp.float32)
    return codes if matrix.is_float else codes - CENTRE[matrix.bits]


def _assembly(j: int, matrix: QuantizedWords, dtype: Any) -> str:
    if matrix.is_float:
        return tiny_floats(j) if matrix.bits == 4 else floats(j)
    return whole_numbers(j, matrix.bits, dtype)
