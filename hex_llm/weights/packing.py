"""Quantized matrices as files hold them: numbers of a few bits in words, and the scales of their groups.

All is seen as [outputs, inputs], however it lies in the file. Which tensors belong together is known to
`quantized.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from hex_llm.errors import ModelError
from hex_llm.weights.checkpoint import Slices, bounded
from hex_llm.weights.grouped import E2M1, Form, PartName
from hex_llm.weights.safetensors import INTEGERS, SafeTensor

Array = np.ndarray[Any, Any]
F32 = np.dtype(np.float32)


class Grid(Protocol):
    def read(self, rows: slice, columns: slice) -> Array:
        """The values there: rows are outputs, columns inputs."""
        ...


def stored(tensor: SafeTensor, *cuts: slice) -> Array:
    """The values there in the tensor's own type, whole numbers too."""
    return tensor.read(cuts or (slice(None),) * len(tensor.shape), INTEGERS.get(tensor.dtype))


@dataclass(frozen=True)
class Plain:
    """One value in each place."""

    tensor: SafeTensor
    transposed: bool = False  # lies in the file as [inputs, outputs]

    def read(self, rows: slice, columns: slice) -> Array:
        return stored(self.tensor, columns, rows).T if self.transposed else stored(self.tensor, rows, columns)


@dataclass(frozen=True)
class Packed:
    """Whole numbers, none below zero, several in a word."""

    tensor: SafeTensor  # of words
    bits: int
    shifts: tuple[int, ...]  # where in a word each of its numbers begins, in the numbers' order
    axis: int  # of the tensor: along which a word's numbers follow each other
    transposed: bool = False  # lies in the file as [inputs, outputs]
    added: int = 0  # to each number, modulo 2**bits

    def read(self, rows: slice, columns: slice) -> Array:
        cuts = [columns, rows] if self.transposed else [rows, columns]
        cut, num = cuts[self.axis], len(self.shifts)
        first = cut.start // num
        cuts[self.axis] = slice(first, -(-cut.stop // num))
        numbers = self._unpacked(stored(self.tensor, *cuts))
        whole = slice(None)
        needed = slice(cut.start - first * num, cut.stop - first * num)
        numbers = numbers[(whole, needed) if self.axis else (needed, whole)]
        return numbers.T if self.transposed else numbers

    def _unpacked(self, words: Array) -> Array:
        out = np.empty((*words.shape, len(self.shifts)), np.uint8)
        for i, shift in enumerate(self.shifts):
            # The mask also undoes the shift's copies of a negative word's sign.
            out[..., i] = ((words >> shift) + self.added) & ((1 << self.bits) - 1)
        out = out if self.axis else out.swapaxes(1, 2)
        shape = list(words.shape)
        shape[self.axis] *= len(self.shifts)
        return out.reshape(shape)


@dataclass(frozen=True)
class Nested:
    """Scales that are quantized themselves, in runs of `run` over all of them: a table's values, scaled."""

    tensor: SafeTensor  # places in the table
    table: Array
    scales: SafeTensor  # of the runs
    run: int
    offset: float

    def read(self, rows: slice, columns: slice) -> Array:
        width = self.tensor.shape[1]
        places = np.arange(rows.start, rows.stop)[:, None] * width + np.arange(columns.start, columns.stop)
        runs, cut = _within(places // self.run)
        scales = stored(self.scales, cut).astype(F32)[runs]
        return self.table[stored(self.tensor, rows, columns)] * scales + F32.type(self.offset)


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix [outputs, inputs] of a quantized checkpoint; see checkpoint.Tensor. The value of a code with
    scale s and zero point z is (code - z) * s * unit, or table[code] * s * unit."""

    name: str
    shape: tuple[int, int]
    codes: Grid
    scales: Grid
    block: tuple[int, int]  # so many outputs and inputs share a scale and a zero point
    zeros: Grid | int = 0
    groups: SafeTensor | None = None  # the group of each input, where they are not in order
    table: Array | None = None  # the values that the codes stand for
    unit: float = 1.0

    def read(self, index: Slices, integers: np.dtype[Any] | None = None) -> Array:
        """float32, rounded once for each of the operations above; reads only the words, scales and zero
        points that `index` touches."""
        if integers is not None:
            raise ModelError(f"{self.name} is quantized: it cannot be read as {integers.name}")
        rows, columns = bounded(index, self.shape)
        codes = self.codes.read(rows, columns)
        values = codes.astype(F32) if self.table is None else self.table.take(codes)
        # In memory as the values are: of two orders, an operation takes twenty times as long.
        place = partial(
            self._at, rows, self._groups_of(columns), turned=values.strides[0] < values.strides[1]
        )
        if not isinstance(self.zeros, int):
            values -= place(self.zeros)
        elif self.zeros:
            values -= F32.type(self.zeros)
        values *= place(self.scales)
        if self.unit != 1:
            values *= F32.type(self.unit)
        return values

    @property
    def form(self) -> Form | None:
        """See grouped.GroupedTensor. None: codes of another table than E2M1, or groups not in order."""
        if self.table is E2M1:
            return Form(4, self.block[1], is_float=True)
        if self.table is not None or self.groups is not None:
            return None
        if isinstance(self.codes, Packed):
            bits = self.codes.bits
        elif isinstance(self.codes, Plain) and self.codes.tensor.dtype == "I8":
            bits = 8
        elif isinstance(self.codes, Plain) and self.codes.tensor.dtype == "F8_E4M3":
            return Form(8, self.block[1] if self.block[1] < self.shape[1] else 0, is_float=True)
        else:
            return None
        if isinstance(self.zeros, int):
            return Form(bits, self.block[1], zero=self.zeros - self._moved)
        return Form(bits, self.block[1], has_offsets=True)

    @property
    def _moved(self) -> int:
        """What codes of 8 bits are less than in the file, where they have no sign."""
        return 128 if isinstance(self.codes, Packed) and self.codes.bits == 8 else 0

    def read_part(self, name: PartName, rows: slice, columns: slice, group: int) -> Array:
        if name == "codes":
            codes = self.codes.read(rows, columns)
            return (codes ^ 128).view(np.int8) if self._moved else codes
        groups = np.arange(columns.start, columns.stop) * group // self.block[1]
        scales = self._at(rows, groups, self.scales) * F32.type(self.unit)
        if name == "scales":
            return scales
        assert not isinstance(self.zeros, int), f"{self.name} has no offsets"
        return (self._moved - self._at(rows, groups, self.zeros)) * scales

    def _at(self, rows: slice, groups: Array, grid: Grid, turned: bool = False) -> Array:
        """float32 of each of these outputs and of inputs of these groups; turned: one input after another in
        memory."""
        in_rows, group_rows = _within(np.arange(rows.start, rows.stop) // self.block[0])
        in_columns, group_columns = _within(groups)
        found = grid.read(group_rows, group_columns).astype(F32)
        if turned:
            return found.T[:, in_rows].take(in_columns, axis=0).T
        return found[in_rows].take(in_columns, axis=1)

    def _groups_of(self, columns: slice) -> Array:
        size = self.block[1]
        if self.groups is None:
            return np.arange(columns.start, columns.stop) // size
        groups = stored(self.groups, columns)
        if groups.size and not 0 <= groups.min() <= groups.max() < -(-self.shape[1] // size):
            raise ModelError(
                f"{self.groups.name} names a group that does not exist: download the model again"
            )
        return groups


def _within(groups: Array) -> tuple[Array, slice]:
    """The stretch that holds all these groups, and where in it each is."""
    if not groups.size:
        return groups, slice(0, 0)
    first = int(groups.min())
    return groups - first, slice(first, int(groups.max()) + 1)
