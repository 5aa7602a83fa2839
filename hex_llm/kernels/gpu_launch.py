"""What the Pallas-Triton kernels share: how one is launched, and how tiles are read and multiplied."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels.experts import Activation

DTYPES = [jnp.dtype(kind) for kind in (jnp.bfloat16, jnp.float16, jnp.float32)]  # of activations
LOG2_E = math.log2(math.e)
MIN_DOT = 16  # the least side of a matrix product
MIN_CAPABILITY = 8.0  # which Triton has a compiler for
HOPPER = 9.0  # what kernels were measured on
# Compute capabilities whose programs can share 227 KiB; A100's 163, all others since then 99.
LARGE_SHARED_MEMORY = (9.0, 10.0, 10.3)

ROW_COLUMNS, ROW_WARPS = 4096, 16  # read at a time; of a program that has a row so wide

Place = tuple[Array, Array | None]  # columns, and which of them are there

# Where there is none, JAX's bindings look for it again at each operation of a kernel, which takes a third of
# the time that a step is lowered in. There is nothing to be in it: operations are registered without.
TRITON_DIALECT = "jaxlib.mlir.dialects.tt"
if TRITON_DIALECT not in sys.modules and find_spec(TRITON_DIALECT) is None:
    sys.modules[TRITON_DIALECT] = ModuleType(TRITON_DIALECT)

_made_for: float | None = None  # a compute capability


def launched(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    out: Any,
    warps: int,
    stages: int,
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """A kernel that sees all arrays whole, since it finds its way through tables."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out),
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpreted(),
    )


@contextmanager
def made_for(wanted: float) -> Iterator[None]:
    """Kernels are made for GPUs of this compute capability, whatever there is here."""
    global _made_for
    before, _made_for = _made_for, wanted
    try:
        yield
    finally:
        _made_for = before


def interpreted() -> bool:
    return _made_for is None and jax.default_backend() == "cpu"


def capability() -> float:
    """Of the GPUs here; where there are none, as interpreted kernels and plans have it."""
    if _made_for is not None:
        return _made_for
    return float(jax.local_devices()[0].compute_capability) if jax.default_backend() == "gpu" else HOPPER


def has_large_shared_memory() -> bool:
    """Whether a program has as much to share, and multiplies from there, as tilings were measured with; for
    others they are smaller."""
    return capability() in LARGE_SHARED_MEMORY


def has_tensor_memory() -> bool:
    """Whether sums of products lie in a memory of their own, which is smaller than registers (Blackwell)."""
    return has_large_shared_memory() and capability() > HOPPER


def next_power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def dot(a: Array, b: Array) -> Array:
    exact = a.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def quick(activation: Activation) -> Activation:
    """The same. A division takes longer than a root and a square."""
    return _silu if activation is jax.nn.silu else activation


def _silu(x: Array) -> Array:
    return x * jnp.square(lax.rsqrt(1 + jnp.exp2(x * -LOG2_E)))


def gated(both: Array, activation: Activation, dtype: Any) -> Array:
    """float32 [R, C], of a product's gates and ups by turns [R, 2 C], which are rounded as it comes out."""
    both = both.astype(dtype).astype(jnp.float32)
    gate, up = jnp.unstack(both.reshape(len(both), -1, 2), axis=2)
    return quick(activation)(gate) * up


def load_rows(ref: Any, row: Array, column: Array, there: Array | None, inside: Array | None) -> Array:
    """ref[row [R], column [1 or R, C]]; 0 where a row is not there or a column not inside."""
    shape = (len(row), column.shape[1])
    mask = both(there, inside, shape)
    return plgpu.load(ref.at[index_grid(row, column)], mask=mask, other=None if mask is None else 0)


def read_tile(ref: Any, leading: tuple[Array, ...], row: Array, column: Array, inside: Array | None) -> Array:
    """ref[*leading, row [R], column [C]]; 0 where a column is not inside."""
    index = (*leading, *index_grid(row, column[None, :]))
    mask = both(None, inside, (len(row), len(column)))
    return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0)


def row_warps(width: int) -> int:
    """Of a program that has a row."""
    return min(max(next_power(width) // (ROW_COLUMNS // ROW_WARPS), 1), ROW_WARPS)


def places(width: int, most: int = ROW_COLUMNS, parts: int = 1) -> list[Place]:
    """A row's columns in the order of memory, for so many results at a time, each made of `parts`."""
    size = min(next_power(width), most)
    columns = [parts * start + lax.iota(jnp.int32, parts * size) for start in range(0, width, size)]
    is_whole = width % size == 0
    return [(column, None if is_whole else column < parts * width) for column in columns]


def read_place(ref: Any, place: Place, *row: Any) -> Array:
    """0 where a column is not there."""
    column, mask = place
    return plgpu.load(ref.at[(*row, column)], mask=mask, other=None if mask is None else 0)


def store_joined(
    total: list[Array],
    row: Array,
    all_places: list[Place],
    weight_ref: Any,
    out_ref: Any,
    eps: float,
    offset: float,
) -> list[Array]:
    """Stores a row of tokens, given in float32 as rounded, 0 where a column is not there; gives that as the
    norm leaves it, in their type."""
    weights = [read_place(weight_ref, place).astype(jnp.float32) + offset for place in all_places]
    factor = lax.rsqrt(sum(jnp.sum(x * x) for x in total) / out_ref.shape[1] + eps)
    store_row(out_ref, row, all_places, [x.astype(out_ref.dtype) for x in total])
    return [(x * factor * weight).astype(out_ref.dtype) for x, weight in zip(total, weights, strict=True)]


def store_row(ref: Any, row: Array, all_places: list[Place], parts: list[Array]) -> None:
    for (column, mask), part in zip(all_places, parts, strict=True):
        plgpu.store(ref.at[row, column], part, mask=mask)


def index_grid(row: Array, column: Array) -> tuple[Array, Array]:
    shape = (len(row), column.shape[1])
    return jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column, shape)


def both(there: Array | None, inside: Array | None, shape: tuple[int, ...]) -> Array | None:
    rows = None if there is None else jnp.broadcast_to(there[:, None], shape)
    columns = None if inside is None else jnp.broadcast_to(inside[None, :], shape)
    if rows is None or columns is None:
        return columns if rows is None else rows
    return rows & columns
