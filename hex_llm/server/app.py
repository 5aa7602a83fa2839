"""The HTTP application: all routes, the gate before them, and every error in its dialect's shape.

A factory, no global state; jax is out of reach from here.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from hex_llm.config import ServerConfig
from hex_llm.errors import HexError
from hex_llm.server import metrics as measured
from hex_llm.server import page, tokens
from hex_llm.server.anthropic import routes as anthropic
from hex_llm.server.common.backend import Backend
from hex_llm.server.common.replies import Problem, error_reply, problem_of
from hex_llm.server.docs import add_docs
from hex_llm.server.gate import OPEN_PATHS, Gate, all_routes
from hex_llm.server.metrics import Metrics
from hex_llm.server.openai import chat, completions, models, pooling, responses
from hex_llm.server.tgi import routes as tgi
from hex_llm.server.vertex import routes as vertex


def create_app(backend: Backend, config: ServerConfig, metrics: Metrics | None = None) -> FastAPI:
    """`metrics` watches the backend's engine; without it what the engine does is not known."""
    metrics = metrics or Metrics(backend.model_name)
    # The pages of docs_url and redoc_url would fetch scripts from elsewhere.
    app = FastAPI(title="hex_llm", docs_url=None, redoc_url=None)
    for api in (completions, models, chat, responses, pooling, anthropic, tgi, tokens, vertex):
        app.include_router(api.routes(backend, config))
    app.include_router(page.routes())
    app.include_router(measured.routes(backend, metrics))
    for path in OPEN_PATHS:
        for method in ("GET", "POST"):
            app.add_api_route(path, healthy, methods=[method], response_class=Response)
    if config.health_route is not None:
        app.add_api_route(config.health_route, healthy, response_class=Response)
    if config.allow_restart:

        @app.post("/admin/restart", status_code=202, response_class=Response)
        async def restart() -> None:
            """Begins to restart the replicas one after another; GET /stats tells how far that is."""
            backend.restart()

    app.add_middleware(Gate, backend=backend, config=config, metrics=metrics)
    add_error_handlers(app)
    add_docs(app)
    return app


async def healthy() -> Response:
    """Behind the gate, so the backend is ready."""
    return Response()


def methods_at(app: FastAPI, request: Request) -> set[str]:
    """Of all routes at its path; Starlette's refusal names those of the first one only."""
    routes = [one for one in all_routes(app.routes) if one.matches(request.scope)[0] is not Match.NONE]
    return {method for route in routes for method in getattr(route, "methods", ())}


def error_of(request: Request, problem: Problem) -> Response:
    shape = getattr(request.scope.get("route"), "error_body", Problem.body)
    return error_reply(problem.status, shape(problem))


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(HexError)
    @app.exception_handler(Exception)
    async def failed(request: Request, problem: Exception) -> Response:
        return error_of(request, problem_of(problem))

    @app.exception_handler(HTTPException)
    async def http(request: Request, problem: HTTPException) -> Response:
        reply = error_of(request, Problem(problem.status_code, str(problem.detail)))
        reply.headers.update(problem.headers or {})
        if "allow" in reply.headers:
            reply.headers["allow"] = ", ".join(sorted(methods_at(app, request)))
        return reply
