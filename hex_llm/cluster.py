"""Which of several hosts this one is, where neither flags nor a launcher say so. No jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from hex_llm import __version__
from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError

DEFAULT_PORT = 8476
# That may differ between hosts; and what is secret is not told.
OWN_FLAGS = ("host_index", "coordinator_address", "download_dir", "hf_token", "cluster_key")


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
    check_replicas(config)
    return config


def check_replicas(config: EngineConfig) -> None:
    """Those on other hosts must be whole ones, and whoever speaks with them must know the key."""
    num, num_hosts = config.data_parallel_size, config.num_hosts
    if num == 1 or num_hosts == 1 or config.coordinator_address is None:
        return
    if num % num_hosts:
        raise ConfigError(f"--data_parallel_size={num} cannot be divided by --num_hosts={num_hosts}")
    if config.cluster_key is None:
        raise ConfigError("replicas on other hosts need --cluster_key: one secret, the same on all hosts")


def port_of(config: EngineConfig, replica: int) -> int:
    """Of host 0, where the host of a replica meets it."""
    assert config.coordinator_address is not None
    return int(config.coordinator_address.rpartition(":")[2]) + replica


def agreed_facts(config: EngineConfig) -> dict[str, str]:
    """What must be the same on all hosts, as far as flags tell; commits of models are host 0's choice."""
    flags = {f"--{name}": str(value) for name, value in asdict(config).items() if name not in OWN_FLAGS}
    for name in ("--model", "--tokenizer"):
        flags[name] = flags[name].partition("@")[0]
    return {"hex_llm": __version__, **flags}


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str] | None:
    """The first of the facts that are not the same."""
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            return f"{name}={ours.get(name)}"[:200], f"{name}={theirs.get(name)}"[:200]
    return None


def devices_per_host(config: EngineConfig) -> int:
    if config.data_parallel_size > 1:
        return config.replicas_per_host * config.devices_per_replica
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
