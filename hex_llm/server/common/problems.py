"""What a client is told when something goes wrong: OpenAI's error object, and the HTTP status."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from hex_llm.errors import EngineStopped, HexError, InvalidRequest, QueueFull, TimedOut, UnknownModel
from hex_llm.server.common.body import invalid

RETRY_AFTER_S = "5"
HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    413: {"Connection": "close"},
    429: {"Retry-After": RETRY_AFTER_S},
    503: {"Retry-After": RETRY_AFTER_S},
}
KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class Problem(NamedTuple):
    status: int
    message: str
    param: str | None = None

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def invalid_body(error: RequestValidationError) -> InvalidRequest:
    """The first step of FastAPI's path to a field is always "body"."""
    return invalid([{**one, "loc": one["loc"][1:]} for one in error.errors()[:1]])


def problem_of(error: Exception) -> Problem:
    """An error that is none of ours tells clients nothing."""
    if isinstance(error, InvalidRequest):
        return Problem(404 if isinstance(error, UnknownModel) else 400, str(error), error.param)
    if isinstance(error, HexError):
        return Problem({QueueFull: 429, EngineStopped: 503, TimedOut: 504}.get(type(error), 500), str(error))
    return Problem(500, "internal error; the server's log tells more")


def error(status: int, message: str, param: str | None = None) -> JSONResponse:
    return error_reply(status, Problem(status, message, param).body())


def error_reply(status: int, body: dict[str, Any]) -> JSONResponse:
    """In whatever shape a dialect gives the body."""
    return JSONResponse(body, status, HEADERS.get(status))
