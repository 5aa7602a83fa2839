"""Responses that are kept to be asked for again or gone on from: in this process alone, and bounded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import HTTPException

from hex_llm.errors import InvalidRequest
from hex_llm.server.common.body import shown

MAX_STORED = 4096
MAX_STORED_BYTES = 128 << 20


@dataclass(eq=False)
class StoredResponse:
    body: bytes  # JSON
    conversation: bytes = (
        b""  # messages of a chat, as JSON, with the reply; none: it has not ended, or failed
    )
    task: asyncio.Task[None] | None = None  # that makes it, if nobody waits for it

    @property
    def size(self) -> int:
        return len(self.body) + len(self.conversation)

    @property
    def is_growing(self) -> bool:
        return self.task is not None and not self.task.done()

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])


class ResponseStore:
    """Once there are too many, the oldest is forgotten."""

    def __init__(self, max_stored: int = MAX_STORED, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._stored: dict[str, StoredResponse] = {}
        self._limits = max_stored, max_bytes
        self._num_bytes = 0

    def get(self, response_id: str) -> StoredResponse:
        if (stored := self._stored.get(response_id)) is None:
            raise HTTPException(404, f"Response with id '{shown(response_id)}' not found.")
        return stored

    def put(self, response_id: str, stored: StoredResponse) -> None:
        if response_id in self._stored:
            self.remove(response_id)
        self._stored[response_id] = stored
        self._num_bytes += stored.size
        most, most_bytes = self._limits
        while len(self._stored) > most or self._num_bytes > most_bytes:
            oldest = next((name for name, one in self._stored.items() if not one.is_growing), None)
            if oldest is None:  # those that grow are as many as the engine takes
                break
            self.remove(oldest)

    def remove(self, response_id: str) -> StoredResponse:
        stored = self.get(response_id)
        del self._stored[response_id]
        self._num_bytes -= stored.size
        return stored

    def conversation(self, response_id: str) -> list[dict[str, Any]]:
        """A copy. Raises InvalidRequest if there is none to go on from."""
        stored = self.get(response_id)
        if not stored.conversation:
            raise InvalidRequest.at("previous_response_id", "that response has not ended, or failed")
        messages: list[dict[str, Any]] = msgspec.json.decode(stored.conversation)
        return messages
