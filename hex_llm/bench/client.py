"""HTTP as a load needs it: many streams at once, at little cost, with the time when bytes were read.

One read of a socket is one look at the clock, before anything else is done with the bytes.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast
from urllib.parse import urlsplit

import httptools

from hex_llm.errors import HexError, one_line

MAX_FILES = 65_536
Feed = Callable[[bytes, float], None]


class Refused(HexError):
    """The server has answered with another status than 200, or not in HTTP, or not to the end."""


class _Unanswered(Refused):
    """The connection was closed before the first byte of an answer."""


class Connection(asyncio.Protocol):
    """A connection that is kept; it carries one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._refusal = b""
        self._now = 0.0
        self._feed: Feed = lambda data, now: None
        self._end: asyncio.Future[None] | None = None

    async def post(self, request: bytes, feed: Feed) -> None:
        """Returns when the body was fed; raises Refused."""
        self._feed, self._status, self._refusal = feed, 0, b""
        self._end = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._end

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    # ---- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._finish(Refused(f"no HTTP: {one_line(data[:60].decode('utf-8', 'replace'))}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        kind = Refused if self._status else _Unanswered
        self._finish(kind("the server closed the connection before the end of its answer"))

    # ---- httptools'

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status == 200:
            self._feed(body, self._now)
        else:
            self._refusal += body

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        if self._status == 200:
            self._finish(None)
        else:
            said = " ".join(self._refusal.decode("utf-8", "replace").split())
            self._finish(Refused(f"HTTP {self._status}: {one_line(said[:300])}"))

    def _finish(self, error: Refused | None) -> None:
        if self._end is None or self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)


def tls_context(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def allow_connections() -> None:
    """Raises the limit of open files, for an open loop may have thousands, as far as the system lets it."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # there is none on Windows

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        enough = MAX_FILES if most == resource.RLIM_INFINITY else min(most, MAX_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))


class HttpClient:
    """Posts JSON to one server over as many connections as there are requests at once."""

    def __init__(self, base_url: str, headers: Mapping[str, str], *, insecure: bool = False) -> None:
        url = urlsplit(base_url)
        is_tls = url.scheme == "https"
        self._host, self._port = url.hostname or "", url.port or (443 if is_tls else 80)
        self._ssl = tls_context(insecure) if is_tls else None
        self._base_path = url.path.rstrip("/")
        fixed = {"host": url.netloc.rpartition("@")[2], "content-type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes, feed: Feed, request_id: str) -> None:
        """Feeds the answer's body; raises Refused, or OSError where there is no connection."""
        head = (
            f"POST {self._base_path}{path} HTTP/1.1\r\n{self._head}x-request-id: {request_id}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        request = head.encode() + body
        kept = self._kept()
        try:
            await self._post_on(kept or await self._connect(), request, feed)
        except _Unanswered:
            if kept is None:
                raise
            # A server may close a kept connection just when it is used again.
            await self._post_on(await self._connect(), request, feed)

    async def _post_on(self, connection: Connection, request: bytes, feed: Feed) -> None:
        try:
            await connection.post(request, feed)
        finally:
            if connection.is_open:
                self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    def _kept(self) -> Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl)
        return connection
