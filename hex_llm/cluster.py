"""Which of several hosts this one is, where neither flags nor a launcher say so. No jax."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Literal, NamedTuple

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
    check_parts(config)
    return config


class Parts(NamedTuple):
    """What hosts have whole ones of, as many on each, in processes of their own."""

    kind: Literal["replica", "group"]
    flag: str
    num: int
    num_devices: int  # of each


def parts_of(config: EngineConfig) -> Parts | None:
    """None: there is one host, or all hosts have a part in every device's work."""
    if config.num_hosts == 1 or config.coordinator_address is None:
        return None
    if (num := config.data_parallel_size) > 1:
        return Parts("replica", f"--data_parallel_size={num}", num, config.devices_per_replica)
    if (topology := config.disagg_topo) is not None:
        flag = f"--disagg_topo={topology}"
        return Parts("group", flag, config.num_groups, config.tensor_parallel_size)
    return None


def check_parts(config: EngineConfig) -> None:
    """Each host must have as many, and whoever speaks with them must know the key."""
    if (parts := parts_of(config)) is None:
        return
    if parts.num % config.num_hosts:
        raise ConfigError(
            f"{parts.flag}: {parts.num} {parts.kind}s cannot be divided by --num_hosts={config.num_hosts}"
        )
    if config.cluster_key is None:
        raise ConfigError(
            f"{parts.kind}s on other hosts need --cluster_key: one secret, the same on all hosts"
        )


def own_address(config: EngineConfig) -> str:
    """Of a host other than the first, where the others reach it: as host 0 sees it."""
    assert config.coordinator_address is not None
    host, _, port = config.coordinator_address.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # which sends nothing
        own: str = probe.getsockname()[0]
        return own


def port_of(config: EngineConfig, part: int) -> int:
    """Of host 0, where the host of a replica or group meets it."""
    assert config.coordinator_address is not None
    return int(config.coordinator_address.rpartition(":")[2]) + part


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
    if (parts := parts_of(config)) is not None:
        return parts.num // config.num_hosts * parts.num_devices
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
