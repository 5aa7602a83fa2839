"""One HTTP connection: uvicorn's own over httptools, as strict about HTTP as a server behind proxies must be,
with limits for clients that are slow, idle, or do not read.

All that knows uvicorn's private parts is in this file; pyproject.toml bounds its version.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hex_llm.server.common.streams import INLINE_WRITER
from hex_llm.server.gate import MAX_HEAD

LINGER_S = 2  # what a client gets to send the rest of a body that nobody reads
PARSED_AT_A_TIME = 4 << 10  # bytes: what bounds the requests that wait behind the one that is answered
# Of the system for each connection: what it holds for a client that does not read is not seen here.
SEND_BUFFER = 128 << 10


def connection(receive_s: float, send_s: float) -> Any:
    """A protocol for uvicorn's `http`: a request's head must come within `receive_s`; a client must take at
    least some of its reply, HIGH_WATER_LIMIT bytes, in every `send_s`."""
    return partial(Connection, receive_s, send_s)


class Connection(HttpToolsProtocol):
    """Requests that a client sends before it has its reply wait: as bytes, but for the few that come in one
    piece with the end of the one that is answered."""

    def __init__(self, receive_s: float, send_s: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.receive_s, self.send_s = receive_s, send_s
        self.open_cycles: deque[RequestResponseCycle] = deque()  # the first is being answered
        self.is_in_body = False
        self.num_pending = 0  # bytes since the last that completed a head, or were of a body
        self.held = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.limits = TimeLimits(self.loop, transport, self.receive_s, self.send_s)
        self.limits.await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.end()
        super().connection_lost(exc)
        for cycle in self.open_cycles:  # uvicorn tells only the last
            cycle.disconnected = True
            cycle.message_event.set()

    # ---- what comes

    def data_received(self, data: bytes) -> None:
        self.held += data
        self.parse()
        if len(self.held) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def parse(self) -> None:
        """As much as may be: what follows a request that is being answered is held."""
        data, start = memoryview(self.held), 0
        while start < len(data) and (self.is_in_body or not self.open_cycles):
            start += self.feed(data[start : start + PARSED_AT_A_TIME])
            if self.transport.is_closing():
                break
        self.held = bytes(data[start:])

    def feed(self, piece: memoryview) -> int:
        """How much of it was parsed."""
        self._unset_keepalive_if_required()
        if not self.is_in_body:
            self.limits.await_head()
        self.num_pending += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            # To what is not spoken here, which is no error; but httptools takes what follows for it.
            self.parser.feed_data(self.head_without_upgrade())
            num_parsed: int = upgrade.args[0]
            return num_parsed
        except httptools.HttpParserError:
            self.refuse()
        else:
            if self.num_pending > MAX_HEAD:
                self.refuse()
        return len(piece)

    def on_headers_complete(self) -> None:
        check_head(self.parser.get_method(), self.parser.get_http_version(), self.headers)
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self.num_pending, self.is_in_body = 0, True
        self.limits.cancel("head")
        self.headers = []  # for trailers, which are none of the request's
        self.open_cycles.append(self.cycle)
        self.scope[INLINE_WRITER] = PieceWriter(self.cycle)  # type: ignore[literal-required]
        if self.scope["http_version"] == "1.0":
            self.cycle.chunked_encoding = False
            self.cycle.send = partial(send_unframed, self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        self.num_pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self.num_pending, self.is_in_body = 0, False
        super().on_message_complete()

    def head_without_upgrade(self) -> bytes:
        first = b"%b %b HTTP/%b\r\n"
        head = first % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"".join((head, *headers, b"\r\n"))

    def refuse(self) -> None:
        """What is no HTTP. Into a reply that has begun, another one cannot be written."""
        if any(cycle.response_started for cycle in self.open_cycles):
            self.transport.close()
        else:
            self.send_400_response("Invalid HTTP request received.")

    # ---- what goes

    def on_response_complete(self) -> None:
        cycle = self.open_cycles.popleft()
        super().on_response_complete()
        if self.is_in_body and self.cycle is cycle:
            self.loop.call_later(LINGER_S, self.close_unless_read, cycle)
        self.parse()

    def close_unless_read(self, cycle: RequestResponseCycle) -> None:
        if self.is_in_body and self.cycle is cycle:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.limits.await_reader()

    def resume_writing(self) -> None:
        self.limits.cancel("reader")
        super().resume_writing()


def check_head(method: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> None:
    """What httptools lets pass. A proxy that reads such a head otherwise may take a second request for the
    body of this one, or this one for another host's."""
    names = [name for name, _ in headers]
    if method == b"CONNECT" or version not in ("1.0", "1.1"):
        raise ValueError("not the HTTP that is spoken here")
    if (num_hosts := names.count(b"host")) > 1 or (version == "1.1" and not num_hosts):
        raise ValueError("not one host")
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or version == "1.0" or b"content-length" in names):
        raise ValueError("the length of the body is not clear")


async def send_unframed(cycle: RequestResponseCycle, message: Any) -> None:
    """To a client of HTTP/1.0, which knows no chunks: its reply, if it has no length, ends with the
    connection."""
    if message["type"] == "http.response.body":
        cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)


class PieceWriter:
    """The InlineWriter of a request: past the middleware, which has nothing to do with pieces of streams."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    async def send(self, piece: bytes) -> None:
        if self._flow.write_paused and not self._cycle.disconnected:
            await self._flow.drain()
        if not self.send_now(lambda: piece):
            await self._cycle.send({"type": "http.response.body", "body": piece, "more_body": True})

    def send_now(self, make: Callable[[], bytes]) -> bool:
        cycle = self._cycle
        if not cycle.chunked_encoding or cycle.disconnected or self._flow.write_paused:
            return False
        if piece := make():  # an empty chunk would end the reply
            self._write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True


class TimeLimits:
    """Ends a connection whose client sends its heads or takes its replies too slowly."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, receive_s: float, send_s: float
    ) -> None:
        self._loop, self._transport = loop, transport
        self._receive_s, self._send_s = receive_s, send_s
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def cancel(self, what: str) -> None:
        if what in self._timers:
            self._timers.pop(what).cancel()

    def end(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def await_head(self) -> None:
        if "head" not in self._timers:
            self._timers["head"] = self._loop.call_later(self._receive_s, self._transport.abort)

    def await_reader(self) -> None:
        if "reader" not in self._timers:
            self._check_later()

    def _check_later(self) -> None:
        num_unsent = self._transport.get_write_buffer_size()
        self._timers["reader"] = self._loop.call_later(self._send_s, self._check_reader, num_unsent)

    def _check_reader(self, num_unsent: int) -> None:
        if self._transport.get_write_buffer_size() > num_unsent - HIGH_WATER_LIMIT:
            self._transport.abort()
        else:
            self._check_later()
