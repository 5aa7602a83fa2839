"""Where the memory of a device goes, and how many KV blocks fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError
from hex_llm.execution.kernel_choice import Devices, choose_kernels, page_shapes
from hex_llm.execution.load import free_bytes
from hex_llm.models.spec import ModelSpec

CPU_SHARE = 0.25  # of the memory that is free: the rest of the machine needs some too
CPU_CAP = 2 << 30


def num_kv_blocks(
    config: EngineConfig, max_seqs: int, spec: ModelSpec, dtype: np.dtype[Any], devices: list[jax.Device]
) -> int:
    """--num_blocks, or what --hbm_utilization_factor of the free memory holds, but not more than so many
    sequences need; and the padding block."""
    if config.num_blocks is not None:
        return config.num_blocks + 1
    choice = Devices.of(config, devices[0].platform, len(devices), dtype)
    per_device = token_bytes(spec, choice)
    needed = max_seqs * -(-spec.max_len // config.block_size)
    fitting = int(_room(config, devices)) // (per_device * config.block_size)
    if fitting < 1:
        raise ConfigError(
            f"--hbm_utilization_factor={config.hbm_utilization_factor}: "
            "no room for KV blocks after the weights"
        )
    return min(fitting, needed) + 1


def token_bytes(spec: ModelSpec, devices: Devices) -> int:
    """What the keys and values of a token take on each device."""
    num_blocks, empty = 8, choose_kernels(spec, devices).empty_pages  # that TPUs fill some arrays up to
    shapes = page_shapes(spec, devices, num_blocks)
    pages = [jax.eval_shape(partial(empty, shape, devices.kv_dtype)) for shape in shapes]
    num_bytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(pages))
    return num_bytes // (devices.num * num_blocks * devices.block_size)


def _room(config: EngineConfig, devices: list[jax.Device]) -> float:
    """Bytes of each device that the KV cache may take."""
    free: float | None = free_bytes(devices)
    if free is None:
        raise ConfigError("the devices do not say how much memory is free: set --num_blocks")
    if devices[0].platform == "cpu":
        num_here = sum(device.process_index == jax.process_index() for device in devices)
        free = min(free * CPU_SHARE, CPU_CAP / num_here) / config.replicas_per_host
    return free * config.hbm_utilization_factor


def account(
    weights: Any, pages: Any, temporaries: int | None, mesh: Mesh, num_blocks: int, block_size: int
) -> str:
    """What each device holds, in one line; `temporaries` None: nothing is compiled yet."""
    devices = list(mesh.devices.flat)
    num_bytes = {
        "weights": bytes_on(mesh.local_devices[0], weights),
        "KV cache": bytes_on(mesh.local_devices[0], pages),
        "temporaries": temporaries,
        "free": free_bytes(devices),
    }
    sizes = ", ".join(f"{name} {shown_size(n)}" for name, n in num_bytes.items() if n is not None)
    num_usable = num_blocks - 1  # without that of padding
    return f"memory: {sizes}; {num_usable:,} blocks of {block_size}: {num_usable * block_size:,} tokens fit"


@contextmanager
def explained(config: EngineConfig, what: str, memory: str) -> Iterator[None]:
    """Running out of device memory becomes an error with the account (`memory`) and the flag to change."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        flag = "hbm_utilization_factor" if config.num_blocks is None else "num_blocks"
        change = f"--{flag}={getattr(config, flag)}"
        raise ConfigError(f"{change}: out of device memory while {what}; lower it ({memory})") from error


def bytes_on(device: jax.Device, arrays: Any) -> int:
    return sum(
        shard.data.nbytes
        for array in jax.tree.leaves(arrays)
        for shard in array.addressable_shards
        if shard.device == device
    )


def shown_size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:,.1f} MiB"
