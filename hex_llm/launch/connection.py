"""One HTTP connection: uvicorn's own, with limits for clients that are slow, idle, or do not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from hex_llm.server.common.stream import INLINE_WRITER, InlineWriter

LINGER_S = 2  # what a client gets to send the rest of a body that nobody reads
# Of the system for each connection: what it holds for a client that does not read is not seen here.
SEND_BUFFER = 128 << 10


def connection(receive_s: float, send_s: float) -> type[asyncio.Protocol]:
    """A protocol for uvicorn's `http`: a request's head must come within `receive_s`; a client must take at
    least some of its reply, HIGH_WATER_LIMIT bytes, in every `send_s`."""

    class Connection(H11Protocol):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.timers: dict[str, asyncio.TimerHandle] = {}
            self.whole_app, self.app = self.app, self.run_app

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self.cancel("head")
            self.cancel("send")
            super().connection_lost(exc)

        def cancel(self, what: str) -> None:
            if what in self.timers:
                self.timers.pop(what).cancel()

        # ---- what comes

        def data_received(self, data: bytes) -> None:
            if self.conn.their_state is h11.IDLE and "head" not in self.timers:
                self.await_head()
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self.cancel("head")

        def await_head(self) -> None:
            self.timers["head"] = self.loop.call_later(receive_s, self.transport.abort)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:
                self.loop.call_later(LINGER_S, self.close_unless_read, self.cycle)

        def close_unless_read(self, cycle: Any) -> None:
            if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
                self.transport.close()

        # ---- what goes

        async def run_app(self, scope: Any, receive: Any, send: Any) -> None:
            """Gives the app an InlineWriter for the pieces of streams, past the middleware, which has nothing
            to do with them, and past h11, which takes its time with each."""
            cycle, chunked = self.cycle, False  # the next cycle begins when this one has ended

            async def send_and_see(message: Any) -> None:
                nonlocal chunked
                await send(message)
                if message["type"] == "http.response.start":
                    chunked = chunked_after(message, scope)

            async def send_piece(piece: bytes) -> None:
                if self.flow.write_paused and not cycle.disconnected:
                    await self.flow.drain()
                if not send_now(lambda: piece):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})

            def send_now(make: Callable[[], bytes]) -> bool:
                if not chunked or cycle.disconnected or self.flow.write_paused:
                    return False
                if piece := make():  # an empty chunk would end the reply
                    self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                return True

            scope[INLINE_WRITER] = InlineWriter(send_piece, send_now)
            await self.whole_app(scope, receive, send_and_see)

        def pause_writing(self) -> None:
            super().pause_writing()
            if "send" not in self.timers:
                self.await_reader()

        def resume_writing(self) -> None:
            self.cancel("send")
            super().resume_writing()

        def await_reader(self) -> None:
            left = self.transport.get_write_buffer_size()
            self.timers["send"] = self.loop.call_later(send_s, self.check_reader, left)

        def check_reader(self, before: int) -> None:
            if self.transport.get_write_buffer_size() > before - HIGH_WATER_LIMIT:
                self.transport.abort()
            else:
                self.await_reader()

    return Connection


def chunked_after(message: Any, scope: Any) -> bool:
    """Whether h11 will put what follows this head into HTTP's chunks; rarer cases are left to it."""
    plain = scope["method"] == "POST" and scope["http_version"] == "1.1" and message["status"] == 200
    sized = {b"content-length", b"transfer-encoding"}
    return plain and not any(name.lower() in sized for name, _ in message["headers"])
