"""How many KV blocks fit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError
from hex_llm.models.spec import ModelSpec
from hex_llm.weights.load import free_bytes

CPU_SHARE = 0.25  # of the memory that is free: the rest of the machine needs some too
CPU_CAP = 2 << 30


def num_kv_blocks(
    config: EngineConfig, spec: ModelSpec, dtype: np.dtype[Any], devices: list[jax.Device]
) -> int:
    """--num_blocks, or what --hbm_utilization_factor of the free memory holds; and the padding block."""
    if config.num_blocks is not None:
        return config.num_blocks + 1
    per_device = spec.num_kv_heads // len(devices) * spec.head_dim * 2 * dtype.itemsize * len(spec.layers)
    needed = config.max_decode_seqs * -(-spec.max_len // config.block_size)
    fitting = int(_room(config, devices)) // (per_device * config.block_size)
    if fitting < 1:
        raise ConfigError(
            f"--hbm_utilization_factor={config.hbm_utilization_factor}: "
            "no room for KV blocks after the weights"
        )
    return min(fitting, needed) + 1


def _room(config: EngineConfig, devices: list[jax.Device]) -> float:
    """Bytes of each device that the KV cache may take."""
    free: float | None = free_bytes(devices)
    if free is None:
        raise ConfigError("the devices do not say how much memory is free: set --num_blocks")
    if devices[0].platform == "cpu":
        free = min(free * CPU_SHARE, CPU_CAP / len(devices))
    return free * config.hbm_utilization_factor
