"""The process of a group of devices on a host other than the first (`engine/groups.py`), started there by
`launch/remote.py`: `python -m hex_llm.engine.group_worker FOLDER`. It schedules nothing, but carries out what
host 0 tells it, and gives back what its steps choose. jax is imported only to load.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hex_llm.config import EngineConfig
from hex_llm.engine.worker import WorkerProcess, run_process
from hex_llm.execution.messages import Came, Joining, Told, Warm
from hex_llm.ipc import protocol

if TYPE_CHECKING:
    from hex_llm.execution.moving import Post
    from hex_llm.execution.runner import Runner


class Group(NamedTuple):
    runner: Runner
    post: Post


class GroupWorker(WorkerProcess[Group]):
    max_command = protocol.MAX_REPORT  # adapters are told too

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._telling_lock = threading.Lock()

    def load(self, config: EngineConfig) -> Group:
        from hex_llm.engine.loading import load_group

        joining = msgspec.msgpack.decode(self._inbox.recv(), type=Joining)
        runner, post, loaded = load_group(config, joining, lambda *told: self._tell(Came(*told)))
        self._tell(loaded)
        self._tell(Warm(runner.warm_up(progress=True) if config.warmup else {}))
        return Group(runner, post)

    def work(self, loaded: Group) -> None:
        from hex_llm.execution.elsewhere import CarriedOut

        calls = CarriedOut(loaded.runner, loaded.post, self._tell)
        while True:
            self._pulse.rest()
            if (frame := self._inbox.recv()) == protocol.SHUTDOWN:
                loaded.post.close()
                return
            self._pulse.begin(loaded.runner)
            calls.obey(frame)

    def _tell(self, told: Told) -> None:
        """Any thread may."""
        with self._telling_lock:
            self._outboxes[0].send(msgspec.msgpack.encode(told))


def run(folder: Path) -> int:
    worker = GroupWorker(folder)
    return worker.run(worker.load)


if __name__ == "__main__":
    sys.exit(run_process(Path(sys.argv[1]), run))
