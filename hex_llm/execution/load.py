"""A checkpoint, or random numbers, into the sharded arrays of a model.

Each device receives only its slice, and the host holds only the few tensors that are on their way.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from hex_llm.errors import ModelError
from hex_llm.execution.weight_plan import WeightPlan
from hex_llm.models.linear import Dense
from hex_llm.models.params import F32, Param, Piece, Weights, declared
from hex_llm.models.quantized import pack, quantize
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import sharding
from hex_llm.weights.checkpoint import Checkpoint, Slices

READ_BYTES = 32 << 20  # of a part that are read from the checkpoint at once
ALIGNMENT = 64  # bytes, of memory that a CPU device takes over
# Tensors on their way at a time: one is read while another is copied to its device. Hosts that exchange parts
# must do it in the same order.
NUM_READERS = 2
INIT_SCALE = 0.02

Array = np.ndarray[Any, Any]
Read = Callable[[Piece, Slices], Array]  # a stretch of a piece's checkpoint tensor


def load_weights(
    plan: WeightPlan, checkpoint: Checkpoint, mesh: Mesh, dtype: np.dtype[Any], progress: bool = False
) -> Weights:
    """Names and shapes are checked for the whole model before the first tensor is read."""
    params, checkpoint = declared(plan.weights), {**checkpoint, **plan.parts}
    check_room(params, mesh, dtype)
    _check(checkpoint, (piece for param in params for piece in param.pieces))
    return _made(plan, partial(_load, checkpoint=checkpoint, mesh=mesh, dtype=dtype), progress)


def init_weights(plan: WeightPlan, spec: ModelSpec, mesh: Mesh, dtype: np.dtype[Any], seed: int) -> Weights:
    """Random weights, made on the devices that will hold them."""
    params = declared(plan.weights)
    check_room(params, mesh, dtype)
    key = jax.random.key(seed)
    places = {id(param): i for i, param in enumerate(params)}

    def make(param: Param) -> jax.Array:
        placed = sharding(mesh, param.shape, param.axes)
        if param.norm:
            return _full(param.shape, 1 - spec.norm_offset, dtype, placed)()
        return _random(param.shape, dtype, placed)(jax.random.fold_in(key, places[id(param)]))

    return _made(plan, make)


def _made(plan: WeightPlan, make: Callable[[Param], jax.Array], progress: bool = False) -> Weights:
    """The weights with what `make` makes of each parameter; what is to be quantized is, one by one."""

    def is_part(node: Any) -> bool:
        return isinstance(node, Param | Dense)

    def make_part(part: Any) -> Any:
        made = jax.tree.map(make, part, is_leaf=lambda leaf: isinstance(leaf, Param))
        rounded_to = part.array.rounded_to if isinstance(part, Dense) else None
        return made if rounded_to is None else quantize(made, rounded_to)

    parts, tree = jax.tree.flatten(plan.weights, is_leaf=is_part)
    with ThreadPoolExecutor(NUM_READERS if jax.process_count() == 1 else 1) as readers:
        made = readers.map(make_part, parts)
        weights: Weights = jax.tree.unflatten(
            tree, list(tqdm(made, "Loading weights", len(parts), disable=not progress, unit="tensor"))
        )
    return weights


@cache  # one compilation for all layers
def _full(
    shape: tuple[int, ...], value: float, dtype: np.dtype[Any], placed: NamedSharding
) -> Callable[[], jax.Array]:
    return jax.jit(partial(jnp.full, shape, value, dtype), out_shardings=placed)


@cache
def _random(
    shape: tuple[int, ...], dtype: np.dtype[Any], placed: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    def normal(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(INIT_SCALE, dtype)

    return jax.jit(normal, out_shardings=placed)


def check_room(params: Iterable[Param], mesh: Mesh, dtype: np.dtype[Any]) -> None:
    """Refuses weights that the devices cannot hold, before anything is allocated."""
    needed = weight_bytes(params, mesh, dtype)
    free = free_bytes(list(mesh.devices.flat))
    if free is not None and needed > free:
        raise ModelError(
            f"the weights need {needed / 2**30:,.1f} GiB on each of {mesh.size} device(s), which have "
            f"{free / 2**30:,.1f} GiB free: take a smaller model or --dtype, or raise --tensor_parallel_size"
        )


def weight_bytes(params: Iterable[Param], mesh: Any, dtype: np.dtype[Any], scale_bits: int = 32) -> int:
    """What they take on each device of a mesh, which may be an abstract one, once they are loaded.
    `scale_bits`: of the numbers that belong to groups of others."""
    return sum(
        int(
            math.prod(sharding(mesh, one.shape, one.axes).shard_shape(one.shape))
            * _bits(one, dtype, scale_bits)
        )
        // 8
        for one in params
    )


def _bits(param: Param, dtype: np.dtype[Any], scale_bits: int) -> float:
    """Of each number."""
    if (to := param.rounded_to) is not None:
        num_scales = 2 if to.bits == 4 and not to.to_float else 1
        return to.bits + num_scales * scale_bits / (to.group or param.shape[-1])
    if param.dtype == F32:
        return scale_bits
    return 4 if param.packed else (param.dtype or dtype).itemsize * 8


def free_bytes(devices: list[jax.Device]) -> int | None:
    """What each of these that are this host's can still hold; None: it does not say. CPU devices share the
    host's memory."""
    devices = [device for device in devices if device.process_index == jax.process_index()]
    if devices[0].platform == "cpu":
        return _free_host_bytes() // len(devices)
    stats = [device.memory_stats() for device in devices]
    return min((s["bytes_limit"] - s["bytes_in_use"] for s in stats if s), default=None)


def _free_host_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    available = re.search(r"MemAvailable: +(\d+) kB", meminfo.read_text() if meminfo.exists() else "")
    return int(available[1]) << 10 if available else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    placed, dtype = sharding(mesh, param.shape, param.axes), param.dtype or dtype
    integers = dtype if np.issubdtype(dtype, np.integer) else None
    parts: dict[str, Array] = {}  # devices that hold the same part share one read
    heads: dict[tuple[str, str], Array] = {}  # so do those that hold the same KV head

    def read(piece: Piece, stored: Slices) -> Array:
        key = piece.name, str(stored)
        if key in heads:
            return heads[key]
        values = checkpoint[piece.name].read(stored, integers)
        if piece.repeat > 1:
            heads[key] = values
        return values

    def part(index: tuple[slice, ...] | None) -> Array:
        assert index is not None
        bounds = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, param.shape, strict=True))
        key = str(bounds)
        if key not in parts:
            parts[key] = _assemble(param, bounds, read, dtype)
        return parts[key]

    loaded = jax.make_array_from_callback(param.shape, placed, part, dtype=dtype)
    return pack(loaded) if param.packed else loaded


def _assemble(param: Param, index: Slices, read: Read, dtype: np.dtype[Any]) -> Array:
    """One device's part, filled a stretch at a time: what is being read stays small beside what was."""
    out = _aligned([s.stop - s.start for s in index], dtype)
    first, rest = index[0], index[1:]
    stretch = max(READ_BYTES * len(out) // max(out.nbytes, 1), 1)
    for start in range(first.start, first.stop, stretch):
        rows = slice(start, min(start + stretch, first.stop))
        _fill(out[rows.start - first.start : rows.stop - first.start], param, (rows, *rest), read)
    return out


def assembled(param: Param, read: Read, dtype: np.dtype[Any]) -> Array:
    """All of it, in the host's memory."""
    return _assemble(param, tuple(slice(0, size) for size in param.shape), read, dtype)


def _aligned(shape: list[int], dtype: np.dtype[Any]) -> Array:
    """Memory that a CPU device takes as it is, without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)  # costs nothing: new memory is zeros anyway
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _fill(out: Array, param: Param, index: Slices, read: Read) -> None:
    for piece in param.pieces:
        places = list(zip(index, (*piece.to, *(slice(None),) * (out.ndim - len(piece.to))), strict=True))
        if any(isinstance(at, int) and not cut.start <= at < cut.stop for cut, at in places):
            continue  # it is another device's
        # An axis picked by a number is not the piece's; one picked by a part is never split.
        ranges = [
            cut if at == slice(None) else slice(0, at.stop - at.start)
            for cut, at in places
            if isinstance(at, slice)
        ]
        target = tuple(at - cut.start if isinstance(at, int) else at for cut, at in places)
        out[target] = _cut(piece, ranges, read)


def _cut(piece: Piece, ranges: list[slice], read: Read) -> Array:
    """The part of a piece that `ranges`, one for each of its axes in the parameter's order, cut out."""
    first, repeat = ranges[0], piece.repeat
    stored = [slice(first.start // repeat, -(-first.stop // repeat)), *ranges[1:]]
    order = piece.order or tuple(range(len(piece.view)))
    in_view = [stored[order.index(axis)] for axis in range(len(order))]
    values = read(piece, _stored_slices(piece, in_view))
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
