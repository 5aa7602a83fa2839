"""What replies of every dialect are made of: JSON, errors, and server-sent events.

A large reply is made and encoded beside the event loop. Nothing else runs in the process while one value is
encoded, so no call encodes more than some hundred items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from hex_llm.errors import EngineStopped, HexError, InvalidRequest, QueueFull, TimedOut, UnknownModel
from hex_llm.frontend.beside import shaped
from hex_llm.server.common.body import invalid

DONE = b"data: [DONE]\n\n"
AT_A_TIME = 256  # items
BLOCK = 256 << 10  # bytes of a body that are sent at a time
RETRY_AFTER_S = "5"
ERROR_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    413: {"Connection": "close"},
    429: {"Retry-After": RETRY_AFTER_S},
    503: {"Retry-After": RETRY_AFTER_S},
}
KINDS = {401: "authentication_error", 429: "rate_limit_error"}


# ---- JSON


class Listed:
    """A list that may be long; of a generator, one that can be encoded once."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items


def _raw(value: Any) -> msgspec.Raw:
    if not isinstance(value, Listed):
        raise TypeError(f"{type(value).__name__} is not JSON")
    items, pieces = iter(value.items), []
    while batch := list(islice(items, AT_A_TIME)):
        pieces.append(encode(batch)[1:-1])
    return msgspec.Raw(b"[%b]" % b",".join(pieces))


encode = msgspec.json.Encoder(enc_hook=_raw).encode


class Whole(NamedTuple):
    """A reply that is still to be made: of how many tokens and log-probabilities, and how."""

    size: int
    make: Callable[[], Any]


async def reply_of(whole: Whole) -> Response:
    return Encoded(await shaped(whole.size, lambda: encode(whole.make())))


class Encoded(Response):
    """JSON. A large body is sent as its client takes it."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= BLOCK:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), BLOCK):
            block = self.body[start : start + BLOCK]
            await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


# ---- what a client is told when something goes wrong: OpenAI's error object, and the HTTP status


class Problem(NamedTuple):
    status: int
    message: str
    param: str | None = None

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def ours(error: Exception) -> Exception:
    """FastAPI's refusal of a body as an InvalidRequest; the first step of its path to a field is "body"."""
    if not isinstance(error, RequestValidationError):
        return error
    return invalid([{**one, "loc": one["loc"][1:]} for one in error.errors()[:1]])


def problem_of(error: Exception) -> Problem:
    """An error that is none of ours tells clients nothing."""
    error = ours(error)
    if isinstance(error, InvalidRequest):
        return Problem(404 if isinstance(error, UnknownModel) else 400, str(error), error.param)
    if isinstance(error, HexError):
        return Problem({QueueFull: 429, EngineStopped: 503, TimedOut: 504}.get(type(error), 500), str(error))
    return Problem(500, "internal error; the server's log tells more")


def error_reply(status: int, body: dict[str, Any]) -> JSONResponse:
    """In whatever shape a dialect gives the body."""
    return JSONResponse(body, status, ERROR_HEADERS.get(status))


# ---- events


def event(data: Any) -> bytes:
    return b"data: %b\n\n" % encode(data)


def openai_end(error: Exception) -> bytes:
    """The end of OpenAI's streams that break."""
    return event(problem_of(error).body()) + DONE
