"""One of the engines that a front end sends requests to. Lives in one event loop. No jax."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hex_llm.frontend.link import EngineLink
from hex_llm.frontend.process import Supervisor
from hex_llm.frontend.requests import OpenRequests, Statistics
from hex_llm.ipc.protocol import Beat, Command, Ready, Refused, Report, Step
from hex_llm.ipc.stats import EngineState, EngineStatus, Stats

if TYPE_CHECKING:
    from hex_llm.frontend.client import EngineClient

log = logging.getLogger(__name__)

TICK_S = 0.05  # between two looks at what is still running
TOLD_S = 1.0  # until all front ends know that it gets no more requests, and it of theirs
RUNNING = (EngineState.SERVING, EngineState.DRAINING)


class Replica:
    """What is known of an engine, and the requests that are open there."""

    def __init__(self, client: EngineClient, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self.client = client
        self.status = EngineStatus()
        self.statistics = Statistics()
        self.supervisor = Supervisor(self, command, variables)
        self.link: EngineLink | None = None
        self.ready: Ready | None = None  # what its last process told
        self.requests = OpenRequests(self.send, self.status, self.statistics)
        self._followed = ""  # the folder of a process that another front end supervises
        self._receiver: asyncio.Task[None] | None = None

    @property
    def serves(self) -> bool:
        return self.status.state is EngineState.SERVING

    @property
    def load(self) -> int:
        """Sequences that run and wait there, as far as this front end knows of the others'."""
        stats, own = self.status.stats, self.requests.places.num_sequences
        return own if self.client.num_fronts == 1 else max(own, stats.num_running + stats.num_waiting)

    def send(self, command: Command) -> None:
        assert self.link is not None
        self.link.send(command)

    async def take(self, report: Report) -> None:
        assert self.link is not None
        match report:
            case Step() | Refused():
                await self.requests.take(report, is_behind=self.link.has_more)
            case Beat(is_busy):
                # Without a limit for steps, who watches the server must judge how long they take.
                if is_busy and self.client.step_timeout_s:
                    self.status.progressed = time.monotonic()

    async def adopt(self, ready: Ready) -> None:
        self.ready = ready
        self.status.limits, self.status.memory = ready.limits, ready.memory
        await self.client.adopt(ready)

    def fail(self, state: EngineState) -> None:
        """Ends its requests with EngineStopped, but for those that nothing has come of, if they can move."""
        self.status.state, self.status.stats = state, Stats()
        self.client.forget(self)
        self.requests.fail(state.value, self.client.move)

    async def follow(self, state: EngineState, folder: str, ready: Ready | None) -> None:
        """What the front end that supervises it tells of it; `folder` is that of its process."""
        if self._followed and (folder != self._followed or state not in RUNNING):
            self.fail(EngineState.FAILED)
            self.unfollow()
        if state in RUNNING and not self._followed:
            assert ready is not None
            self._followed, self.link = folder, EngineLink(Path(folder), self.client.front)
            self._receiver = asyncio.create_task(self._receive(self.link))
            await self.adopt(ready)
        self.status.state = state

    def unfollow(self) -> None:
        if self._receiver is not None and self.link is not None:
            self._receiver.cancel()
            self.link.close()
        self._followed = ""

    async def _receive(self, link: EngineLink) -> None:
        while True:
            report = await link.receive()
            try:
                await self.take(report)
            except Exception:  # nothing may end this loop: all requests would wait for ever
                log.exception("a report of the engine could not be taken in")

    async def emptied(self) -> None:
        if self.client.num_fronts > 1:
            await asyncio.sleep(TOLD_S)
        while self.load:
            await asyncio.sleep(TICK_S)
