"""Quantized matrices on one CPU: cpu_quantized.cc multiplies their codes as whole numbers."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

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

    cells: (
        jax.Array
    )  # uint8 [C, 2 * width]: see cpu_quantized.cc; one array, since each costs a step some time
    outputs: tuple[int, ...] = field(metadata={"static": True})
    num_inputs: int = field(metadata={"static": True})
    bits: int = field(metadata={"static": True})
    num_groups: int = field(metadata={"static": True})
    is_half: bool = field(metadata={"static": True})  # scales and offsets are float16, not float32
    has_offsets: bool = field(metadata={"static": True})
    zero: int = field(default=0, metadata={"static": True})
    turned: bool = field(default=False, metadata={"static": True})

    @property
    def width(self) -> int:
        return int(self.cells.shape[1]) // 2

    @property
    def block(self) -> int:
        block = block_of(self.bits, self.num_inputs // self.num_groups)
        assert block is not None, f"{self.num_groups} groups of {self.num_inputs} inputs"
        return block

    def rows(self, which: jax.Array) -> jax.Array:
        num, num_panels = len(which), -(-math.prod(self.outputs) // self.width)
        panel, lane, every = which // self.width, which % self.width, jnp.arange(num)
        dtype = jnp.dtype(jnp.float16 if self.is_half else jnp.float32)
        grid, codes = (
            self.num_groups * dtype.itemsize // 2,
            self.num_inputs * self.bits // 16,
        )  # cells of a panel

        def of_panels(start: int, size: int) -> jax.Array:
            """[T, size, 2 * width] of each row's panel, in a part that begins at a cell."""
            return jax.vmap(lambda i: jax.lax.dynamic_slice_in_dim(self.cells, i, size))(start + panel * size)

        def numbers(start: int) -> jax.Array:
            """[T, groups, 1]"""
            taken = of_panels(start, grid).reshape(num, self.num_groups, self.width, dtype.itemsize)
            taken = jax.lax.bitcast_convert_type(taken, dtype)
            return taken[every, :, lane, None].astype(jnp.float32)

        quads = of_panels(num_panels * grid * (1 + self.has_offsets), codes)
        quads = quads.reshape(num, -1, self.width, QUAD)[every, :, lane]
        if self.bits == 4:
            quads = quads.reshape(num, self.num_inputs // self.block, -1, QUAD)
            quads = jnp.concatenate([quads & 15, quads >> 4], axis=2)
        else:
            quads = quads.astype(jnp.int8)
        values = (quads.reshape(num, self.num_groups, -1).astype(jnp.float32) - self.zero) * numbers(0)
        if self.has_offsets:
            values += numbers(num_panels * grid)
        return values.reshape(num, -1)

    def _multiply(self, x: jax.Array, num_columns: int, gated: bool = False) -> jax.Array:
        shape = jax.ShapeDtypeStruct((len(x), num_columns), jnp.float32)
        return jax.ffi.ffi_call(QUANTIZED_MATMUL, shape)(
            x,
            self.cells,
            bits=np.int64(self.bits),
            block=np.int64(self.block),
            num_groups=np.int64(self.num_groups),
            is_half=self.is_half,
            has_offsets=self.has_offsets,
            zero=np.float32(self.zero),
            gated=gated,
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
    grids = [scales] if offsets is None else [scales, offsets]
    dtype = jnp.float16 if all(map(_fits_half, grids)) else jnp.float32
    cells = _joined(codes, grids, outputs, bits, block, width, turned, dtype)
    is_half, has_offsets = dtype == jnp.float16, offsets is not None
    return QuantizedPanels(cells, outputs, num_inputs, bits, num_groups, is_half, has_offsets, zero, turned)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6, 7))
def _joined(
    codes: jax.Array,
    grids: list[jax.Array],
    outputs: tuple[int, ...],
    bits: int,
    block: int,
    width: int,
    turned: bool,
    dtype: DTypeLike,
) -> jax.Array:
    panels = _panels(codes, outputs, width, turned)
    shape = len(panels), PANEL_VECTORS, width // PANEL_VECTORS, panels.shape[2] // block, block // QUAD, QUAD
    panels = panels.reshape(shape).transpose(0, 3, 4, 1, 2, 5)  # [N, blocks, quads, vectors, lanes, quad]
    if bits == 4:
        half = panels.shape[2] // 2
        panels = panels[:, :, :half] | panels[:, :, half:] << 4
    numbers = [_panels(grid, outputs, width, turned).swapaxes(1, 2).astype(dtype) for grid in grids]
    grids = [jax.lax.bitcast_convert_type(grid, jnp.uint8) for grid in numbers]
    return jnp.concatenate([part.reshape(-1, 2 * width) for part in (*grids, panels.astype(jnp.uint8))])


def _panels(array: jax.Array, outputs: tuple[int, ...], width: int, turned: bool) -> jax.Array:
    """[N, width, ...] of [*outputs, ...]."""
    matrix = (array.swapaxes(0, 1) if turned else array).reshape(math.prod(outputs), -1)
    return jnp.pad(matrix, ((0, -len(matrix) % width), (0, 0))).reshape(-1, width, matrix.shape[1])


def _fits_half(grid: jax.Array) -> bool:
    """Loses nothing in float16, as those of most files do not."""
    return bool((grid.astype(jnp.float16) == grid).all())
