"""GET /docs and /openapi.json: what the routes take and give, their errors among it. Nothing is fetched from
elsewhere, and the page needs no script.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from pydantic import Field
from pydantic.json_schema import models_json_schema

from hex_llm import __version__
from hex_llm.server.anthropic.routes import AnthropicRoute
from hex_llm.server.common.body import MAX_PROMPTS, Body
from hex_llm.server.gate import OPEN_PATHS, all_routes
from hex_llm.server.openai.responses_schemas import ResponsesRequest
from hex_llm.server.openai.schemas import ChatRequest, CompletionRequest
from hex_llm.server.tgi.routes import TgiRoute
from hex_llm.server.tgi.schemas import GenerateRequest as TgiRequest
from hex_llm.server.tgi.schemas import TokenizeRequest
from hex_llm.server.tokens import ChatToTokenize, PromptToTokenize
from hex_llm.server.vertex.schemas import GenerateRequest

Schema = dict[str, Any]


class Instance(GenerateRequest):
    """Its fields may also stand in `parameters`."""

    parameters: dict[str, Any] | None = None
    stream: bool = False


class Instances(Body):
    """Each is what a body without `instances` would be; all share the parameters."""

    instances: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_PROMPTS)
    parameters: dict[str, Any] | None = None


# Of routes that take several kinds of bodies, by the names of their functions.
BODIES: dict[str, tuple[type[Body], ...]] = {
    "sagemaker": (ChatRequest, CompletionRequest, TgiRequest),
    "tokenize_route": (PromptToTokenize, ChatToTokenize, TokenizeRequest),
    "vertex_predict": (Instance, Instances, TgiRequest),
}

STREAMS = {
    **dict.fromkeys(
        (
            "chat_completions",
            "compatible",
            "completions",
            "create_response",
            "generate_stream",
            "messages",
            "sagemaker",
        ),
        ("text/event-stream",),
    ),
    "vertex_predict": ("text/event-stream", "text/plain"),
}

ABOUT = {
    400: "The request is at fault; `param` names the field.",
    401: "The server's key is needed.",
    404: "There is no such thing.",
    408: "The body has not come in time.",
    413: "The body is too large.",
    422: "The request is at fault.",
    424: "The model could not answer.",
    429: "Too many requests are waiting; Retry-After says when to come again.",
    500: "The server is at fault; its log tells more.",
    503: "The server is loading, stopping, or its engine has failed; Retry-After says when to come again.",
    504: "The request has taken longer than --request_timeout.",
}
GATE, WITH_BODY, TGI = (401, 500, 503), (400, 408, 413, 429, 504), (422, 424, 429, 500)


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": [*properties], "properties": properties}


TEXT, TEXT_OR_NULL, NUMBER = {"type": "string"}, {"type": ["string", "null"]}, {"type": "integer"}
ERRORS: Schema = {
    "AnthropicError": _object(type=TEXT, error=_object(type=TEXT, message=TEXT)),
    "Error": _object(error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=NUMBER)),
    "TgiError": _object(error=TEXT, error_type=TEXT),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
:root{color-scheme:light dark}summary{cursor:pointer;padding:.4rem 0}code{font-weight:600}
pre{overflow:auto;padding:1rem;border:1px solid #8886}
"""


def add_docs(app: FastAPI) -> None:
    """After all routes."""

    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page_of(openapi()), headers=HEADERS)


def described(app: FastAPI) -> Schema:
    schema = get_openapi(title=app.title, version=__version__, routes=app.routes)
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own errors, which are never sent
        schemas.pop(unused, None)
    schemas.update(ERRORS)
    refs = _add_kinds(schemas)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for route in all_routes(app.routes):
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in sorted(route.methods or ()):
                operation = schema["paths"][route.path_format][method.lower()]
                operation["operationId"] = f"{route.name}_{method.lower()}_{route.path_format.strip('/')}"
                if kinds := BODIES.get(route.name):
                    several = {"anyOf": [refs[kind] for kind in kinds]}
                    operation["requestBody"]["content"]["application/json"]["schema"] = several
                _describe(operation, route, method)
    return schema


def _add_kinds(schemas: Schema) -> dict[type[Body], Schema]:
    """References to the kinds of BODIES. One that has a namesake is here so that both get long names."""
    kinds = {ResponsesRequest: None} | {kind: None for several in BODIES.values() for kind in several}
    refs, definitions = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    schemas.update(definitions["$defs"])
    return {kind: ref for (kind, _), ref in refs.items()}  # type: ignore[misc]


def _describe(operation: Schema, route: APIRoute, method: str) -> None:
    replies = operation["responses"]
    if "HTTPValidationError" in str(replies.get("422")):
        del replies["422"]
    if route.path in OPEN_PATHS:
        replies["503"] = _error(503)
        return
    operation["security"] = [{}, {"key": []}]  # the key is needed where the server has one
    own_shape = ("AnthropicError",) if isinstance(route, AnthropicRoute) else ()
    for status in (*GATE, *(WITH_BODY if method == "POST" else ())):
        replies.setdefault(str(status), _error(status, *own_shape))
    if "{response_id}" in route.path:
        replies["404"] = _error(404)
    for status in TGI if isinstance(route, TgiRoute) or route.name in BODIES else ():
        shapes = ("TgiError",) if isinstance(route, TgiRoute) else ("Error", "TgiError")
        replies[str(status)] = _error(status, *shapes)
    for kind in STREAMS.get(route.name, ()):
        replies["200"].setdefault("content", {})[kind] = {}


def _error(status: int, *shapes: str) -> Schema:
    refs = [{"$ref": f"#/components/schemas/{shape}"} for shape in shapes or ("Error",)]
    content = {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}}
    return {"description": ABOUT[status], "content": content}


def page_of(schema: Schema) -> str:
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>hex_llm: the API</title>'
        f"<style>{STYLE}</style><h1>hex_llm {escape(schema['info']['version'])}: the API</h1>"
        '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(_operations(schema))}</html>"
    )


def _operations(schema: Schema) -> Iterator[str]:
    for path, operations in sorted(schema["paths"].items()):
        for method, operation in operations.items():
            about = operation.get("description") or operation.get("summary", "")
            yield (
                f"<details><summary><code>{method.upper()} {escape(path)}</code> {escape(about)}</summary>"
                f"<pre>{escape(json.dumps(operation, indent=2))}</pre></details>"
            )
    yield "<h2>Schemas</h2>"
    for name, component in sorted(schema["components"]["schemas"].items()):
        shown = escape(json.dumps(component, indent=2))
        yield f"<details><summary><code>{escape(name)}</code></summary><pre>{shown}</pre></details>"
