"""One of the engines that a front end sends requests to. Lives in one event loop. No jax."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hex_llm.frontend.process import Supervisor
from hex_llm.frontend.requests import OpenRequests, Statistics
from hex_llm.ipc.protocol import Ready
from hex_llm.ipc.stats import EngineState, EngineStatus, Stats

if TYPE_CHECKING:
    from hex_llm.frontend.client import EngineClient

TICK_S = 0.05  # between two looks at what is still running


class Replica:
    """What is known of an engine, and the requests that are open there."""

    def __init__(self, client: EngineClient, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self.client = client
        self.status = EngineStatus()
        self.statistics = Statistics()
        self.supervisor = Supervisor(self, command, variables)
        self.requests = OpenRequests(self.supervisor.send, self.status, self.statistics)

    @property
    def serves(self) -> bool:
        return self.status.state is EngineState.SERVING

    @property
    def load(self) -> int:
        """Sequences that run and wait there."""
        return self.requests.places.num_sequences

    async def adopt(self, ready: Ready) -> None:
        self.status.limits, self.status.memory = ready.limits, ready.memory
        await self.client.adopt(ready)

    def fail(self, state: EngineState) -> None:
        """Ends its requests with EngineStopped, but for those that nothing has come of, if they can move."""
        self.status.state, self.status.stats = state, Stats()
        self.client.forget(self)
        self.requests.fail(state.value, self.client.move)

    async def emptied(self) -> None:
        while self.load:
            await asyncio.sleep(TICK_S)
