"""HTTP as a load needs it: many streams at once, at little cost, with the time of each chunk of a body."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from hex_llm.errors import ConfigError, HexError, one_line

READ_BYTES = 65_536
TIMEOUT_S = 30  # of a question beside the load
Feed = Callable[[bytes, float], None]


class Refused(HexError):
    """The server has answered with another status than 200, or not in HTTP, or not to the end."""


class _Unanswered(Refused):
    """The connection was closed before the first byte of an answer."""


class Connection:
    """A connection that is kept; it carries one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)

    async def post(self, request: bytes, feed: Feed) -> None:
        """Returns when the body was fed; raises Refused."""
        self._feed, self._refusal, self._status = feed, b"", 0
        self._is_complete = self.is_reusable = False
        self.writer.write(request)
        while not self._is_complete:
            data = await self._read()
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError:
                raise Refused(f"no HTTP: {one_line(data[:60].decode('utf-8', 'replace'))}") from None
        if self._status != 200:
            message = " ".join(self._refusal.decode("utf-8", "replace").split())[:300]
            raise Refused(f"HTTP {self._status}: {one_line(message)}")

    async def _read(self) -> bytes:
        with suppress(ConnectionError):
            if data := await self._reader.read(READ_BYTES):
                return data
        kind = Refused if self._status else _Unanswered
        raise kind("the server closed the connection before the end of its answer")

    # ---- httptools'

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status == 200:
            self._feed(body, time.perf_counter())
        else:
            self._refusal += body

    def on_message_complete(self) -> None:
        self._is_complete, self.is_reusable = True, self._parser.should_keep_alive()


class Server:
    """A server: questions to it, one at a time, and a load over as many connections as it needs at once."""

    def __init__(self, base_url: str, headers: Mapping[str, str], *, insecure: bool = False) -> None:
        try:
            url = urlsplit(base_url)
            is_tls, port, host = url.scheme == "https", url.port, url.hostname
        except ValueError:  # a port that is none
            host = None
        if not host or url.scheme not in ("http", "https"):
            raise ConfigError(f"{one_line(base_url)}: no URL of a server; it begins with http:// or https://")
        self.base_url, self._base_path = base_url.rstrip("/"), url.path.rstrip("/")
        self._host, self._port = host, port or (443 if is_tls else 80)
        self._tls = ssl.create_default_context() if is_tls else None
        if self._tls and insecure:
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        fixed = {"host": url.netloc.rpartition("@")[2], "content-type": "application/json"}
        self.headers = {**fixed, **headers}
        self._idle: list[Connection] = []

    def connect(self) -> HTTPConnection:
        """For one question; raises HexError where nobody listens."""
        connection = HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        if self._tls:
            connection = HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=self._tls)
        try:
            connection.connect()
        except OSError as error:
            raise HexError(f"{self.base_url} is unreachable: {error}; is the server running?") from error
        return connection

    def ask(self, path: str, body: Any = None) -> bytes:
        """The answer to a GET or, with a body, to a POST; raises HexError with one line."""
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection = self.connect()
        try:
            connection.request(method, self._base_path + path, data, self.headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, HTTPException) as error:
            problem = f"no HTTP answer: {type(error).__name__}: {one_line(str(error))}"
            raise HexError(f"{self.base_url}{path}: {problem}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise HexError(f"{self.base_url}{path}: HTTP {response.status} {one_line(response.reason)}")
        return answer

    def first_model(self) -> str:
        try:
            return str(json.loads(self.ask("/v1/models"))["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise HexError(f"{self.base_url}/v1/models names no model; name one with --model") from error

    def counters(self) -> dict[str, float]:
        """The numbers of /metrics, added up over their labels; none where there is no such page."""
        totals: dict[str, float] = {}
        with suppress(HexError, ValueError):
            page = self.ask("/metrics").decode("utf-8", "replace")
            for sample in (one for family in text_string_to_metric_families(page) for one in family.samples):
                totals[sample.name] = totals.get(sample.name, 0) + sample.value
        return totals

    # ---- a load

    async def post(self, path: str, payload: Any, feed: Feed, request_id: str) -> None:
        """Feeds the answer's body; raises Refused, or OSError where there is no connection."""
        headers, body = {**self.headers, "x-request-id": request_id}, msgspec.json.encode(payload)
        head = [
            f"POST {self._base_path}{path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers.items()),
            f"content-length: {len(body)}\r\n\r\n",
        ]
        request = "\r\n".join(head).encode() + body
        while self._idle:
            # The server may have closed a kept connection, if only just now.
            with suppress(_Unanswered):
                await self._post_on(self._idle.pop(), request, feed)
                return
        streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        await self._post_on(Connection(*streams), request, feed)

    async def _post_on(self, connection: Connection, request: bytes, feed: Feed) -> None:
        try:
            await connection.post(request, feed)
        finally:
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.writer.close()

    def close(self) -> None:
        """To be called before the event loop is."""
        while self._idle:
            self._idle.pop().writer.close()


def allow_files(wanted: int) -> int:
    """Raises the limit of open files, here and for children, as far as allowed; what it is then."""
    try:
        import resource
    except ImportError:  # on Windows there is none
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    able = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < able:
        resource.setrlimit(resource.RLIMIT_NOFILE, (able, hard))
    return able
