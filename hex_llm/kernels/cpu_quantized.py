"""Quantized matrices on one CPU: cpu_quantized.cc multiplies their codes as whole numbers."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.kernels.cpu import PANEL_VECTORS, QUANTIZED_MATMUL, PanelMatrix

BLOCK = 32  # inputs that are multiplied as whole numbers before they are scaled
SMALL_BLOCK = 16  # likewise, of codes of 8 bits
QUAD = 4  # inputs of one output that lie side by side


def block_of(bits: int, group: int) -> int | None:
    """None: the kernel has none for groups of this size."""
    blocks = (BLOCK,) if bits == 4 else (BLOCK, SMALL_BLOCK)
    return next((block for block in blocks if group % block == 0), None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedPanels(PanelMatrix):
    """A weight is (code - zero) * scale + offset. Outputs are filled up to a multiple of the width."""

    codes: jax.Array  # uint8 [N, bytes]: see cpu_quantized.cc
    scales: jax.Array  # float16 or float32 [N, groups, width]
    offsets: jax.Array | None  # likewise
    outputs: tuple[int, ...] = field(metadata={"static": True})
    num_inputs: int = field(metadata={"static": True})
    bits: int = field(metadata={"static": True})
    block: int = field(metadata={"static": True})
    zero: int = field(default=0, metadata={"static": True})
    turned: bool = field(default=False, metadata={"static": True})

    @property
    def width(self) -> int:
        return int(self.scales.shape[2])

    def rows(self, which: jax.Array) -> jax.Array:
        panel, lane = which // self.width, which % self.width
        vector, lane = lane // (self.width // PANEL_VECTORS), lane % (self.width // PANEL_VECTORS)
        num_blocks = self.num_inputs // self.block
        codes = self.codes.reshape(len(self.codes), num_blocks, -1, PANEL_VECTORS, self.width // 2, QUAD)
        codes = codes[panel, :, :, vector, lane]  # [T, blocks, loads, quad]
        if self.bits == 4:
            codes = jnp.concatenate([codes & 15, codes >> 4], axis=2)
        else:
            codes = codes.astype(jnp.int8)
        groups = codes.reshape(len(which), self.scales.shape[1], -1).astype(jnp.float32) - self.zero
        values = groups * self.scales[panel, :, which % self.width][..., None].astype(jnp.float32)
        if self.offsets is not None:
            values += self.offsets[panel, :, which % self.width][..., None].astype(jnp.float32)
        return values.reshape(len(which), -1)

    def _multiply(self, x: jax.Array, num_columns: int, gated: bool = False) -> jax.Array:
        shape = jax.ShapeDtypeStruct((len(x), num_columns), jnp.float32)
        offsets = jnp.zeros((0, 0, 0), self.scales.dtype) if self.offsets is None else self.offsets
        numbers = {"bits": np.int64(self.bits), "block": np.int64(self.block), "zero": np.float32(self.zero)}
        return jax.ffi.ffi_call(QUANTIZED_MATMUL, shape)(
            x, self.codes, self.scales, offsets, gated=gated, **numbers
        )


def to_quantized_panels(
    codes: jax.Array,
    scales: jax.Array,
    offsets: jax.Array | None,
    *,
    num_output_axes: int,
    bits: int,
    zero: int,
    width: int,
    turned: bool = False,
) -> QuantizedPanels:
    """codes [*outputs, *inputs], one in each place; scales and offsets [*outputs, *inputs / group]."""
    outputs = codes.shape[:num_output_axes]
    num_inputs = math.prod(codes.shape[num_output_axes:])
    num_groups = math.prod(scales.shape[num_output_axes:])
    block = block_of(bits, num_inputs // num_groups)
    assert block is not None, f"groups of {num_inputs // num_groups} inputs"
    scales, offsets = _narrowed(
        _grid(scales, outputs, width, turned),
        None if offsets is None else _grid(offsets, outputs, width, turned),
    )
    codes = _codes(codes, outputs, bits, block, width, turned)
    return QuantizedPanels(codes, scales, offsets, outputs, num_inputs, bits, block, zero, turned)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _grid(grid: jax.Array, outputs: tuple[int, ...], width: int, turned: bool) -> jax.Array:
    return _panels(grid, outputs, width, turned).swapaxes(1, 2)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _codes(
    codes: jax.Array, outputs: tuple[int, ...], bits: int, block: int, width: int, turned: bool
) -> jax.Array:
    panels = _panels(codes, outputs, width, turned)
    shape = len(panels), PANEL_VECTORS, width // PANEL_VECTORS, panels.shape[2] // block, block // QUAD, QUAD
    panels = panels.reshape(shape).transpose(0, 3, 4, 1, 2, 5)  # [N, blocks, quads, vectors, lanes, quad]
    if bits == 4:
        half = panels.shape[2] // 2
        panels = panels[:, :, :half] | panels[:, :, half:] << 4
    return panels.astype(jnp.uint8).reshape(len(panels), -1)


def _panels(array: jax.Array, outputs: tuple[int, ...], width: int, turned: bool) -> jax.Array:
    """[N, width, ...] of [*outputs, ...]."""
    matrix = (array.swapaxes(0, 1) if turned else array).reshape(math.prod(outputs), -1)
    return jnp.pad(matrix, ((0, -len(matrix) % width), (0, 0))).reshape(-1, width, matrix.shape[1])


def _narrowed(scales: jax.Array, offsets: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """In float16 if neither loses by it, as those of most files do not."""

    def fits(grid: jax.Array) -> bool:
        return bool((grid.astype(jnp.float16) == grid).all())

    if not fits(scales) or not (offsets is None or fits(offsets)):
        return scales, offsets
    return scales.astype(jnp.float16), None if offsets is None else offsets.astype(jnp.float16)
