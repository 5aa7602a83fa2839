"""`--worker_distributed_method=ray`: a Ray cluster finds the other hosts, and starts what runs there.

Ray places processes and tells of their end; tensors and tokens never pass through it. On each further node an
actor starts `python -m hex_llm.launch.ray`, which does there what `hex-llm serve` would.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from hex_llm.cluster import check_parts, devices_per_host
from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError
from hex_llm.frontend.devices import platform_of
from hex_llm.ipc.children import environment
from hex_llm.logs import log_from

log = logging.getLogger(__name__)

CONNECT_S = 5.0
PLACE_S = 45.0  # for the cluster to have room
LOOK_S = 1.0  # between two looks at the actors
PASSED_ON = ("JAX_", "XLA_", "HF_", "HEX_LLM_", "GOOGLE_")  # how the variables begin that all hosts need


@contextmanager
def ray_hosts(config: EngineConfig) -> Iterator[EngineConfig]:
    """The config of the first host, while Ray keeps the others running. ConfigError: it cannot."""
    ray = _connected(config)
    try:
        hosts = RayHosts(ray, config)
        try:
            yield hosts.config
        finally:
            hosts.stop()
    finally:
        ray.shutdown()


def _connected(config: EngineConfig) -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--worker_distributed_method=ray: pip install 'hex_llm[ray]' first") from error
    address = config.ray_address or "auto"
    try:
        if ":" in address and "//" not in address:  # ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).split("\n")[0][:200]
        raise ConfigError(f"--ray_address={address}: no Ray cluster answers: {reason}") from error
    return ray


class RayHosts:
    """A placement group with a node for each host, and an actor on each but the first."""

    def __init__(self, ray: Any, config: EngineConfig) -> None:
        self._ray = ray
        here = ray.util.get_node_ip_address()
        self.config = replace(
            config,
            coordinator_address=f"{here}:{free_port(max(config.data_parallel_size, config.num_groups))}",
            host_index=0,
            cluster_key=config.cluster_key or secrets.token_hex(32),
        )
        check_parts(self.config)
        per_host = devices_per_host(self.config)
        kind = {"gpu": "GPU", "tpu": "TPU"}.get(platform_of(os.environ))
        self._each = {"CPU": 1} if kind is None else {"CPU": 1, kind: per_host}
        first = {**self._each, f"node:{here}": 0.001}
        others = [self._each] * (config.num_hosts - 1)
        self._group = ray.util.placement_group([first, *others], strategy="STRICT_SPREAD")
        if not self._group.wait(PLACE_S):
            ray.util.remove_placement_group(self._group)
            raise ConfigError(
                f"--num_hosts={config.num_hosts}: within {PLACE_S:.0f} s the Ray cluster had no such nodes, "
                f"this one among them, with {self._each} free on each"
            )
        self._actors = {index: self._start(index) for index in range(1, config.num_hosts)}
        self._stopped = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="ray", daemon=True)
        self._keeper.start()

    def stop(self) -> None:
        self._stopped.set()
        self._keeper.join()
        for actor, _ in self._actors.values():
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)

    def _start(self, index: int) -> tuple[Any, Any]:
        """The actor on a further node, and what tells of its end."""
        place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index
        )
        wanted = {name: number for name, number in self._each.items() if name not in ("CPU", "GPU")}
        options = {"num_cpus": 1, "num_gpus": self._each.get("GPU", 0), "resources": wanted}
        actor = self._ray.remote(Host).options(scheduling_strategy=place, **options).remote()
        config = {**asdict(self.config), "host_index": index}
        variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        level = logging.getLogger("hex_llm").getEffectiveLevel()
        return actor, actor.run.remote(json.dumps([config, level]), variables)

    def _keep(self) -> None:
        """A host that has ended is started again, if the cluster has room for it."""
        while not self._stopped.wait(LOOK_S):
            for index, (actor, ending) in self._actors.items():
                if self._ray.wait([ending], timeout=0)[0] and not self._stopped.is_set():
                    log.warning("host %d has ended: Ray starts it again", index)
                    self._ray.kill(actor)
                    self._actors[index] = self._start(index)


def free_port(num_ports: int) -> int:
    """With as many free ones from it on."""
    while True:
        with ExitStack() as opened, suppress(OSError, OverflowError):
            port: int = opened.enter_context(socket.create_server(("", 0))).getsockname()[1]
            for i in range(1, num_ports):
                opened.enter_context(socket.create_server(("", port + i)))
            return port


class Host:
    """Runs on a further node, in an actor's process; what it starts ends with it."""

    def run(self, told: str, variables: dict[str, str]) -> int:
        process = subprocess.Popen(
            [sys.executable, "-m", "hex_llm.launch.ray"],
            stdin=subprocess.PIPE,
            env=environment(variables),
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(told + "\n")
        process.stdin.flush()
        return process.wait()


def main() -> None:
    from hex_llm.launch.local import serve_host

    config, level = json.loads(sys.stdin.readline())
    log_from(level, "text")

    def end_with_actor() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_actor, daemon=True).start()
    with suppress(OSError):  # not everyone may: docs/scaling.md
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # Ray's processes give way to all others of their node
    serve_host(EngineConfig(**config))


if __name__ == "__main__":
    main()
