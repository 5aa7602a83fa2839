"""How many sequences a front end has let in, counted before anything is made for them. No jax."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hex_llm.errors import InvalidRequest, QueueFull


class Room:
    """A sequence is in from before its prompt is looked at until the engine has told its end."""

    def __init__(self) -> None:
        self._num_preparing = 0  # sequences
        self._num_sent = 0
        self._sent: dict[str, int] = {}  # of each request, those whose ends the engine has not told yet

    @property
    def num_sequences(self) -> int:
        return self._num_preparing + self._num_sent

    @property
    def num_requests(self) -> int:
        """That the engine is at."""
        return len(self._sent)

    def check(self, num_sequences: int, most: int) -> None:
        """InvalidRequest: they could never come in together; QueueFull: now they cannot."""
        if num_sequences > most:
            raise InvalidRequest(
                f"the request asks for {num_sequences} sequences (prompts times n or best_of); this server "
                f"takes at most {most} (--max_concurrent_requests)",
                "n",
            )
        if (now := self.num_sequences) + num_sequences > most:
            raise QueueFull(f"{now} sequences are running or waiting, and no more than {most} may be")

    @contextmanager
    def preparing(self, num_sequences: int) -> Iterator[None]:
        self._num_preparing += num_sequences
        try:
            yield
        finally:
            self._num_preparing -= num_sequences

    def send(self, request_id: str, num_sequences: int) -> None:
        self._sent[request_id] = num_sequences
        self._num_sent += num_sequences

    def settle(self, request_id: str, num_sequences: int | None = None) -> None:
        """The engine has told the end of so many of its sequences; None: of all."""
        there = self._sent.get(request_id, 0)
        ended = there if num_sequences is None else min(num_sequences, there)
        self._num_sent -= ended
        if there > ended:
            self._sent[request_id] = there - ended
        else:
            self._sent.pop(request_id, None)

    def clear(self) -> None:
        """The engine has gone, and all that were sent to it."""
        self._sent.clear()
        self._num_sent = 0
