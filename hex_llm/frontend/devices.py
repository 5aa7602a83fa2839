"""Which devices the process of a replica or group sees, told by the variables of its environment. No jax."""

from __future__ import annotations

import re
from collections.abc import Mapping
from glob import glob
from importlib.metadata import entry_points

from hex_llm.cluster import parts_of
from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError

VIRTUAL = "--xla_force_host_platform_device_count"
# How so many chips of a TPU lie beside each other.
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


def variables_of(config: EngineConfig, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """For each process of this host that has a replica or, on hosts other than the first, a group of one. One
    alone takes what it finds; ConfigError: there are not enough for several."""
    flag, num = f"--data_parallel_size={config.data_parallel_size}", config.replicas_per_host
    kind, size = "replica", config.devices_per_replica
    if (parts := parts_of(config)) is not None:
        kind, flag, num, size = parts
        num //= config.num_hosts
    elif config.data_parallel_size == 1:
        return [{}]
    platform = platform_of(environ)
    devices = devices_of(platform, environ)
    if (needed := num * size) > len(devices):
        hint = f"; for virtual ones set XLA_FLAGS={VIRTUAL}={needed}" if platform == "cpu" else ""
        raise ConfigError(
            f"{flag}: {needed} devices are needed, {size} for each {kind}, and there are "
            f"{len(devices)} {platform} device(s){hint}"
        )
    if kind == "group" and config.host_index == 0:
        return [{}]  # one process has all
    if platform == "tpu" and size not in TPU_BOUNDS:
        raise ConfigError(f"{flag}: a {kind} can have 1, 2, 4 or 8 chips of a TPU, not {size}")
    shares = (devices[i : i + size] for i in range(0, needed, size))
    return [_variables(platform, part, environ) for part in shares]


def platform_of(environ: Mapping[str, str]) -> str:
    """As jax will find it."""
    if name := environ.get("JAX_PLATFORMS", "").split(",")[0].lower():
        return "gpu" if name == "cuda" else name
    plugins = {one.name for one in entry_points(group="jax_plugins")}
    if glob("/dev/nvidia[0-9]*") and any("cuda" in name for name in plugins):
        return "gpu"
    return "tpu" if tpu_chips() else "cpu"


def tpu_chips() -> list[str]:
    return glob("/dev/accel[0-9]*") or glob("/dev/vfio/[0-9]*")


def devices_of(platform: str, environ: Mapping[str, str]) -> list[str]:
    """Their names or numbers, of those that this process may use."""
    variable = {"gpu": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}.get(platform)
    if variable is None:
        given = re.search(rf"{VIRTUAL}=(\d+)", environ.get("XLA_FLAGS", ""))
        return [str(i) for i in range(int(given[1]) if given else 1)]
    if (visible := environ.get(variable)) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    found = glob("/dev/nvidia[0-9]*") if platform == "gpu" else tpu_chips()
    return [str(i) for i in range(len(found))]


def _variables(platform: str, devices: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    if platform == "gpu":
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    if platform == "tpu":
        return {
            "TPU_VISIBLE_CHIPS": ",".join(devices),
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": TPU_BOUNDS[len(devices)],
        }
    number = f"{VIRTUAL}={len(devices)}"
    return {"XLA_FLAGS": re.sub(rf"{VIRTUAL}=\d+", number, environ.get("XLA_FLAGS", ""))}
