"""The HTTP application: routes, the gate before them, and every error in OpenAI's shape.

A factory, no global state; jax is out of reach from here. Not built yet: streaming, tools, TGI's routes,
metrics.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hex_llm.config import ServerConfig
from hex_llm.errors import EngineStopped, HexError, InvalidRequest, QueueFull
from hex_llm.server import openai, vertex
from hex_llm.server.backend import Backend
from hex_llm.server.schemas import invalid

MAX_BODY = 10 << 20
RETRY_AFTER_S = "5"
KINDS = {401: "authentication_error", 429: "rate_limit_error"}
HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": RETRY_AFTER_S},
    503: {"Retry-After": RETRY_AFTER_S},
}
OPEN_PATHS = ("/ping", "/health")  # for load balancers, which have no key


def create_app(backend: Backend, config: ServerConfig) -> FastAPI:
    # The pages of docs_url and redoc_url would fetch scripts from elsewhere.
    app = FastAPI(title="hex_llm", docs_url=None, redoc_url=None)
    app.include_router(openai.routes(backend))
    app.include_router(vertex.routes(backend, raw=config.predict_output_format == "raw"))
    for path in OPEN_PATHS:
        app.add_api_route(path, healthy)
    app.add_middleware(Gate, backend=backend, api_key=config.api_key)
    add_error_handlers(app)
    return app


async def healthy() -> Response:
    """Behind the gate, so the backend is ready."""
    return Response()


class Gate:
    """What every request passes first: the key, the backend's readiness, the size of the body.

    The path is the raw one of the request line: no header can make a route look open.
    """

    def __init__(self, app: ASGIApp, backend: Backend, api_key: str | None) -> None:
        self.app = app
        self.backend = backend
        self.key_hash = None if api_key is None else sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, limited(receive), send)
        else:
            await refusal(scope, receive, send)

    def refusal(self, scope: Scope) -> Response | None:
        if scope["path"] not in OPEN_PATHS and not self.has_key(Headers(scope=scope)):
            return error(401, "Authorization: Bearer with the server's key is needed")
        return None if self.backend.ready else not_ready()

    def has_key(self, headers: Headers) -> bool:
        """Hashes are compared, in constant time, so that the time taken tells nothing about the key."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given_hash = sha256(given.strip().encode("latin-1")).digest()
        known = self.key_hash
        return known is None or (scheme.lower() == "bearer" and hmac.compare_digest(given_hash, known))


def limited(receive: Receive) -> Receive:
    num_bytes = 0

    async def counted() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY:
            raise HTTPException(413, f"the body has more than {MAX_BODY} bytes")
        return message

    return counted


def error(status: int, message: str, param: str | None = None) -> JSONResponse:
    kind = "server_error" if status >= 500 else KINDS.get(status, "invalid_request_error")
    body = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": body}, status, HEADERS.get(status))


def not_ready() -> JSONResponse:
    return error(503, "the server is not ready: the model is being loaded, or the engine has stopped")


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, problem: RequestValidationError) -> Response:
        # The first step of a path is always "body".
        return of_request(invalid([{**one, "loc": one["loc"][1:]} for one in problem.errors()[:1]]))

    @app.exception_handler(InvalidRequest)
    async def refused(_: Request, problem: InvalidRequest) -> Response:
        return of_request(problem)

    @app.exception_handler(HexError)
    async def failed(_: Request, problem: HexError) -> Response:
        status = {QueueFull: 429, EngineStopped: 503}.get(type(problem), 500)
        return error(status, str(problem))

    @app.exception_handler(StarletteHTTPException)
    async def http(_: Request, problem: StarletteHTTPException) -> Response:
        return error(problem.status_code, str(problem.detail))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, problem: Exception) -> Response:
        return error(500, "internal error; the server's log tells more")


def of_request(problem: InvalidRequest) -> JSONResponse:
    return error(400, str(problem), problem.param)
