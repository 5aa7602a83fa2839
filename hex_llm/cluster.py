"""Which of several hosts this one is, where neither flags nor a launcher say so. No jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError

DEFAULT_PORT = 8476


def located(config: EngineConfig, environ: Mapping[str, str]) -> EngineConfig:
    """With the coordinator and the index that the environment of a TPU slice or of a LeaderWorkerSet tells,
    and the coordinator's port."""
    if config.num_hosts == 1:
        return config
    if config.coordinator_address is None:
        names = environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
        if len(names) > 1:
            config = _of(config, names[0], environ.get("TPU_WORKER_ID", ""), len(names))
        elif (leader := environ.get("LWS_LEADER_ADDRESS")) and (
            size := environ.get("LWS_GROUP_SIZE", "")
        ) != "1":
            config = _of(
                config, leader, environ.get("LWS_WORKER_INDEX", ""), int(size) if size.isdecimal() else 0
            )
    address = config.coordinator_address
    if address is not None and not address.rpartition(":")[2].isdecimal():
        config = replace(config, coordinator_address=f"{address}:{DEFAULT_PORT}")
    if config.host_index >= config.num_hosts:
        raise ConfigError(
            f"--host_index={config.host_index}: there are {config.num_hosts} hosts (--num_hosts)"
        )
    return config


def devices_per_host(config: EngineConfig) -> int:
    """Of one replica."""
    per_host, rest = divmod(config.tensor_parallel_size, config.num_hosts)
    if rest:
        raise ConfigError(
            f"--tensor_parallel_size={config.tensor_parallel_size} cannot be divided by "
            f"--num_hosts={config.num_hosts}"
        )
    return per_host


def _of(config: EngineConfig, coordinator: str, index: str, num_hosts: int) -> EngineConfig:
    if not index.isdecimal() or num_hosts != config.num_hosts:
        raise ConfigError(
            f"--num_hosts={config.num_hosts}, but the environment says: host {index or '?'} of {num_hosts}"
        )
    return replace(config, coordinator_address=coordinator, host_index=int(index))
