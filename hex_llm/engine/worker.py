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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from tqdm import tqdm

from hex_llm.config import EngineConfig
from hex_llm.errors import EngineStopped, HexError, InvalidRequest
from hex_llm.ipc import protocol
from hex_llm.ipc.protocol import Command, Progress, Report
from hex_llm.ipc.pulse import BEAT_S, Pulse
from hex_llm.logs import log_from
from hex_llm.parallel.links import END, Follower

if TYPE_CHECKING:
    from hex_llm.engine.engine import Engine

log = logging.getLogger(__name__)

PROGRESS_S = 2.0  # between two reports of it
PR_SET_PDEATHSIG = 1  # of Linux


Load = Callable[[EngineConfig], "Engine"]


def load(config: EngineConfig) -> Engine:
    from hex_llm.engine.loading import load_engine

    engine, _ = load_engine(config, progress=True)
    return engine


class Worker:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbox = self._context.socket(zmq.PULL)
        protocol.set_limits(self._inbox, protocol.MAX_COMMAND)
        self._inbox.bind(protocol.command_address(folder))
        self._outbox = self._connect()
        self._reader: protocol.Reader[Command] = protocol.Reader(Command)
        self._pulse = Pulse()

    def run(self, load: Load) -> int:
        """Until the end; the exit code."""
        level = logging.DEBUG  # of what fails in loading the front end shows the message, and that is enough
        try:
            with self._telling("beat", BEAT_S, lambda: protocol.Beat(*self._pulse.look())):
                engine = self._load(load)
                level = logging.ERROR
                self._serve_with_hosts(engine)
        except Exception as error:
            log.log(level, "the engine failed", exc_info=True)
            self._send(protocol.Failed(type(error).__name__, " ".join(str(error).split())[:1000]))
            return 1
        finally:
            self._inbox.close()
            self._outbox.close()
            self._context.term()  # waits, but not for ever, until all is delivered
        return 0

    def _load(self, load: Load) -> Engine:
        while True:
            self._inbox.poll()
            for command in self._commands():
                if isinstance(command, protocol.Start):
                    log_from(command.log_level, command.log_format)
                    with self._telling_progress():
                        return load(command.config)

    def _serve_with_hosts(self, engine: Engine) -> None:
        hosts = engine.hosts
        if hosts is None:
            self._serve(engine)
            return
        hosts.on_loss(end_without_host)
        if isinstance(hosts, Follower):
            self._follow(engine, hosts)
        else:
            self._serve(engine)
        hosts.close()

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
        since = time.perf_counter()
        while True:
            if not engine.has_work:
                engine.check_idle()
                self._pulse.rest()
                self._inbox.poll()
                since = time.perf_counter()  # being idle is no part of a step
            self._pulse.begin(engine)
            for command in self._commands():
                if isinstance(command, protocol.Shutdown):
                    return
                self._obey(engine, command)
            if engine.has_work:
                updates, stats = engine.step(), engine.stats
                now = time.perf_counter()
                stats.rest_s = now - since - stats.schedule_s - stats.dispatch_s - stats.wait_s
                since = now
                self._send(protocol.Step(updates, engine.num_steps, stats))

    def _commands(self) -> Iterator[Command]:
        """All that have come."""
        while self._inbox.poll(0):
            command = self._reader.decode(self._inbox.recv())
            if command is not None:
                yield command

    def _obey(self, engine: Engine, command: Command) -> None:
        match command:
            case protocol.Add(request):
                try:
                    engine.add(request)
                except Exception as error:  # a request's own data fails that request only
                    self._refuse(request.request_id, error)
            case protocol.Abort(request_id):
                engine.abort(request_id)
            case protocol.Stop(request_id, index):
                engine.stop(request_id, index)

    def _refuse(self, request_id: str, error: Exception) -> None:
        kind, message = type(error).__name__, str(error)
        if not isinstance(error, HexError):
            log.error("a request could not be added", exc_info=error)
            kind, message = HexError.__name__, "the request could not be taken; the server's log tells more"
        param = error.param if isinstance(error, InvalidRequest) else None
        self._send(protocol.Refused(request_id, kind, message, param))

    def _send(self, report: Report) -> None:
        self._outbox.send(protocol.encode(report))

    def _connect(self) -> zmq.Socket[bytes]:
        outbox = self._context.socket(zmq.PUSH)
        protocol.set_limits(outbox, protocol.MAX_REPORT)
        outbox.connect(protocol.report_address(self._folder))
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
            with self._connect() as outbox:  # a socket is for one thread only
                while True:
                    if (report := news()) is not None:
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

    if sys.platform == "linux":  # a process that is stopped would notice nothing
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=watch, name="parent", daemon=True).start()


def main(folder: Path, load: Load = load) -> int:
    # The front end is told to end by the same signals, and lets running requests finish first.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    end_with_parent(folder)
    return Worker(folder).run(load)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
