"""One replica over several hosts: each runs the same programs on its own devices, and XLA's collectives join
them (jax.distributed). The first, which schedules, is the leader; the others follow it (links.py).

All that knows jax's private parts is in this file; pyproject.toml bounds its version."""

from __future__ import annotations

import json
import logging
import struct
import threading
from collections.abc import Mapping
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.cluster import devices_per_host, difference
from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError
from hex_llm.parallel.links import Follower, Leader
from hex_llm.parallel.shardings import TP

log = logging.getLogger(__name__)

JOIN_S = 45  # for all hosts to come
# Hosts that are gone are noticed sooner (links.py); this is for those that are lost before there are links.
SILENT_S = 20
END_S = 5
FETCH_S = 3600  # for the slowest host to fetch its files

_rounds = count()  # of what hosts tell each other


def join(config: EngineConfig) -> None:
    """Before anything asks for devices. Returns when all hosts have come."""
    address = config.coordinator_address
    log.info("host %d of %d, joining at %s", config.host_index, config.num_hosts, address)
    initialize = partial(
        jax.distributed.initialize,
        address,
        config.num_hosts,
        config.host_index,
        initialization_timeout=10 * JOIN_S,  # jax would end the process then
        heartbeat_timeout_seconds=SILENT_S,
        shutdown_timeout_seconds=END_S,
    )
    failed: list[Exception] = []

    def run() -> None:
        try:
            initialize()
        except Exception as error:
            failed.append(error)

    joining = threading.Thread(target=run, name="join", daemon=True)
    joining.start()
    joining.join(JOIN_S)
    if joining.is_alive() or failed:
        reason = str(failed[0]).split("\n")[0][:200] if failed else f"not all came within {JOIN_S} s"
        raise ConfigError(f"--coordinator_address={address}: {config.num_hosts} hosts: {reason}")


def devices_of(config: EngineConfig) -> list[jax.Device]:
    """As many of each host, in their order."""
    per_host, chosen = devices_per_host(config), list[jax.Device]()
    for host in range(config.num_hosts):
        there = [device for device in jax.devices() if device.process_index == host]
        if len(there) < per_host:
            raise ConfigError(
                f"--tensor_parallel_size={config.tensor_parallel_size}: host {host} has {len(there)} "
                f"device(s), and {per_host} of each host are needed"
            )
        chosen += there[:per_host]
    return chosen


def link(config: EngineConfig, facts: Mapping[str, str]) -> Leader | Follower:
    """With the other hosts, of which all must tell the same `facts`. On the leader it returns when all others
    have connected."""
    check_agreed([json.loads(told) for told in gathered(json.dumps(facts).encode())])
    if config.host_index:
        return Follower(gathered(b"")[0], config.host_index)
    assert config.coordinator_address is not None
    leader = Leader(config.coordinator_address.rpartition(":")[0], config.num_hosts - 1)
    gathered(leader.invitation)
    leader.await_followers(JOIN_S)
    return leader


def check_agreed(told: list[dict[str, str]]) -> None:
    for host, facts in enumerate(told):
        if found := difference(told[0], facts):
            raise ConfigError(f"the hosts disagree: host 0 has {found[0]}, host {host} {found[1]}")


def least(number: int | None) -> int | None:
    """That any host tells; None: one does not know."""
    if jax.process_count() == 1:
        return number
    told = [
        struct.unpack("q", one)[0] for one in gathered(struct.pack("q", -1 if number is None else number))
    ]
    return None if min(told) < 0 else min(told)


def gathered(data: bytes) -> list[bytes]:
    """What each host gives; all must call it. Without devices: the slowest may still be fetching files, for
    which collectives on CPUs do not wait."""
    client, host = distributed.global_state.client, jax.process_index()
    assert client is not None, "not joined"
    name = f"hex_llm/{next(_rounds)}"
    client.key_value_set_bytes(f"{name}/{host}", data)
    return [
        client.blocking_key_value_get_bytes(f"{name}/{one}", FETCH_S * 1000)
        for one in range(jax.process_count())
    ]


def connect(mesh: Mesh) -> None:
    """Lets the devices find each other while all hosts are there: later one may come, still compiling, after
    the others have given up."""
    gathered(b"")
    ones = jax.make_array_from_callback((mesh.size,), NamedSharding(mesh, P(TP)), lambda _: np.ones(1))
    jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(ones).block_until_ready()
