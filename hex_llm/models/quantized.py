"""Matrices of a few bits: numbers with scales and offsets for groups of inputs, and floats of 8 bits.

A weight is (code - zero) * scale + offset; of floats of 4 bits, a code is the whole number that is twice the
float. `Quantized` expands itself wherever it is multiplied, so that XLA
can run it on anything; kernels of our own take its arrays into theirs (execution/weight_layouts.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hex_llm.kernels import float8, gpu_dense, gpu_float8
from hex_llm.kernels.adapters import Norm
from hex_llm.kernels.codes import doubled_e2m1
from hex_llm.kernels.experts import Activation
from hex_llm.kernels.float8 import FLOAT8_MAX, Rounded
from hex_llm.kernels.matrix import PlainMatrix
from hex_llm.models.linear import Dense
from hex_llm.models.params import Rounding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized(PlainMatrix):
    """A Matrix [*outputs, *inputs]; the groups lie along its last axis."""

    codes: Any  # int8, float8_e4m3fn; or uint8, each with two numbers that follow each other, the first below
    scales: Any  # float32 [..., groups]
    offsets: Any | None = None
    bits: int = field(default=8, metadata={"static": True})
    zero: int = field(default=0, metadata={"static": True})
    num_outputs: int = field(default=1, metadata={"static": True})  # axes
    is_e2m1: bool = field(default=False, metadata={"static": True})  # of 4 bits: they are floats
    # Of floats of 8 bits: all inputs of an output share its scale, so that activations can be rounded too.
    is_whole: bool = field(default=False, metadata={"static": True})

    def matmul(self, x: jax.Array) -> jax.Array:
        return self.expanded(x.dtype).matmul(x)

    def gated(self, x: jax.Array, activation: Activation, bias: jax.Array | None = None) -> jax.Array:
        return self.expanded(x.dtype).gated(x, activation, bias)

    def rows(self, which: jax.Array) -> jax.Array:
        of_these: Quantized = jax.tree.map(lambda array: array[which], self)
        return of_these.expanded(jnp.float32).array

    def expanded(self, dtype: DTypeLike) -> Dense:
        codes, scales = self.whole_numbers(), self.scales
        groups = codes.reshape(*scales.shape, -1).astype(jnp.float32)
        values = (groups - self.zero) * scales[..., None]
        if self.offsets is not None:
            values = values + self.offsets[..., None]
        return Dense(values.astype(dtype).reshape(codes.shape), self.num_outputs)

    def unpacked(self) -> jax.Array:
        """One code in each place, as it is stored."""
        if self.bits == 8:
            return self.codes
        pairs = jnp.stack([self.codes & 15, self.codes >> 4], axis=-1)
        return pairs.reshape(*self.codes.shape[:-1], -1)

    def whole_numbers(self) -> jax.Array:
        """The same as what is scaled, of `number_bits`."""
        return doubled_e2m1(self.unpacked()) if self.is_e2m1 else self.unpacked()

    @property
    def group(self) -> int:
        """Inputs, along the last axis, that share a scale."""
        return int(self.codes.shape[-1] * 8 // self.bits // self.scales.shape[-1])

    @property
    def number_bits(self) -> int:
        return 8 if self.is_e2m1 else self.bits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Float8(PlainMatrix):
    """A Matrix [*outputs, *inputs] that is multiplied by activations of 8 bits, with a scale for each row."""

    takes_rounded = True

    codes: Any  # float8_e4m3fn
    scales: Any  # float32 [*outputs]
    # By kernels of our own (execution/weight_layouts.py): products of some rows; what is multiplied, where no
    # norm gives it, and what tokens become with the product, where a matrix like this reads them next; and
    # what becomes of gates and ups, where it is for one.
    has_kernel: bool = field(default=False, metadata={"static": True})
    rounds_rows: bool = field(default=False, metadata={"static": True})
    rounds_gated: bool = field(default=False, metadata={"static": True})

    def matmul(self, x: jax.Array | Rounded) -> jax.Array:
        rows, scales = self._rounded(x), self.scales.reshape(-1)
        num = len(rows.scales)
        if self._is_few(rows) and gpu_dense.num_splits(len(scales)) == 1:
            both = rows.scales[:, 0], scales
            out = gpu_dense.product(rows.codes, self._merged(rows), rows.dtype, both)
        else:
            out = (self._product(rows).sum(axis=0)[:num] * rows.scales * scales).astype(rows.dtype)
        return out.reshape(num, *self.scales.shape)

    def gated(self, x: jax.Array | Rounded, activation: Activation, bias: jax.Array | None = None) -> Any:
        if not self.rounds_gated:
            return super().gated(x, activation, bias)
        rows = self._rounded(x)
        product = self._product(rows).sum(axis=0, dtype=rows.dtype)
        return gpu_float8.round_gated(product, rows.scales, self.scales, bias, activation)

    def join(
        self, around: jax.Array, x: jax.Array | Rounded, bias: jax.Array | None, norm: Norm, rounds: bool
    ) -> tuple[jax.Array, Rounded] | None:
        if not (self.rounds_rows and rounds):
            return None
        rows = self._rounded(x)
        scales = rows.scales, self.scales.reshape(-1)
        return gpu_float8.join_rows(around, self._product(rows), *scales, bias, norm)

    def _rounded(self, x: jax.Array | Rounded) -> Rounded:
        if isinstance(x, Rounded):
            return x
        x = x.reshape(len(x), -1)
        return gpu_float8.round_rows(x) if self.rounds_rows else float8.round_rows(x)

    def _product(self, rows: Rounded) -> jax.Array:
        """[splits, T or more, outputs], without scales."""
        codes = self._merged(rows)
        if self._is_few(rows):
            return gpu_dense.product(rows.codes, codes, rows.dtype)
        return jax.lax.dot_general(
            rows.codes, codes, (((1,), (1,)), ((), ())), preferred_element_type=rows.dtype
        )[None]

    def _is_few(self, rows: Rounded) -> bool:
        return self.has_kernel and gpu_dense.can_multiply(rows.codes, self._merged(rows))

    def _merged(self, rows: Rounded) -> jax.Array:
        codes: jax.Array = self.codes.reshape(-1, rows.codes.shape[1])
        return codes

    def rows(self, which: jax.Array) -> jax.Array:
        codes = self.codes[which].astype(jnp.float32)
        return codes * self.scales[which].reshape(-1, *(1,) * (codes.ndim - 1))


@jax.jit
def pack(codes: jax.Array) -> jax.Array:
    """Codes of 4 bits [..., inputs], two in a byte."""
    return codes[..., ::2] | codes[..., 1::2] << 4


@partial(jax.jit, static_argnames="to")
def quantize(matrix: Dense, to: Rounding) -> Quantized:
    """The nearest codes: of 8 bits on both sides of zero, of 4 bits between a group's lowest and highest."""
    bits, group = to.bits, to.group
    if to.to_float and bits == 8:
        return _to_float8(matrix, group)
    groups = matrix.array.astype(jnp.float32).reshape(*matrix.array.shape[:-1], -1, group)
    if to.to_float:
        codes, scales = _to_e2m1(groups)
        offsets = None
    elif bits == 8:
        scales, offsets = jnp.max(jnp.abs(groups), axis=-1) / 127, None
        codes = _nearest(groups, scales).astype(jnp.int8)
    else:
        offsets, highest = jnp.minimum(groups.min(axis=-1), 0), jnp.maximum(groups.max(axis=-1), 0)
        scales = (highest - offsets) / 15
        codes = _nearest(groups - offsets[..., None], scales).astype(jnp.uint8)
    codes = codes.reshape(matrix.array.shape)
    packed = codes if bits == 8 else pack(codes)
    return Quantized(packed, scales, offsets, bits, num_outputs=matrix.num_outputs, is_e2m1=to.to_float)


def _to_float8(matrix: Dense, group: int) -> Quantized:
    array, num_outputs = matrix.array.astype(jnp.float32), matrix.num_outputs
    groups = array.reshape(*array.shape[:-1], -1, group or array.shape[-1])
    inputs = (-1,) if group else tuple(range(num_outputs, groups.ndim))
    peaks = jnp.max(jnp.abs(groups), axis=inputs, keepdims=True)
    scales = jnp.where(peaks == 0, 1, peaks * (1 / FLOAT8_MAX))
    codes = (groups / scales).astype(jnp.float8_e4m3fn).reshape(array.shape)
    each = jnp.broadcast_to(scales, (*groups.shape[:-1], 1))[..., 0]
    return Quantized(codes, each, num_outputs=num_outputs, is_whole=not group)


def _to_e2m1(groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes, and a power of two for each group: its largest gets the largest exponent."""
    peaks = jnp.max(jnp.abs(groups), axis=-1)
    scales = jnp.exp2(jnp.floor(jnp.log2(jnp.where(peaks == 0, 1, peaks))) - 2)
    sizes = jnp.abs(groups) / scales[..., None]
    wide = jnp.where(sizes < 4, jnp.round(sizes) + 2, jnp.round(sizes / 2) + 4)
    codes = jnp.minimum(jnp.where(sizes < 2, jnp.round(2 * sizes), wide), 7).astype(jnp.uint8)
    return codes | jnp.where(groups < 0, 8, 0).astype(jnp.uint8), scales / 2


def _nearest(groups: jax.Array, scales: jax.Array) -> jax.Array:
    return jnp.round(groups / jnp.where(scales == 0, 1, scales)[..., None])
