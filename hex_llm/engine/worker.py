"""An engine's process: `python -m hex_llm.engine.worker FOLDER`, started by `frontend/client.py`.

Takes commands from a socket in FOLDER, steps while there is work, and reports each step in one message. Ends
with its parent, whose death closes the pipe on standard input, on Shutdown, and when loading or a step fails.
What a request's own data causes is told as its refusal. jax is imported only to load; how far that is, the
progress bars know, and a thread tells. Another beats from the beginning to the end.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import zmq
from tqdm import tqdm

from hex_llm.config import EngineConfig
from hex_llm.engine.groups import start_groups
from hex_llm.errors import EngineStopped, HexError, InvalidRequest
from hex_llm.heap import keep_all
from hex_llm.ipc import protocol
from hex_llm.ipc.protocol import Command, Progress, Report
from hex_llm.ipc.pulse import BEAT_S, Pulse
from hex_llm.ipc.stats import Stats
from hex_llm.logs import log_from
from hex_llm.parallel.links import END, Follower
from hex_llm.types import Update

if TYPE_CHECKING:
    from hex_llm.engine.engine import Engine

log = logging.getLogger(__name__)

PROGRESS_S = 2.0  # between two reports of it
PR_SET_PDEATHSIG = 1  # of Linux
MIN_PATIENCE_S, MAX_PATIENCE_S = 0.001, 0.005  # at a time: a step may end sooner than was thought


T = TypeVar("T")
Load = Callable[[EngineConfig], T]


def load(config: EngineConfig) -> Engine:
    groups = start_groups(config)
    from hex_llm.engine.loading import load_engine

    engine, _ = load_engine(config, progress=True, groups=groups)
    return engine


class WorkerProcess(ABC, Generic[T]):
    """What is the same whatever the process loads, a T, and works with: sockets, beats, news, and its end."""

    max_command = protocol.MAX_COMMAND

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbox = self._context.socket(zmq.PULL)
        protocol.set_limits(self._inbox, self.max_command)
        self._inbox.bind(protocol.command_address(folder))
        self._outboxes = [self._connect(0)]
        self._reader: protocol.Reader[Command] = protocol.Reader(Command)
        self._pulse = Pulse()

    @abstractmethod
    def work(self, loaded: T) -> None:
        """Until it is told to end."""

    def run(self, load: Load[T]) -> int:
        """Until the end; the exit code."""
        level = logging.DEBUG  # of what fails in loading the front end shows the message, and that is enough
        try:
            with self._telling("beat", BEAT_S, lambda: protocol.Beat(*self._pulse.look())):
                loaded = self._load(load)
                keep_all()
                level = logging.ERROR
                self.work(loaded)
        except Exception as error:
            log.log(level, "the engine failed", exc_info=True)
            self._send(protocol.Failed(type(error).__name__, " ".join(str(error).split())[:1000]))
            return 1
        finally:
            self._inbox.close()
            for outbox in self._outboxes:
                outbox.close()
            self._context.term()  # waits, but not for ever, until all is delivered
        return 0

    def _load(self, load: Load[T]) -> T:
        while True:
            self._inbox.poll()
            for command in self._commands():
                if isinstance(command, protocol.Start):
                    log_from(command.log_level, command.log_format)
                    self._outboxes += [self._connect(front) for front in range(1, command.num_fronts)]
                    with self._telling_progress():
                        return load(command.config)

    def _commands(self) -> Iterator[Command]:
        """All that have come."""
        while self._inbox.poll(0):
            command = self._reader.decode(self._inbox.recv())
            if command is not None:
                yield command

    def _send(self, report: Report, front: int = 0) -> None:
        self._outboxes[front].send(protocol.encode(report))

    def _connect(self, front: int) -> zmq.Socket[bytes]:
        outbox = self._context.socket(zmq.PUSH)
        protocol.set_limits(outbox, protocol.MAX_REPORT)
        outbox.connect(protocol.report_address(self._folder, front))
        return outbox

    def _telling_progress(self) -> AbstractContextManager[None]:
        told = ""

        def news() -> Progress | None:
            nonlocal told
            before, told = told, shown_progress() or told
            return Progress(told) if told != before else None

        return self._telling("progress", PROGRESS_S, news)

    @contextmanager
    def _telling(self, name: str, every_s: float, news: Callable[[], Report | None]) -> Iterator[None]:
        """A thread reports them, if there are any."""
        done = threading.Event()

        def tell() -> None:
            with ExitStack() as opened:  # a socket is for one thread only
                outboxes: list[zmq.Socket[bytes]] = []
                while True:
                    for front in range(len(outboxes), len(self._outboxes)):
                        outboxes.append(opened.enter_context(self._connect(front)))
                    if (report := news()) is not None:
                        for outbox in outboxes:
                            outbox.send(protocol.encode(report))
                    if done.wait(every_s):
                        return

        thread = threading.Thread(target=tell, name=name, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


class Worker(WorkerProcess["Engine"]):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._num_open: dict[str, int] = {}  # choices, of requests, where there are several front ends
        self._told = [0.0]  # when each front end was

    def work(self, loaded: Engine) -> None:
        self._told = [0.0] * len(self._outboxes)
        hosts = loaded.hosts
        if hosts is not None:
            hosts.on_loss(end_without_host)
        if isinstance(hosts, Follower):
            self._follow(loaded, hosts)
        else:
            self._serve(loaded)
        loaded.close()

    def _follow(self, engine: Engine, leader: Follower) -> None:
        self._send(protocol.Ready(engine.limits, engine.memory))
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(leader.socket, zmq.POLLIN)
        while True:
            self._pulse.rest()
            poller.poll()
            if any(isinstance(command, protocol.Shutdown) for command in self._commands()):
                return
            self._pulse.begin(engine)
            while leader.socket.poll(0):
                if (frame := leader.socket.recv()) == END:
                    raise EngineStopped("host 0 has ended")
                engine.follow(frame)

    def _serve(self, engine: Engine) -> None:
        self._send(protocol.Ready(engine.limits, engine.memory))
        since, patient_s = time.perf_counter(), 0.0
        while True:
            if not engine.has_work:
                engine.check_idle()
                self._pulse.rest()
                self._await_news(engine)
                since = time.perf_counter()  # being idle is no part of a step
            self._pulse.begin(engine)
            for command in self._commands():
                if isinstance(command, protocol.Shutdown):
                    return
                self._obey(engine, command)
            if engine.has_work and (patience_s := engine.patience_s) > MIN_PATIENCE_S:
                began = time.perf_counter()
                self._inbox.poll(int(1000 * min(patience_s, MAX_PATIENCE_S)))
                patient_s += time.perf_counter() - began
            elif engine.has_work:
                updates, stats = engine.step(), engine.stats
                now = time.perf_counter()
                stats.wait_s += patient_s
                stats.rest_s = now - since - stats.schedule_s - stats.dispatch_s - stats.wait_s
                since, patient_s = now, 0.0
                self._report(updates, engine, stats)

    def _await_news(self, engine: Engine) -> None:
        """A command, or work."""
        while not self._inbox.poll(0) and not engine.has_work:
            poller = zmq.Poller()
            for one in (self._inbox, *engine.watched):
                poller.register(one, zmq.POLLIN)
            poller.poll()
            engine.tend()

    def _report(self, updates: list[Update], engine: Engine, stats: Stats) -> None:
        """To each front end what it has asked for; now and then, and before a rest, the numbers to all."""
        if len(self._outboxes) == 1:
            self._send(protocol.Step(updates, engine.num_steps, stats))
            return
        own: list[list[Update]] = [[] for _ in self._outboxes]
        for update in updates:
            own[self._front_of(update.request_id)].append(update)
            if update.finish_reason is not None:
                self._settle(update.request_id)
        now = time.monotonic()
        for front, some in enumerate(own):
            if some or not engine.has_work or now - self._told[front] > BEAT_S:
                self._told[front] = now
                self._send(protocol.Step(some, engine.num_steps, stats), front)

    def _front_of(self, request_id: str) -> int:
        return protocol.front_of(request_id, len(self._outboxes))

    def _settle(self, request_id: str) -> None:
        """One choice of it has ended."""
        if (num_left := self._num_open.pop(request_id, 0)) > 1:
            self._num_open[request_id] = num_left - 1

    def _obey(self, engine: Engine, command: Command) -> None:
        match command:
            case protocol.Add(request):
                try:
                    engine.add(request)
                    if len(self._outboxes) > 1:
                        self._num_open[request.request_id] = request.params.num_choices
                except Exception as error:  # a request's own data fails that request only
                    self._refuse(request.request_id, error)
            case protocol.Abort(request_id):
                engine.abort(request_id)
            case protocol.Leave(front):
                for request_id in [one for one in self._num_open if self._front_of(one) == front]:
                    engine.abort(request_id)
            case protocol.Stop(request_id, index):
                engine.stop(request_id, index)

    def _refuse(self, request_id: str, error: Exception) -> None:
        kind, message = type(error).__name__, str(error)
        if not isinstance(error, HexError):
            log.error("a request could not be added", exc_info=error)
            kind, message = HexError.__name__, "the request could not be taken; the server's log tells more"
        param = error.param if isinstance(error, InvalidRequest) else None
        self._send(protocol.Refused(request_id, kind, message, param), self._front_of(request_id))


def shown_progress() -> str:
    """What the progress bars of this process show, in words; empty without one."""
    try:
        bars = list(getattr(tqdm, "_instances", ()))
    except RuntimeError:  # a bar came or went meanwhile
        return ""
    return "; ".join(f"{(bar.desc or 'fetching').rstrip(': ')} {bar.n}/{bar.total}" for bar in bars)


def end_without_host() -> None:
    """Another host of the replica is gone: what the devices wait for will never come."""
    log.critical("another host of this replica is gone: the engine ends")
    os._exit(1)


def end_with_parent(folder: Path) -> None:
    """Whatever this process is at, it ends when its parent has gone, even by SIGKILL."""

    def watch() -> None:
        # Unbuffered: an interpreter that ends would wait for the lock of a buffered read.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    continue_without_parent()
    threading.Thread(target=watch, name="parent", daemon=True).start()


def continue_without_parent() -> None:
    """A process that is stopped would not notice that its parent has gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def run_process(folder: Path, run: Callable[[Path], int]) -> int:
    # The front end is told to end by the same signals, and lets running requests finish first.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    end_with_parent(folder)
    return run(folder)


def main(folder: Path, load: Load[Engine] = load) -> int:
    return run_process(folder, lambda folder: Worker(folder).run(load))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
