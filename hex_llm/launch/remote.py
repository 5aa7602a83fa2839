"""Replicas, or groups of devices of one, on other hosts (--num_hosts with --data_parallel_size, or with
--disagg_topo).

Each has a stand-in on host 0, `python -m hex_llm.launch.remote INDEX FOLDER`, which is to the front ends what
an engine's process is, and to an engine what a group's is: it ends when that does, and ending it ends that.
The process itself is started on the other host, by a `Lender`, which dials the stand-in's port. Between the
two, frames pass as they are, over a ZMQ connection that is encrypted, and open to those alone who know
--cluster_key. No jax.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from hex_llm.cluster import agreed_facts, difference, parts_of, port_of
from hex_llm.config import EngineConfig
from hex_llm.engine.worker import end_with_parent
from hex_llm.errors import ConfigError, HexError, ModelError
from hex_llm.frontend.client import WORKER
from hex_llm.ipc import protocol
from hex_llm.ipc.children import environment, kill_family, private_folder
from hex_llm.ipc.pulse import BEAT_S, Watch
from hex_llm.parallel.links import SILENT_S, Keys, encrypt_client, encrypt_server, guarded

log = logging.getLogger(__name__)

JOIN_S = 45.0  # for the other side to come, at the first time
BEAT_MS = int(BEAT_S * 1000)
CONNECT_MS = 2000  # after which a connection is tried again
# What the first of a message's two parts tells; of reports it is the number of their front end.
HELLO, REFUSED, BEAT, COMMAND, ENDED = b"hello", b"refused", b"beat", b"command", b"ended"

MAX_FRAME = protocol.MAX_REPORT  # who gets it in the end may take less
GROUP = (sys.executable, "-P", "-m", "hex_llm.engine.group_worker")

Socket = zmq.Socket[bytes]


def keys_of(secret: str | None) -> tuple[Keys, Keys]:
    """Of stand-ins, and of those who lend."""

    def pair(side: bytes) -> Keys:
        given = (secret or "").encode()
        private = z85.encode(hashlib.scrypt(given, salt=b"hex_llm " + side, n=1 << 14, r=8, p=1, dklen=32))
        return zmq.curve_public(private), private

    return pair(b"stand-in"), pair(b"lender")


def name_of(config: EngineConfig, index: int) -> str:
    parts = parts_of(config)
    return f"{'replica' if parts is None else parts.kind} {index}"


class Sockets:
    """Of one side; closed together."""

    def __init__(self) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self._opened: list[Socket] = []

    def open(self, kind: int, max_frame: int) -> Socket:
        socket = self.context.socket(kind)
        protocol.set_limits(socket, max_frame)
        socket.set(zmq.IPV6, 1)
        self._opened.append(socket)
        return socket

    def close(self) -> None:
        for socket in self._opened:
            socket.close()
        self.context.term()  # waits, but not for ever, until all is delivered


class PeerWatch:
    """For who looks at least every BEAT_S: when to beat, and whether the other side does."""

    def __init__(self) -> None:
        self._watch = Watch(BEAT_S)
        self._since_beat_s = self.silent_s = 0.0

    @property
    def is_silent(self) -> bool:
        return self.silent_s >= SILENT_S

    def must_beat(self) -> bool:
        passed = self._watch.look()
        self.silent_s += passed
        self._since_beat_s += passed
        if self._since_beat_s < BEAT_S:
            return False
        self._since_beat_s = 0.0
        return True


class StandIn:
    """Of one replica or group, by its number among all."""

    def __init__(self, index: int, folder: Path) -> None:
        self._index, self._folder = index, folder
        self._sockets = Sockets()
        self._inbox = self._sockets.open(zmq.PULL, MAX_FRAME)
        self._inbox.bind(protocol.command_address(folder))
        self._outboxes = [self._connect(0)]

    def run(self) -> int:
        """Until the end; the exit code."""
        with ExitStack() as at_end:
            at_end.callback(self._sockets.close)
            try:
                return self._relay(at_end)
            except HexError as error:
                self._report(protocol.Failed(type(error).__name__, str(error)))
                return 1

    def _connect(self, front: int) -> Socket:
        outbox = self._sockets.open(zmq.PUSH, protocol.MAX_REPORT)
        outbox.connect(protocol.report_address(self._folder, front))
        return outbox

    def _report(self, report: protocol.Report) -> None:
        self._outboxes[0].send(protocol.encode(report))

    def _listening(self, config: EngineConfig, at_end: ExitStack) -> Socket:
        own, theirs = keys_of(config.cluster_key)
        at_end.callback(guarded(self._sockets.context, theirs[0]).stop)
        there = self._sockets.open(zmq.ROUTER, MAX_FRAME)
        there.set(zmq.ROUTER_MANDATORY, 1)  # what is sent to a host that is gone fails
        encrypt_server(there, own)
        port = port_of(config, self._index)
        try:
            there.bind(f"tcp://*:{port}")
        except zmq.ZMQError as error:
            raise ConfigError(f"port {port}, for {self._name}: cannot listen there: {error}") from error
        return there

    def _relay(self, at_end: ExitStack) -> int:
        first = self._inbox.recv()
        start = protocol.Reader[Any](protocol.Command).decode(first)
        assert isinstance(start, protocol.Start), "the first command"
        self._name = name_of(start.config, self._index)
        self._outboxes += [self._connect(front) for front in range(1, start.num_fronts)]
        there = self._listening(start.config, at_end)
        peer = self._await_host(there, start)
        there.send_multipart([peer, COMMAND, first])
        watch = PeerWatch()
        poller = zmq.Poller()
        for socket in (there, self._inbox):
            poller.register(socket, zmq.POLLIN)
        try:
            while not watch.is_silent:
                poller.poll(BEAT_MS)
                for kind, frame in self._messages(there, peer):
                    watch.silent_s = 0.0
                    if kind == ENDED:
                        return int(frame)
                    if kind.isdigit():
                        self._outboxes[int(kind) % len(self._outboxes)].send(frame)
                while self._inbox.poll(0):
                    there.send_multipart([peer, COMMAND, self._inbox.recv()])
                if watch.must_beat():
                    there.send_multipart([peer, BEAT, b""])
        except zmq.ZMQError as error:
            raise ModelError(f"the host of {self._name} is gone: {error}") from error
        raise ModelError(f"the host of {self._name} has been silent for {SILENT_S:.0f} s")

    def _await_host(self, there: Socket, start: protocol.Start) -> bytes:
        """Its name on the socket, when it has come and agrees."""
        waited_s, watch = 0.0, Watch(BEAT_S)
        self._report(protocol.Progress(f"waiting for the host of {self._name}"))
        while waited_s < JOIN_S or start.is_again:
            if not there.poll(BEAT_MS):
                waited_s += watch.look()
                self._report(protocol.Beat(False, 0.0))
                continue
            peer, kind, *rest = there.recv_multipart()
            if kind != HELLO or not rest:  # of a connection that has ended
                continue
            if not (found := difference(agreed_facts(start.config), json.loads(rest[0]))):
                return peer
            told = f"the hosts disagree: host 0 has {found[0]}, that of {self._name} {found[1]}"
            there.send_multipart([peer, REFUSED, told.encode()])
            if not start.is_again:
                raise ConfigError(told)
        raise ConfigError(
            f"the host of {self._name} did not come within {JOIN_S:.0f} s, or has another --cluster_key"
        )

    def _messages(self, there: Socket, peer: bytes) -> Iterator[tuple[bytes, bytes]]:
        while there.poll(0):
            name, *parts = there.recv_multipart()
            if name == peer and len(parts) == 2:
                yield parts[0], parts[1]


class Lender:
    """Runs a process for its stand-in on host 0, and another for the stand-in that follows."""

    def __init__(
        self,
        config: EngineConfig,
        index: int,
        variables: Mapping[str, str],
        stopped: threading.Event,
        command: Sequence[str],
    ) -> None:
        self._config, self._index, self._name = config, index, name_of(config, index)
        self._command, self._variables = command, variables
        self._stopped = stopped
        assert config.coordinator_address is not None
        self._host = config.coordinator_address.rpartition(":")[0]
        self._keys = keys_of(config.cluster_key)
        self._waited_s = 0.0
        self._waits_for_ever = self._was_shut_down = False

    def run(self) -> None:
        """Until host 0 has ended. ConfigError: it cannot be reached, or does not agree."""
        hello = [HELLO, json.dumps(agreed_facts(self._config)).encode()]
        while self._is_wanted:
            with self._dialled() as (there, lost, sockets):
                there.send_multipart(hello)
                if self._is_answered(there, lost):
                    self._take(there, lost, sockets)
                    self._waited_s = 0.0
        if not self._stopped.is_set() and not self._was_shut_down:
            raise ConfigError(
                f"--coordinator_address={self._config.coordinator_address}: no answer for "
                f"{self._name} within {JOIN_S:.0f} s, or another --cluster_key there"
            )

    @property
    def _is_wanted(self) -> bool:
        return not self._stopped.is_set() and (self._waits_for_ever or self._waited_s < JOIN_S)

    def _is_answered(self, there: Socket, lost: Socket) -> bool:
        """False: what was said to one who is gone must be said again, if it is not too late."""
        watch = Watch(BEAT_S)
        while self._is_wanted and not there.poll(BEAT_MS):
            self._waited_s += watch.look()
            if lost.poll(0):
                return False
        return self._is_wanted

    @contextmanager
    def _dialled(self) -> Iterator[tuple[Socket, Socket, Sockets]]:
        """A new connection, and what tells of its loss."""
        sockets = Sockets()
        theirs, own = self._keys
        there = sockets.open(zmq.DEALER, MAX_FRAME)
        encrypt_client(there, theirs[0], own)
        there.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        lost = there.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        there.connect(f"tcp://{self._host}:{port_of(self._config, self._index)}")
        try:
            yield there, lost, sockets
        finally:
            there.disable_monitor()
            lost.close()
            sockets.close()

    def _take(self, there: Socket, lost: Socket, sockets: Sockets) -> None:
        kind, first = there.recv_multipart()
        if kind == REFUSED:
            raise ConfigError(first.decode())
        start = protocol.Reader[Any](protocol.Command).decode(first)
        if kind != COMMAND or not isinstance(start, protocol.Start):
            return
        folder = private_folder()
        inboxes = [sockets.open(zmq.PULL, protocol.MAX_REPORT) for _ in range(start.num_fronts)]
        for front, inbox in enumerate(inboxes):
            inbox.bind(protocol.report_address(folder, front))
        outbox = sockets.open(zmq.PUSH, protocol.MAX_COMMAND)
        outbox.connect(protocol.command_address(folder))
        process = subprocess.Popen(
            [*self._command, str(folder)],
            stdin=subprocess.PIPE,  # closed by our death, which the worker notices
            start_new_session=True,
            env=environment(self._variables),
        )
        self._waits_for_ever, self._was_shut_down = True, False
        try:
            outbox.send(first)
            self._relay(there, lost, inboxes, outbox, process)
        finally:
            if process.poll() is None:
                kill_family(process.pid)
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)

    def _relay(
        self,
        there: Socket,
        lost: Socket,
        inboxes: list[Socket],
        outbox: Socket,
        process: subprocess.Popen[bytes],
    ) -> None:
        poller = zmq.Poller()
        for socket in (there, *inboxes):
            poller.register(socket, zmq.POLLIN)
        watch = PeerWatch()
        while not watch.is_silent and not lost.poll(0) and not self._stopped.is_set():
            has_ended = process.poll() is not None  # before what it has said last is looked for
            poller.poll(BEAT_MS)
            for front, inbox in enumerate(inboxes):
                while inbox.poll(0):
                    there.send_multipart([b"%d" % front, inbox.recv()])
            while there.poll(0):
                watch.silent_s = 0.0
                kind, frame = there.recv_multipart()
                if kind == COMMAND:
                    outbox.send(frame)
                    if frame == protocol.SHUTDOWN:
                        self._waits_for_ever, self._was_shut_down = False, True
            if has_ended:
                there.send_multipart([ENDED, b"%d" % (process.returncode != 0)])
                return
            if watch.must_beat():
                there.send_multipart([BEAT, b""])
        if not self._stopped.is_set():
            log.warning("%s: host 0 is gone or silent; its process is ended", self._name)


def lend(config: EngineConfig, variables: Sequence[Mapping[str, str]]) -> None:
    """Processes for host 0, one for each of `variables`: until that ends, or a signal comes."""
    parts = parts_of(config)
    command = WORKER if parts is None or parts.kind == "replica" else GROUP
    stopped = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: stopped.set())
    first = config.host_index * len(variables)
    lenders = [Lender(config, first + i, each, stopped, command) for i, each in enumerate(variables)]
    with ThreadPoolExecutor(len(lenders)) as pool:
        running = [pool.submit(one.run) for one in lenders]
        ended, _ = wait(running, return_when=FIRST_EXCEPTION)
        stopped.set()
    for one in ended:
        one.result()
    log.info("host 0 has ended")


def main(index: int, folder: Path) -> int:
    for each in (signal.SIGINT, signal.SIGTERM):  # as for any engine: the front end is told to end
        signal.signal(each, signal.SIG_IGN)
    end_with_parent(folder)
    return StandIn(index, folder).run()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
