"""JSON of replies, whatever their size: a large one is made and encoded beside the event loop, in pieces.

Nothing else runs in the process while one value is encoded, so no call encodes more than some hundred items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from hex_llm.frontend.beside import shaped

AT_A_TIME = 256  # items
BLOCK = 256 << 10  # bytes of a body that are sent at a time


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
