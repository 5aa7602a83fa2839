"""One request under way, between whoever brings its updates and its one reader. Lives in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from hex_llm.errors import HexError
from hex_llm.frontend.outputs import Delta, OutputCollector
from hex_llm.ipc.stats import Timeline
from hex_llm.types import FinishReason, RequestOutput, Update


class Generation:
    """An async iterator of what is new, as small as it is read soon."""

    def __init__(self, collector: OutputCollector, timeline: Timeline | None = None) -> None:
        self.collector = collector
        self.timeline = timeline or Timeline()
        self.reasons: dict[int, str] = {}  # of the choices that have ended
        self.ended = False
        # Called when there is news but not the end, instead of waking a reader who waits for it, which would
        # take longer than what most do with it: whether `collector.deltas()` were taken.
        self.write_inline: Callable[[], bool] | None = None
        self._error: HexError | None = None
        self._has_news = False
        self._reader: asyncio.Future[None] | None = None  # waits for news
        self._end = asyncio.Event()

    def output(self) -> RequestOutput:
        """Everything so far; log-probabilities are named when they are looked at."""
        return self.collector.output(named_late=True)

    async def until_end(self) -> None:
        await self._end.wait()
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while deltas := await self.take():
            for delta in deltas:
                yield delta

    async def take(self) -> list[Delta]:
        """What is new, once something is; nothing: it has ended. Raises the error that ended it."""
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

    def add(self, update: Update, *, tell: bool = True) -> bool:
        """As OutputCollector.add; `tell` the reader at once, or leave that for later unless it is the end."""
        must_stop = self.collector.add(update)
        if must_stop or update.finish_reason is not None:
            self.reasons.setdefault(update.index, update.finish_reason or FinishReason.STOP)
            if self.collector.finished:
                self._set_end()
        self._has_news = True
        if tell or self.ended:
            self.tell()
        return must_stop

    def fail(self, error: HexError) -> None:
        if not self.ended:
            self._error = error
            self._set_end()
            self._has_news = True
            self.tell()

    def _set_end(self) -> None:
        self.ended = True
        self._end.set()

    def tell(self) -> None:
        """The reader gets what is new. This is done for each token: a third of an asyncio.Event's time."""
        if self._has_news and self._reader is not None and not self._reader.done():
            if self.write_inline is not None and not self.ended and self.write_inline():
                self._has_news = False
            else:
                self._reader.set_result(None)
