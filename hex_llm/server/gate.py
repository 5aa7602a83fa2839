"""What every HTTP request passes first and last: key, readiness, limits of size and time, a line in the log.

Knows nothing of what routes do. A reply that has begun is only watched: what breaks it then, its route tells.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import sha256
from typing import Any

from fastapi import HTTPException, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hex_llm.config import ServerConfig
from hex_llm.errors import HexError
from hex_llm.frontend.requests import Timeline
from hex_llm.ipc.stats import EngineState, leading
from hex_llm.server import page
from hex_llm.server.common.backend import Backend
from hex_llm.server.common.body_route import BodyRoute
from hex_llm.server.common.replies import Problem, error_reply
from hex_llm.server.metrics import CURRENT, Metrics
from hex_llm.server.traces import Tracer

log = logging.getLogger(__name__)

BUSY_S = 1  # of being told that there are too many requests: one line in the log
# Of a body, counted by its commas: parsing so many holds up everyone for a tenth of a second.
MAX_VALUES = 500_000
VALUES_PER_KEY = 10  # which takes as long as so many values
INVOKE = "/invoke"  # Vertex AI's prefix of any path; a front that takes it away is as well
MAX_HEAD = 32 << 10  # bytes of a request's path and headers
OPEN_PATHS = ("/ping", "/health")  # for load balancers, which have no key
WITHOUT_ENGINE = ("/metrics", "/load", "/version", "/docs", "/openapi.json")  # answered at any time
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")
ORCA_FORMAT = "endpoint-load-metrics-format"  # of balancers that choose by load
REQUEST_ID = re.compile(r"[\w.:+/=-]{1,128}", re.ASCII)  # those of clients that are echoed


def head_size(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope["path"]) + len(scope["query_string"])


def all_routes(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """Also those of routers that were included."""
    for route in routes:
        included = getattr(route, "original_router", None)
        yield from (route,) if included is None else all_routes(included.routes)


class Gate:
    """The path is the raw one of the request line: no header can make a route look open."""

    def __init__(self, app: ASGIApp, backend: Backend, config: ServerConfig, metrics: Metrics) -> None:
        self.app = app
        self.backend = backend
        self.config = config
        self.metrics = metrics
        address = config.otlp_traces_endpoint
        self.tracer = None if address is None else Tracer(address, backend.model_name)
        key = config.api_key
        self.key_hash = None if key is None else sha256(key.encode()).digest()
        self.num_refused, self.logged_at = 0, 0.0  # since then, for there being too many
        self.paths: dict[str, BodyRoute | None] = {}  # those that are declared, and who answers a POST

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        for prefix in filter(None, (self.config.root_path, INVOKE)):
            if scope["path"].startswith(f"{prefix}/"):
                scope = {**scope, "path": scope["path"].removeprefix(prefix)}
        visit = Visit(scope, send, self.metrics, tells_id=self.config.enable_request_id_headers)
        works = scope["method"] == "POST"
        self.metrics.num_open += works
        try:
            if refusal := self.refusal(scope):
                await refusal(scope, receive, visit.send)
            else:
                await self.within_time(scope, self.limited(receive), visit)
        except Exception:
            visit.status = visit.status or 500  # told by who catches it
            raise
        finally:
            self.metrics.num_open -= works
            self.note(visit)

    def refusal(self, scope: Scope) -> Response | None:
        method, path, headers = scope["method"], scope["path"], Headers(scope=scope)
        error = partial(self.error, scope)
        if head_size(scope) > MAX_HEAD:
            return error(431, f"the path and the headers have more than {MAX_HEAD} bytes")
        if method in ("GET", "HEAD") and path in page.FILES:
            return None
        is_open = self.is_open(method, path)
        if not is_open and not self.has_key(headers):
            return error(401, "Authorization: Bearer, or x-api-key, with the server's key is needed")
        if path not in WITHOUT_ENGINE and (trouble := self.trouble(watched=is_open)):
            return error(503, trouble)
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared) > self.config.max_request_bytes:
            return error(413, self.too_large())
        return self.unless_room(scope)

    def unless_room(self, scope: Scope) -> Response | None:
        """A body that is not read or parsed costs an overloaded server the least."""
        route = self.declared(scope).get(scope["path"]) if scope["method"] == "POST" else None
        if route is None or not route.needs_room:
            return None
        try:
            self.backend.check_room(1)
        except HexError as problem:
            return error_reply(*route.problem_reply(problem))
        return None

    def error(self, scope: Scope, status: int, message: str) -> Response:
        """As the clients of its path know errors."""
        shape = (self.declared(scope).get(scope["path"]) or BodyRoute).error_body
        return error_reply(status, shape(Problem(status, message)))

    def is_open(self, method: str, path: str) -> bool:
        """Of the deployment's own health route only GET: it may share its path with a route that answers."""
        return path in OPEN_PATHS or (method == "GET" and path == self.config.health_route)

    def trouble(self, *, watched: bool) -> str:
        """Why requests cannot be served now; empty if they can. An engine that stalls may go on: only who
        watches it is told."""
        if self.metrics.draining:
            return EngineState.SHUTTING_DOWN.value
        if not self.backend.ready:
            status = leading(self.metrics.engines)
            progress = f" ({status.progress})" if status.progress else ""
            return f"the server is not ready: {status.state.value}{progress}"
        if watched and (stalled_s := self.metrics.stalled_s) > self.config.health_timeout:
            return f"the engine has made no step for {stalled_s:.0f} s, though there is work"
        return ""

    def has_key(self, headers: Headers) -> bool:
        """Hashes are compared, in constant time, so that the time taken tells nothing about the key."""
        if self.key_hash is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        keys = [*([key] if scheme.lower() == "bearer" else ()), *headers.getlist("x-api-key")[:1]]
        hashes = [sha256(key.strip().encode("latin-1")).digest() for key in keys]
        return sum(hmac.compare_digest(key_hash, self.key_hash) for key_hash in hashes) > 0

    async def within_time(self, scope: Scope, receive: Receive, visit: Visit) -> None:
        """Until the reply begins; from then on the engine keeps the time."""
        limit = self.config.request_timeout or None
        try:
            async with asyncio.timeout(limit) as deadline:
                visit.deadline = deadline
                await self.app(scope, receive, visit.send)
        except TimeoutError:
            if not deadline.expired():
                raise
            reply = self.error(scope, 504, f"the request has taken longer than {limit} s (--request_timeout)")
            await reply(scope, receive, visit.send)

    def limited(self, receive: Receive) -> Receive:
        """Receives a body that is neither too large nor too slow."""
        num_bytes, num_values, complete = 0, 0, False
        until = time.monotonic() + self.config.receive_timeout

        async def counted() -> Message:
            nonlocal num_bytes, num_values, complete
            if complete:  # what comes now is the client's leaving
                return await receive()
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body has not come in time") from None
            complete = not message.get("more_body", False)
            body = message.get("body", b"")
            num_bytes += len(body)
            if num_bytes > self.config.max_request_bytes:
                raise HTTPException(413, self.too_large())
            # Those in texts are counted too: a text with so many would be too long as well.
            num_values += body.count(b",") + body.count(b":") * (VALUES_PER_KEY - 1)
            self.check_values(num_values)
            return message

        return counted

    def check_values(self, num_values: int) -> None:
        """A prompt of ids may be as long as the model takes it."""
        if num_values > MAX_VALUES and num_values > (most := max(MAX_VALUES, 2 * self.backend.max_len)):
            raise HTTPException(
                413, f"the body has more than {most} values (a key counts as {VALUES_PER_KEY} of them)"
            )

    def too_large(self) -> str:
        return f"the body has more than {self.config.max_request_bytes} bytes"

    def note(self, visit: Visit) -> None:
        visit.route = self.path_of(visit.scope)
        self.metrics.answered(visit.method, visit.route, visit.status)
        if self.tracer is not None and visit.timelines:
            name, headers = f"{visit.method} {visit.route}", Headers(scope=visit.scope)
            self.tracer.request_ended(name, headers, visit.fields(), visit.started, visit.timelines)
        if self.config.disable_log_requests:
            return
        if visit.status == 429:
            self.note_busy()
        else:
            # Who polls would fill the log, also while the server is not ready.
            is_probe = self.is_open(visit.method, visit.scope["path"])
            polled = is_probe or (visit.method == "GET" and (visit.status < 400 or visit.status == 503))
            log.log(logging.DEBUG if polled else logging.INFO, "request", extra={"fields": visit.fields()})

    def note_busy(self) -> None:
        """A flood may fill neither the log nor the time of those who are served."""
        self.num_refused += 1
        if (now := time.monotonic()) - self.logged_at >= BUSY_S:
            log.info("too many requests", extra={"fields": {"refused": self.num_refused}})
            self.num_refused, self.logged_at = 0, now

    def path_of(self, scope: Scope) -> str:
        """Of a route; paths of clients would be endless."""
        if route := scope.get("route"):
            return str(getattr(route, "path", "none"))
        return scope["path"] if scope["path"] in self.declared(scope) else "none"

    def declared(self, scope: Scope) -> dict[str, BodyRoute | None]:
        if not self.paths:
            for route in all_routes(scope["app"].routes):
                path = getattr(route, "path", "")
                answers = route if isinstance(route, BodyRoute) and route.body_field is not None else None
                self.paths[path] = answers or self.paths.get(path)
        return self.paths


class Visit:
    """One HTTP request and what becomes of it."""

    def __init__(self, scope: Scope, send: Send, metrics: Metrics, *, tells_id: bool) -> None:
        """`tells_id`: also to who has sent none."""
        self.scope = scope
        self.metrics = metrics
        self.method = scope["method"] if scope["method"] in METHODS else "other"
        self.route = "none"
        self.started = time.monotonic()
        self.status = 0  # 0: the client left before there was a reply
        self.deadline: asyncio.Timeout | None = None
        self.timelines: list[Timeline] = []
        CURRENT.set(self.timelines)
        own_id = Headers(scope=scope).get("x-request-id")
        self.tells_id = tells_id or own_id is not None
        self.request_id = own_id if own_id and REQUEST_ID.fullmatch(own_id) else uuid.uuid4().hex
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            if self.tells_id:
                headers["x-request-id"] = self.request_id
            if load := self.metrics.orca(Headers(scope=self.scope).get(ORCA_FORMAT, "")):
                headers["endpoint-load-metrics"] = load
            if self.deadline is not None and not self.deadline.expired():
                self.deadline.reschedule(None)
        await self._send(message)

    def fields(self) -> dict[str, Any]:
        now = time.monotonic()
        fields: dict[str, Any] = {"id": self.request_id, "route": self.route, "status": self.status}
        if timelines := self.timelines:
            fields["prompt_tokens"] = sum(one.num_prompt for one in timelines)
            fields["output_tokens"] = sum(one.num_generated for one in timelines)
            if first := [one.first for one in timelines if one.first]:
                fields["ttft_s"] = min(first) - self.started
        return {**fields, "total_s": now - self.started}
