"""Requests under way, between the engine that brings their updates and whoever reads them. Lives in one event
loop. No jax.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hex_llm.errors import EngineStopped, HexError, InvalidRequest, QueueFull, TimedOut
from hex_llm.frontend.outputs import Delta, OutputCollector, for_engine
from hex_llm.ipc.protocol import Abort, Add, Command, Refused, Step, Stop, error_of
from hex_llm.ipc.stats import EngineStatus, Stats
from hex_llm.types import FinishReason, RequestOutput, Update

log = logging.getLogger(__name__)

UPDATES_AT_A_TIME = 32  # are taken in before their readers get a turn: the last need not wait for all others


@dataclass
class Timeline:
    """One request's life in its front end, in seconds of time.monotonic, and its tokens."""

    num_choices: int = 1
    max_tokens: int | None = None
    arrived: float = field(default_factory=time.monotonic)
    sent: float = 0.0  # to the engine
    queued_s: float = 0.0  # there
    first: float = 0.0  # token; 0: none has come
    last: dict[int, float] = field(default_factory=dict)  # tokens of the choices
    ended: float = 0.0
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    num_preempted: int = 0

    def add_tokens(self, index: int, num_tokens: int, now: float) -> float | None:
        """How long the choice has waited for them; None: they are its first."""
        before = self.last.get(index)
        self.last[index] = now
        self.num_generated += num_tokens
        return None if before is None else now - before

    @property
    def begun(self) -> float:
        """When the engine took it out of the queue."""
        return self.sent + self.queued_s

    @property
    def latest(self) -> float:
        return max(self.last.values(), default=self.first)


class Generation:
    """An async iterator of what is new, as small as it is read soon."""

    def __init__(self, collector: OutputCollector, timeline: Timeline | None = None) -> None:
        self.collector = collector
        self.timeline = timeline or Timeline()
        self.reasons: dict[int, str] = {}  # of the choices that have ended
        self.ended = False
        self.requests: OpenRequests | None = None  # of the engine that it was sent to last
        self.has_moved = False  # from one engine to another
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

    @property
    def can_move(self) -> bool:
        """Nothing has come of it. Once: one that is the end of every engine must not be that of all."""
        return not (self.timeline.first or self.reasons or self.has_moved)

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


class Places:
    """The sequences that an engine is at: from when they are sent until it has told their ends."""

    def __init__(self) -> None:
        self.num_sequences = 0
        self._sent: dict[str, int] = {}  # of each request, those whose ends the engine has not told yet

    @property
    def num_requests(self) -> int:
        return len(self._sent)

    def send(self, request_id: str, num_sequences: int) -> None:
        self._sent[request_id] = num_sequences
        self.num_sequences += num_sequences

    def settle(self, request_id: str, num_sequences: int | None = None) -> None:
        """The engine has told the end of so many of its sequences; None: of all."""
        num_before = self._sent.pop(request_id, 0)
        num_left = 0 if num_sequences is None else max(num_before - num_sequences, 0)
        self.num_sequences -= num_before - num_left
        if num_left:
            self._sent[request_id] = num_left

    def clear(self) -> None:
        """The engine has gone, and all that were sent to it."""
        self._sent.clear()
        self.num_sequences = 0


class Room:
    """A sequence is in from before its prompt is looked at until its engine has told its end."""

    def __init__(self, *engines: Places) -> None:
        self._engines = engines
        self._num_preparing = 0  # sequences

    @property
    def num_sequences(self) -> int:
        return self._num_preparing + sum(one.num_sequences for one in self._engines)

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


class Observer:
    """Is told what happens to requests. This one does not care."""

    def began(self, timeline: Timeline) -> None:
        """Called by the task that asks for it."""

    def got_first_token(self, timeline: Timeline) -> None: ...

    def stepped(self, stats: Stats, num_tokens: int, pauses: list[float]) -> None:
        """`num_tokens` came of it, for requests that are read; choices had waited so long for their next."""

    def ended(self, timeline: Timeline, reasons: list[str]) -> None:
        """Once, with the reason of each choice that was not told before."""


class Statistics:
    """What its observer is told of requests and steps."""

    def __init__(self) -> None:
        self.observer = Observer()
        self._num_tokens = 0  # of the present step
        self._pauses: list[float] = []

    def add_tokens(self, timeline: Timeline, update: Update, now: float) -> None:
        num_new = len(update.token_ids)
        self._num_tokens += num_new
        pause = timeline.add_tokens(update.index, num_new, now)
        if pause is not None:
            self._pauses.append(pause)
        elif not timeline.first:
            timeline.first, timeline.num_cached = now, update.num_cached
            self.observer.got_first_token(timeline)

    def end_step(self, stats: Stats) -> None:
        num_tokens, pauses = self._num_tokens, self._pauses
        self._num_tokens, self._pauses = 0, []
        self.observer.stepped(stats, num_tokens, pauses)

    def end(self, generation: Generation, left: FinishReason) -> None:
        """`left` is the reason of those choices that have not ended."""
        timeline, reasons = generation.timeline, generation.reasons
        timeline.ended = time.monotonic()
        self.observer.ended(timeline, [reasons.get(i, left) for i in range(timeline.num_choices)])


class OpenRequests:
    """Sends requests to an engine, and takes its reports of them to their readers."""

    def __init__(
        self, send: Callable[[Command], None], engine_status: EngineStatus, statistics: Statistics
    ) -> None:
        self.places = Places()
        self._send = send
        self._engine_status = engine_status
        self._statistics = statistics
        self._open: dict[str, Generation] = {}
        self._untold: set[Generation] = set()  # whose readers do not know yet that there is news

    def __len__(self) -> int:
        """Those that somebody reads."""
        return len(self._open)

    @contextmanager
    def add(self, collector: OutputCollector, timeline: Timeline, timeout_s: float) -> Iterator[Generation]:
        """Leaving it before its end aborts it; so does the time, counted from its arrival (0: any)."""
        timeline.num_prompt = len(collector.request.prompt_ids)
        self._statistics.observer.began(timeline)
        generation = Generation(collector, timeline)
        left = timeline.arrived + timeout_s - time.monotonic()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(left, _expire, generation, timeout_s) if timeout_s else None
        try:
            self.send(generation)
            yield generation
        finally:
            if timer is not None:
                timer.cancel()
            _abort(generation)

    def send(self, generation: Generation) -> None:
        """To this engine, from which its updates come from now on."""
        request, now = generation.collector.request, time.monotonic()
        generation.requests = self
        self._open[request.request_id] = generation
        self._send(Add(for_engine(request)))
        if not self._engine_status.num_pending:
            self._engine_status.progressed = now
        self.places.send(request.request_id, request.params.num_choices)
        self._engine_status.num_pending = self.places.num_requests
        generation.timeline.sent = now

    def abort(self, generation: Generation) -> None:
        """If it has not ended."""
        request_id = generation.collector.request.request_id
        if self._open.pop(request_id, None) is not None:
            self._send(Abort(request_id))
            self._statistics.end(generation, FinishReason.ABORT)

    def fail(self, reason: str, move: Callable[[Generation], bool]) -> None:
        """All of them, but those that can `move`; the engine has gone, or does not count any more."""
        lost, self._open = self._open, {}
        self.places.clear()
        self._engine_status.num_pending = 0
        for generation in lost.values():
            if not (generation.can_move and move(generation)):
                generation.fail(EngineStopped(reason))
                self._statistics.end(generation, FinishReason.ERROR)

    # ---- what the engine reports

    async def take(self, report: Step | Refused, *, is_behind: bool) -> None:
        """`is_behind`: there are more reports already."""
        if isinstance(report, Refused):
            self._settle(report.request_id)
            if generation := self._open.pop(report.request_id, None):
                generation.fail(error_of(report.kind, report.message, report.param))
            return
        status, now = self._engine_status, time.monotonic()
        status.num_steps, status.stats, status.progressed = report.num_steps, report.stats, now
        for request_id, seconds in report.stats.waited:
            if generation := self._open.get(request_id):
                generation.timeline.queued_s = seconds
        await self._take_updates(report.updates, now, is_behind)
        self._statistics.end_step(report.stats)
        while self._untold and not is_behind:
            generation = self._untold.pop()
            try:
                generation.tell()
            except Exception as error:
                self._spoil(generation, error)

    async def _take_updates(self, updates: Sequence[Update], now: float, is_behind: bool) -> None:
        """Behind, it is better that readers get several tokens at once, later."""
        for i, update in enumerate(updates, 1):
            if i % UPDATES_AT_A_TIME == 0 and not is_behind:
                await asyncio.sleep(0)
            if update.finish_reason is not None:
                self._settle(update.request_id, 1)
            generation = self._open.get(update.request_id)
            if generation is None:  # it has ended for its reader
                continue
            generation.timeline.num_preempted += update.num_preempted
            if update.token_ids and update.index not in generation.reasons:
                self._statistics.add_tokens(generation.timeline, update, now)
            try:
                if generation.add(update, tell=not is_behind):
                    self._send(Stop(update.request_id, update.index))
            except Exception as error:
                self._spoil(generation, error)
                continue
            if generation.ended:
                self._close(generation)
            elif is_behind:
                self._untold.add(generation)

    def _settle(self, request_id: str, num_choices: int | None = None) -> None:
        """The engine has told the end of so many choices; None: of all."""
        self.places.settle(request_id, num_choices)
        self._engine_status.num_pending = self.places.num_requests

    def _spoil(self, generation: Generation, error: Exception) -> None:
        """A request's own data fails that request only."""
        log.error("the output of a request could not be put together", exc_info=error)
        generation.fail(HexError("the output could not be put together; the server's log tells more"))
        self._send(Abort(generation.collector.request.request_id))
        self._close(generation)

    def _close(self, generation: Generation) -> None:
        if self._open.pop(generation.collector.request.request_id, None) is not None:
            self._statistics.end(generation, FinishReason.ERROR)


def _expire(generation: Generation, timeout_s: float) -> None:
    _abort(generation)
    generation.fail(TimedOut(f"the request has taken longer than {timeout_s:g} s"))


def _abort(generation: Generation) -> None:
    """Wherever it is now."""
    assert generation.requests is not None
    generation.requests.abort(generation)
