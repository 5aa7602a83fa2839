"""The sockets between a front end and an engine's process. Lives in one event loop. No jax."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import zmq
import zmq.asyncio

from hex_llm.errors import InvalidRequest
from hex_llm.frontend.beside import decoded
from hex_llm.ipc import protocol
from hex_llm.ipc.protocol import Command, Report


class EngineLink:
    """Commands go out and reports come in, by sockets in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self._inbox = zmq.asyncio.Socket(self.context, zmq.PULL)
        self._outbox = zmq.Socket(self.context, zmq.PUSH)
        protocol.set_limits(self._inbox, protocol.MAX_REPORT)
        protocol.set_limits(self._outbox, protocol.MAX_COMMAND)
        self._inbox.bind(protocol.report_address(folder))
        self._outbox.connect(protocol.command_address(folder))
        self.reader: protocol.Reader[Report] = protocol.Reader(Report)

    def send(self, command: Command) -> None:
        """To an engine that has gone, nothing: whoever waits for it is told otherwise."""
        frame = protocol.encode(command)
        if len(frame) > protocol.MAX_COMMAND:
            raise InvalidRequest(f"the request takes {len(frame)} bytes, more than {protocol.MAX_COMMAND}")
        if not self._outbox.closed:
            self._outbox.send(frame)

    async def receive(self) -> Report:
        """The next report."""
        while True:
            frame = await self._inbox.recv()
            if len(frame) < protocol.LARGE_REPORT:
                report = self.reader.decode(frame)
            else:
                report = await decoded(partial(self.reader.decode_large, frame))
            if report is not None:
                return report

    @property
    def has_more(self) -> bool:
        """Reports have come that were not received yet."""
        return bool(int(self._inbox.get(zmq.EVENTS)) & zmq.POLLIN)

    def close(self) -> None:
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self.context.term()  # which would wait for open sockets
