"""A checkpoint, or random numbers, into the sharded arrays of a model.

Each device receives only its slice, and the host holds only the few tensors that are on their way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from hex_llm.errors import ModelError
from hex_llm.models.params import Param, Piece, Weights, abstract_weights
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import sharding
from hex_llm.weights.checkpoint import Checkpoint, Slices

NUM_READERS = 2  # tensors on their way at a time: one is read while another is copied to its device
INIT_SCALE = 0.02

Array = np.ndarray[Any, Any]


def load_weights(
    spec: ModelSpec, checkpoint: Checkpoint, mesh: Mesh, dtype: np.dtype[Any], progress: bool = False
) -> Weights:
    """Names and shapes are checked for the whole model before the first tensor is read."""
    params, tree = jax.tree.flatten(abstract_weights(spec), is_leaf=_is_param)
    _check(checkpoint, (piece for param in params for piece in param.pieces))
    with ThreadPoolExecutor(NUM_READERS) as readers:
        load = partial(_load, checkpoint=checkpoint, mesh=mesh, dtype=dtype)
        arrays = list(
            tqdm(
                readers.map(load, params), "Loading weights", len(params), disable=not progress, unit="tensor"
            )
        )
    weights: Weights = jax.tree.unflatten(tree, arrays)
    return weights


def init_weights(spec: ModelSpec, mesh: Mesh, dtype: np.dtype[Any], seed: int) -> Weights:
    """Random weights, made on the devices that will hold them."""
    params, tree = jax.tree.flatten(abstract_weights(spec), is_leaf=_is_param)
    key = jax.random.key(seed)
    make_random = cache(_random)  # one compilation for all layers

    def make(i: int, param: Param) -> jax.Array:
        placed = sharding(mesh, param.shape, param.axes)
        if param.norm:
            return jax.device_put(jnp.full(param.shape, 1 - spec.norm_offset, dtype), placed)
        return make_random(param.shape, dtype, placed)(jax.random.fold_in(key, i))

    weights: Weights = jax.tree.unflatten(tree, [make(i, param) for i, param in enumerate(params)])
    return weights


def _random(
    shape: tuple[int, ...], dtype: np.dtype[Any], placed: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    def normal(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(INIT_SCALE, dtype)

    return jax.jit(normal, out_shardings=placed)


def _is_param(leaf: object) -> bool:
    return isinstance(leaf, Param)


def _check(checkpoint: Checkpoint, pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        tensor = checkpoint.get(piece.name)
        if tensor is None:
            raise ModelError(
                f"the checkpoint lacks {piece.name}: is it complete, and does config.json belong to it?"
            )
        if tuple(tensor.shape) != piece.shape:
            raise ModelError(
                f"{piece.name} has shape {list(tensor.shape)}, but config.json asks for {list(piece.shape)}"
            )


def _load(param: Param, checkpoint: Checkpoint, mesh: Mesh, dtype: np.dtype[Any]) -> jax.Array:
    placed = sharding(mesh, param.shape, param.axes)
    parts: dict[str, Array] = {}  # devices that hold the same part share one read

    def part(index: tuple[slice, ...] | None) -> Array:
        assert index is not None
        bounds = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, param.shape, strict=True))
        key = str(bounds)
        if key not in parts:
            parts[key] = _assemble(param, bounds, checkpoint, dtype)
        return parts[key]

    return jax.make_array_from_callback(param.shape, placed, part, dtype=dtype)


def _assemble(param: Param, index: Slices, checkpoint: Checkpoint, dtype: np.dtype[Any]) -> Array:
    out: Array = np.empty([s.stop - s.start for s in index], dtype)
    for piece in param.pieces:
        target = (*piece.to, *(slice(None),) * (out.ndim - len(piece.to)))
        # An axis picked by a number is not the piece's; one picked by a part is never split over devices.
        ranges = [
            cut if place == slice(None) else slice(0, place.stop - place.start)
            for cut, place in zip(index, target, strict=True)
            if isinstance(place, slice)
        ]
        out[target] = _read(piece, ranges, checkpoint)
    return out


def _read(piece: Piece, ranges: list[slice], checkpoint: Checkpoint) -> Array:
    """The part of a piece that `ranges`, one for each of its axes in the parameter's order, cut out."""
    first, repeat = ranges[0], piece.repeat
    stored = [slice(first.start // repeat, -(-first.stop // repeat)), *ranges[1:]]
    order = piece.order or tuple(range(len(piece.view)))
    in_view = [stored[order.index(axis)] for axis in range(len(order))]
    values = checkpoint[piece.name].read(_stored_slices(piece, in_view))
    values = values.reshape([s.stop - s.start for s in in_view]).transpose(order)
    if repeat > 1:
        skip = first.start - stored[0].start * repeat
        values = values.repeat(repeat, axis=0)[skip : skip + first.stop - first.start]
    return values


def _stored_slices(piece: Piece, in_view: list[slice]) -> Slices:
    """Cuts of the view as cuts of the checkpoint tensor; only the first view axis of a group may be cut."""
    slices, axes = [], list(zip(piece.view, in_view, strict=True))
    axis, offset = piece.start
    others = math.prod(n for i, n in enumerate(piece.shape) if i != axis)
    for i, size in enumerate(piece.shape):
        size = math.prod(piece.view) // others if i == axis else size
        length, cut = axes.pop(0)
        while length < size:
            inner, whole = axes.pop(0)
            assert whole == slice(0, inner), f"{piece.name}: an inner axis cannot be split over devices"
            length, cut = length * inner, slice(cut.start * inner, cut.stop * inner)
        shift = offset if i == axis else 0
        slices.append(slice(cut.start + shift, cut.stop + shift))
    return tuple(slices)
