"""One request under way, between whoever brings its updates and its one reader. Lives in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hex_llm.engine.outputs import Delta, OutputCollector
from hex_llm.engine.stats import Timeline
from hex_llm.errors import HexError
from hex_llm.types import FinishReason, RequestOutput, Update


class Generation:
    """An async iterator of what is new, as small as it is read soon."""

    def __init__(self, collector: OutputCollector, timeline: Timeline | None = None) -> None:
        self.collector = collector
        self.timeline = timeline or Timeline()
        self.reasons: dict[int, str] = {}  # of the choices that have ended
        self._error: HexError | None = None
        self._has_news = False
        self._reader: asyncio.Future[None] | None = None  # waits for news
        self._end = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._end.is_set()

    def output(self) -> RequestOutput:
        """Everything so far."""
        return self.collector.output()

    async def until_end(self) -> None:
        await self._end.wait()
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while deltas := await self.take():
            for delta in deltas:
                yield delta

    async def take(self) -> list[Delta]:
        """What is new, once something is; nothing: it has ended. Raises the error that ended it.

        As the iterator, for those to whom time matters: this is done for each token.
        """
        while True:
            if not self._has_news:
                if self.ended:
                    break
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            self._has_news = False
            if deltas := self.collector.deltas():
                return deltas
        if self._error is not None:
            raise self._error
        return []

    def add(self, update: Update) -> bool:
        """As OutputCollector.add."""
        must_stop = self.collector.add(update)
        if must_stop or update.finish_reason is not None:
            self.reasons.setdefault(update.index, update.finish_reason or FinishReason.STOP)
            if self.collector.finished:
                self._end.set()
        self._tell()
        return must_stop

    def fail(self, error: HexError) -> None:
        if not self.ended:
            self._error = error
            self._end.set()
            self._tell()

    def _tell(self) -> None:
        """As an asyncio.Event for one reader, in a third of its time: this is done for each token."""
        self._has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
