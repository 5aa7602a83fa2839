"""Several front ends that share one address (--api_server_count): this process, which supervises the engines,
and children of it, each with an event loop of its own.

Parent and children tell each other lines of JSON over the children's standard input and output: how the
engines are, and what was sent to them. A child that ends or is silent is replaced; it ends with its parent.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import sys
from contextlib import suppress

import msgspec

from hex_llm.config import EngineConfig, ServerConfig
from hex_llm.errors import InvalidRequest
from hex_llm.frontend.client import EngineClient
from hex_llm.frontend.process import LOADING_S
from hex_llm.ipc.children import environment, private_folder
from hex_llm.ipc.protocol import Leave, Ready
from hex_llm.ipc.stats import EngineState

log = logging.getLogger(__name__)

FRONT = (sys.executable, "-P", "-m", "hex_llm.launch.child")
TICK_S = 0.05  # between two looks at the engines
ALIVE_S = 0.5  # between two signs of life of a child
PAUSE_S = 1.0  # before a child is replaced
MAX_LINE = 1 << 26
ENDING = (EngineState.SHUTTING_DOWN, EngineState.STOPPED)  # children end by themselves


class Setup(msgspec.Struct, tag=True):
    """The first line for a child."""

    engine_config: EngineConfig
    server_config: ServerConfig
    model_name: str
    front: int
    listener: int  # the file that it inherits
    folder: str  # where front ends tell each other their numbers


class EngineNews(msgspec.Struct, tag=True):
    """How an engine is; `folder` is its process's."""

    replica: int
    state: EngineState
    folder: str
    ready: Ready | None


class SentKeys(msgspec.Struct, tag=True):
    """Blocks that were sent to replicas, for the others' routers; told again and again, also without any."""

    keys: list[tuple[int, list[int]]]


class RestartAll(msgspec.Struct, tag=True):
    pass


ToChild = msgspec.json.Decoder(Setup | EngineNews | SentKeys)
ToParent = msgspec.json.Decoder(SentKeys | RestartAll)


def line_of(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


class Fronts:
    """The children, one for each listener but the first, which is this process's own."""

    def __init__(self, engine: EngineClient, config: ServerConfig, listeners: list[socket.socket]) -> None:
        self.folder = private_folder()
        self._engine, self._config, self._listeners = engine, config, listeners
        self._tasks: list[asyncio.Task[None]] = []
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._heard: set[int] = set()  # of which a sign of life has come
        self._is_ending = False

    async def start(self) -> None:
        """Returns when all of them live."""
        keeping = [self._keep(i, one) for i, one in enumerate(self._listeners) if i]
        self._tasks = [asyncio.create_task(job) for job in (self._share(), *keeping)]
        while len(self._heard) < len(self._listeners) - 1:
            await asyncio.sleep(TICK_S)

    def signal(self, number: int) -> None:
        """They let their requests finish, as this process does."""
        self._is_ending = True
        for child in self._children.values():
            with suppress(ProcessLookupError):
                child.send_signal(number)

    async def end(self, timeout_s: float) -> None:
        """Within the time, if they were told to end before; what is left then is killed."""
        if not self._is_ending:
            self.signal(signal.SIGTERM)
        waiting = [asyncio.ensure_future(one.wait()) for one in self._children.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        for child in self._children.values():
            with suppress(ProcessLookupError):
                child.kill()
        await asyncio.gather(*waiting)
        for task in self._tasks:
            task.cancel()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _keep(self, front: int, listener: socket.socket) -> None:
        while not self._is_ending:
            child = await asyncio.create_subprocess_exec(
                *FRONT,
                stdin=asyncio.subprocess.PIPE,  # closed by our death, which the child notices
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # signals to the terminal are for us alone
                pass_fds=[listener.fileno()],
                limit=MAX_LINE,
                env=environment(),
            )
            self._children[front] = child
            own = self._engine.config, self._config, self._engine.model_name
            self._write(child, Setup(*own, front, listener.fileno(), str(self.folder)))
            talking = [asyncio.create_task(job) for job in (self._tell(child), self._listen(front, child))]
            try:
                await child.wait()
            finally:
                for one in talking:
                    one.cancel()
            for replica in self._engine.replicas:
                if replica.link is not None:
                    replica.send(Leave(front))
            if not self._is_ending:
                log.error("a front end has ended with the code %s; starting it again", child.returncode)
                await asyncio.sleep(PAUSE_S)

    async def _tell(self, child: asyncio.subprocess.Process) -> None:
        """Whatever changes."""
        told: dict[int, tuple[EngineState, str]] = {}
        while True:
            for i, one in enumerate(self._engine.replicas):
                process, ready = one.supervisor.process, one.ready
                now = one.status.state, str(process.folder) if process is not None else ""
                if told.get(i) != now and one.status.state not in ENDING:
                    told[i] = now
                    self._write(child, EngineNews(i, *now, ready))
            await asyncio.sleep(TICK_S)

    async def _listen(self, front: int, child: asyncio.subprocess.Process) -> None:
        """One that is silent for too long is killed; twice half of the time, for we too may have slept."""
        assert child.stdout is not None
        num_silent, limit_s = 0, max(self._engine.stuck_timeout_s, LOADING_S)
        while num_silent < 2 or self._is_ending:
            try:
                line = await asyncio.wait_for(child.stdout.readline(), limit_s / 2)
            except TimeoutError:
                num_silent += 1
                continue
            if not line:
                return
            num_silent, limit_s = 0, self._engine.stuck_timeout_s
            self._heard.add(front)
            with suppress(msgspec.MsgspecError, InvalidRequest):  # printed by somebody, or not possible now
                self._take(front, ToParent.decode(line))
        log.error("a front end has shown no sign of life for %g s, and is killed", limit_s)
        child.kill()

    def _take(self, front: int, message: SentKeys | RestartAll) -> None:
        if isinstance(message, RestartAll):
            self._engine.restart()
        elif message.keys:
            self._engine.router.take_in(message.keys)
            self._relay(message, front)

    async def _share(self) -> None:
        """What this process has sent to replicas."""
        while True:
            if keys := self._engine.router.take_noted():
                self._relay(SentKeys(keys), 0)
            await asyncio.sleep(TICK_S)

    def _relay(self, message: SentKeys, sender: int) -> None:
        for front, child in self._children.items():
            if front != sender:
                self._write(child, message)

    def _write(self, child: asyncio.subprocess.Process, message: msgspec.Struct) -> None:
        if child.returncode is None and child.stdin is not None:
            child.stdin.write(line_of(message))
