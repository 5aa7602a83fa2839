"""Groups of devices on other hosts (--disagg_topo with --num_hosts), as host 0 knows them.

Each group is a process on its host (`engine/group_worker.py`), started there for its stand-in here
(`launch/remote.py`): frames to and from the stand-in are frames to and from the group, and when either ends,
so does the other. No jax: other hosts wait for stand-ins from the beginning.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import zmq

from hex_llm.cluster import parts_of
from hex_llm.config import EngineConfig
from hex_llm.errors import HexError, ModelError
from hex_llm.execution.messages import Answer, Came, Joining, Loaded, MoveKeys, Told, Warm
from hex_llm.ipc import protocol
from hex_llm.ipc.children import STAND_IN, environment, kill_family, private_folder
from hex_llm.ipc.pulse import Watch

log = logging.getLogger(__name__)

LISTEN_S = 0.5  # at a time
SILENT_S = 20.0  # after which a group is taken for stuck; while it loads, LOADING_S
LOADING_S = 60.0
END_S = 1.5  # what groups get to end by themselves
KILL_S = 5.0
PAUSE_S = 1.0  # from a start to the next at least

Report = Told | protocol.Beat | protocol.Progress | protocol.Failed


class RemoteGroup:
    """The process of one group, from its first start on: `start` replaces one that has ended."""

    loaded: Loaded | None = None
    warm: Warm | None = None
    _failure: HexError | None = None

    def __init__(self, config: EngineConfig, index: int, keys: MoveKeys) -> None:
        self.index = index
        self._config, self.keys = config, keys
        self.take: Callable[[Answer | Came], None] = lambda told: None  # set by who asks for answers
        self._before: Loaded | None = None  # what a process that has ended told
        self._at_end = ExitStack()
        self._reader: protocol.Reader[Report] = protocol.Reader(Report)
        self.start()

    def start(self) -> None:
        """Returns at once. Where there was one before, this one is waited for however long it takes."""
        self._started_at = time.monotonic()
        before = self._before = self.loaded or self._before
        self.loaded = self.warm = self._failure = None
        self._watch, self._silent_s = Watch(LISTEN_S), 0.0
        self._at_end.close()
        folder = private_folder()
        self._at_end.callback(shutil.rmtree, folder, ignore_errors=True)
        context = self._at_end.enter_context(zmq.Context[zmq.Socket[bytes]]())
        self.inbox = self._at_end.enter_context(context.socket(zmq.PULL))
        self._outbox = self._at_end.enter_context(context.socket(zmq.PUSH))
        for socket in (self.inbox, self._outbox):
            protocol.set_limits(socket, protocol.MAX_REPORT)
            socket.set(zmq.LINGER, 0)  # it is closed when the other side has ended
        self.inbox.bind(protocol.report_address(folder))
        self._outbox.connect(protocol.command_address(folder))
        level = logging.getLogger("hex_llm").getEffectiveLevel()
        self.tell(protocol.encode(protocol.Start(self._config, level, is_again=before is not None)))
        joining = Joining(self.index, self.keys, None if before is None else before.num_blocks - 1)
        self.tell(msgspec.msgpack.encode(joining))
        self._process = subprocess.Popen(
            [*STAND_IN, str(self.index), str(folder)],
            stdin=subprocess.PIPE,  # closed by our death, which it notices
            stdout=subprocess.PIPE,  # closed by its death, which who polls notices
            start_new_session=True,
            env=environment(),
        )

    @property
    def is_running(self) -> bool:
        return self._failure is None and self._process.poll() is None

    @property
    def may_start(self) -> bool:
        """One that has ended: if it did so as soon as it began, not without a pause."""
        return time.monotonic() > self._started_at + PAUSE_S

    @property
    def watched(self) -> list[zmq.Socket[bytes] | int]:
        assert self._process.stdout is not None
        return [self.inbox, self._process.stdout.fileno()]

    def tell(self, frame: bytes) -> None:
        self._outbox.send(frame)

    def listen(self, timeout_s: float) -> None:
        """Takes in what has come; waits for it, if nothing has."""
        passed, has_come = self._watch.look(), bool(self.inbox.poll(int(timeout_s * 1000)))
        self._silent_s = 0.0 if has_come else self._silent_s + passed
        if self._silent_s > (LOADING_S if self.loaded is None else SILENT_S):
            self.fail(ModelError(f"group {self.index} has shown no sign of life for {self._silent_s:.0f} s"))
        while self.inbox.poll(0):
            match self._reader.decode(self.inbox.recv()):
                case Loaded() as loaded:
                    self.loaded = loaded
                case Warm() as warm:
                    self.warm = warm
                case (Answer() | Came()) as told:
                    self.take(told)
                case protocol.Progress(message):
                    log.info("group %d: %s", self.index, message)
                case protocol.Failed(kind, message):
                    self.fail(protocol.error_of(kind, message))

    def await_loaded(self) -> Loaded:
        """Raises why it could not be."""
        while self.loaded is None:
            is_running = self.is_running
            self.listen(LISTEN_S)
            if not is_running and self.loaded is None:
                raise self.error
        return self.loaded

    @property
    def error(self) -> HexError:
        """Why it is not running."""
        return self._failure or ModelError(f"the process of group {self.index} has ended")

    def fail(self, error: HexError) -> None:
        """It is of no use any more."""
        self._failure = error
        if self._process.poll() is None:
            kill_family(self._process.pid)

    def end(self, until: float) -> None:
        """By itself until then (`time.monotonic`), or at once."""
        try:
            self._process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            kill_family(self._process.pid)
            self._process.wait(KILL_S)
        self._at_end.close()


def start_groups(config: EngineConfig) -> list[RemoteGroup]:
    """Those that are not on this host, the first."""
    parts = parts_of(config)
    if parts is None or parts.kind != "group":
        return []
    keys = MoveKeys.make()
    return [RemoteGroup(config, i, keys) for i in range(parts.num // config.num_hosts, parts.num)]


def end_all(groups: list[RemoteGroup]) -> None:
    until = time.monotonic() + END_S
    for group in groups:
        group.tell(protocol.SHUTDOWN)
    for group in groups:
        group.end(until)
