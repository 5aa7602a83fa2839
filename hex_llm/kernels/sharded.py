"""Matrices that are split over devices, each of which multiplies its own part by a kernel that sees no other.

A device lays its part out as if it were alone: what kernels read in tiles, filled up to whole ones, has no
axes left that could be split as the matrix was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.kernels.experts import Activation
from hex_llm.kernels.matrix import PlainMatrix


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardedMatrix(PlainMatrix):
    """A Matrix (models/linear.py). One axis of its outputs or inputs is split, or none."""

    shard: Any  # a Matrix of one device's shape, in whose arrays those of all devices follow each other
    mesh: Any = field(metadata={"static": True})
    outputs: P = field(metadata={"static": True})  # how they are split
    inputs: P = field(metadata={"static": True})

    @property
    def spec(self) -> P:
        """How all arrays are split."""
        return first_axis(P(*self.outputs, *self.inputs))

    def matmul(self, x: Array) -> Array:
        [axis] = inputs = first_axis(self.inputs)

        def product(shard: Any, x: Array) -> Array:
            out: Array = shard.matmul(x)
            return out if axis is None else lax.psum(out, axis)

        return self._each(product, P(None, *self.outputs), (x, P(None, *inputs)))

    def gated(self, x: Array, activation: Activation, bias: Array | None = None) -> Array:
        """Gates and ups are never split by their inputs."""

        def product(shard: Any, x: Array, bias: Array | None) -> Any:
            return shard.gated(x, activation, bias)

        return self._each(product, P(None, *self.outputs[:1]), (x, P()), (bias, self.outputs))

    def rows(self, which: Array) -> Array:
        """Of one axis of outputs."""
        [axis] = first_axis(self.outputs)

        def own_rows(shard: Any, which: Array) -> Any:
            if axis is None:
                return shard.rows(which)
            (num_own,) = shard.outputs
            place = which - lax.axis_index(axis) * num_own
            is_own = (place >= 0) & (place < num_own)
            found = shard.rows(jnp.where(is_own, place, 0))
            return lax.psum(jnp.where(is_own[:, None], found, 0), axis)

        return self._each(own_rows, P(None, *self.inputs), (which, P()))

    def _each(self, function: Callable[..., Any], out: P, *given: tuple[Any, P]) -> Array:
        """What devices make of their shards and of their parts of what is given, which is split so."""
        arrays, specs = zip((self.shard, self.spec), *given, strict=True)
        local = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)
        found: Array = local(*arrays)
        return found


@cache  # one compilation for all layers
def by_device(lay_out: Callable[[Any], Any], lies: NamedSharding) -> Callable[[Any], Any]:
    """Takes a matrix whose arrays lie so, gives `lay_out` each device's part of it, and makes the shard of a
    ShardedMatrix. What all inputs share, a scale, is every device's."""

    def own(array: Array) -> P:
        axes = zip(lies.spec, array.shape, strict=False)
        return P(*(axis if size > 1 else None for axis, size in axes))

    def everywhere(matrix: Any) -> Any:
        specs, out = (jax.tree.map(own, matrix),), first_axis(lies.spec)
        local = jax.shard_map(lay_out, mesh=lies.mesh, in_specs=specs, out_specs=out, check_vma=False)
        return local(matrix)

    return jax.jit(everywhere)


def sharded(shard: Any, mesh: Any, spec: P, num_outputs: int) -> Any:
    """What `by_device` made of a matrix that was split so."""
    split = P(*spec[:num_outputs]), P(*spec[num_outputs:])
    return shard if mesh.size == 1 else ShardedMatrix(shard, mesh, *split)


def first_axis(spec: P) -> P:
    """Of the mesh, that something is split over."""
    return P(next((axis for axis in spec if axis is not None), None))


class Stretch(NamedTuple):
    """Where an axis lies in one that is filled up with zeros."""

    first: Any
    length: int


def in_whole_groups(index: Any, width: int, group: int, whole: int, unit: int) -> Stretch:
    """Of a device's part, so wide, of what came in finer groups since whole ones lay on two devices: it
    begins where it would in a whole one, and fills units."""
    return Stretch(index * width % whole, -(-(width + whole - group) // unit) * unit)


def filled(array: Array, axis: int, length: int, first: Any = 0) -> Array:
    """With zeros before and behind it, so long."""
    shape = *array.shape[:axis], length, *array.shape[axis + 1 :]
    return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, array.dtype), array, first, axis)
