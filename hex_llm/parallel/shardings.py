"""Logical axes to mesh axes: the one table, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy.typing as npt
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.errors import ConfigError

TP = "tp"
RULES: dict[str, str | None] = {"vocab": TP, "kv_heads": TP, "ffn": TP, "experts": None}
PAGES = P(None, None, TP)  # the KV heads of all arrays of kernels/attention.py: KVPages


def make_mesh(tensor_parallel_size: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """One replica's devices in a row; refuses more than there are."""
    chosen = _first(tensor_parallel_size, devices)
    return jax.make_mesh((tensor_parallel_size,), (TP,), (AxisType.Auto,), devices=chosen)


def group_meshes(
    tensor_parallel_size: int, num_groups: int, devices: Sequence[jax.Device] | None = None
) -> list[Mesh]:
    """In the order in which devices are listed, which is that of a slice's rows: parts of the ring that
    make_mesh lays through all of them would not be rectangles, and JAX refuses those."""
    size = tensor_parallel_size
    chosen = _first(num_groups * size, devices)
    return [make_mesh(size, chosen[i : i + size]) for i in range(0, len(chosen), size)]


def _first(num: int, devices: Sequence[jax.Device] | None) -> Sequence[jax.Device]:
    devices = jax.devices() if devices is None else devices
    if num > len(devices):
        hint = (
            f"; for virtual CPU devices set XLA_FLAGS=--xla_force_host_platform_device_count={num}"
            if devices[0].platform == "cpu"
            else ""
        )
        raise ConfigError(
            f"--tensor_parallel_size={num}: only {len(devices)} "
            f"{devices[0].platform} device(s) are available{hint}"
        )
    return devices[:num]


def abstract_mesh(num_devices: int, tpu: str | None = None) -> AbstractMesh:
    """One replica's devices that need not be there; `tpu`: chips of this kind, for who lowers for them."""
    device = None if tpu is None else AbstractDevice(tpu, num_cores=1, platform="tpu")
    return AbstractMesh((num_devices,), (TP,), (AxisType.Auto,), abstract_device=device)


def placed(array: npt.NDArray[Any], sharding: NamedSharding) -> jax.Array:
    """On these devices; those of other hosts, where the same is called, get theirs there."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def sharding(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> NamedSharding:
    """A vocabulary that does not divide is held whole on every device; all else was checked to divide."""
    names = [
        RULES[axis] if axis is not None and size % mesh.shape[TP] == 0 else None
        for axis, size in zip(axes, shape, strict=True)
    ]
    return NamedSharding(mesh, P(*names))
