"""How bodies are read. Those that take long to parse and to check are, beside the event loop; others are
FastAPI's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from hex_llm.errors import InvalidRequest
from hex_llm.frontend.beside import read
from hex_llm.sampling_params import is_unicode
from hex_llm.server.common.body import Body, parse, shown
from hex_llm.server.common.replies import Problem, problem_of

LARGE_BODY = 32 << 10  # bytes

T = TypeVar("T")


class LargeRequest(Request):
    """Its JSON is known."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self.num_bytes = len(body)
        self._known = body, value

    async def body(self) -> bytes:
        return self._known[0]

    async def json(self) -> Any:
        return self._known[1]


class BodyRoute(APIRoute):
    needs_room = True  # a full server refuses it unread

    @staticmethod
    def error_body(problem: Problem) -> dict[str, Any]:
        """In the shape that its clients know."""
        return problem.body()

    @classmethod
    def problem_reply(cls, error: Exception) -> tuple[int, dict[str, Any]]:
        """The status and the body for its clients."""
        problem = problem_of(error)
        return problem.status, cls.error_body(problem)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        kind = self.body_field.field_info.annotation

        async def handled(request: Request) -> Response:
            try:
                body = await request.body()
            except ClientDisconnect:
                return Response(status_code=499)  # which nobody reads, as in unless_gone
            if len(body) >= LARGE_BODY and "json" in request.headers.get("content-type", "").lower():
                request = LargeRequest(request, body, await read(len(body), partial(_value, kind, body)))
            elif len(body) < LARGE_BODY and any(sign in body for sign in SUSPICIOUS):
                with suppress(ValueError, RecursionError):  # FastAPI tells
                    check_texts(await request.json())
            return await handler(request)

        return handled


async def checked(request: Request, work: Callable[[], T]) -> T:
    """What the work makes of the request's body."""
    return await read(request.num_bytes, work) if isinstance(request, LargeRequest) else work()


def _value(kind: Any, body: bytes) -> Any:
    """A `kind` of body, which FastAPI then takes as it is; else what the JSON says."""
    values = _decoded(body)
    return parse(kind, values) if isinstance(kind, type) and issubclass(kind, Body) else values


def _decoded(body: bytes) -> Any:
    """By msgspec, in a quarter of json's time, in which nothing else runs. No garbage is looked for: JSON has
    no cycles, and to look for some among a million values takes longer than all the rest."""
    gc.disable()
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    finally:
        gc.enable()


# ---- texts

# A body with half of a surrogate pair has one of these: an escape, bytes that are not quite UTF-8, or, in
# UTF-16, zeros. Few others have any.
SUSPICIOUS = (rb"\ud", rb"\uD", b"\xed", b"\0")


def check_texts(values: Any) -> None:
    """Half of a surrogate pair, anywhere, could not be tokenized, sent back or logged."""
    left = [(name, [name, one]) for name, one in values.items()] if isinstance(values, dict) else []
    while left:
        field, values = left.pop()
        for one in values:
            if isinstance(one, str) and not is_unicode(one):
                raise InvalidRequest.at(shown(field), "half of a surrogate pair is no character")
            if isinstance(one, dict):
                left.append((field, [*one, *one.values()]))
            elif isinstance(one, list):
                left.append((field, one))
