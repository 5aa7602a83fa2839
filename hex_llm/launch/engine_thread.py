"""The engine in a thread of its own, behind the event loop.

Commands go in through a queue, outcomes come out as callbacks of the loop, at most one for each step. No
state is shared: the engine belongs to the thread, what the server reads belongs to the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from hex_llm.errors import HexError
from hex_llm.types import CompletionOutput, SamplingParams

if TYPE_CHECKING:
    from hex_llm.engine.engine import Engine
    from hex_llm.engine.llm import LLM
    from hex_llm.scheduling.sequence import Sequence as EngineSequence
    from hex_llm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class EngineStopped(HexError):
    """The request was not served: the engine failed, or is shutting down."""


class EngineThread:
    """A server's backend. `load` runs in the thread too, so it may take its time.

    A request whose caller is cancelled is dropped while it waits for its first step; one that is already
    running is finished in vain: cancelling inside a batch is not built yet.
    """

    def __init__(self, load: Callable[[], LLM], model_name: str) -> None:
        self.model_name = model_name
        self._load = load
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # The loop's:
        self._llm: LLM | None = None
        self._failure: str | None = None
        self._waiters: dict[str, asyncio.Future[CompletionOutput]] = {}
        # The thread's:
        self._sequences: dict[str, EngineSequence] = {}

    # ---- the loop's side

    @property
    def ready(self) -> bool:
        return self._llm is not None and self._failure is None

    @property
    def tokenizer(self) -> Tokenizer | None:
        assert self._llm is not None, "not loaded yet"
        return self._llm.tokenizer

    @property
    def max_len(self) -> int:
        assert self._llm is not None, "not loaded yet"
        return self._llm.engine.spec.max_len

    async def start(self) -> None:
        """Returns when the engine is ready; raises what `load` raised."""
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[LLM] = self._loop.create_future()
        self._thread.start()
        self._llm = await self._loaded

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> CompletionOutput:
        """The tokens, without text; raises InvalidRequest or EngineStopped."""
        if not self.ready:
            raise EngineStopped(self._failure or "the model is being loaded")
        request_id = uuid.uuid4().hex
        waiter = self._waiters[request_id] = self._loop.create_future()
        self._inbox.put(partial(self._add, request_id, prompt_ids, params))
        try:
            return await waiter
        except asyncio.CancelledError:
            self._inbox.put(partial(self._drop, request_id))
            raise
        finally:
            del self._waiters[request_id]

    def fail(self, reason: str) -> None:
        """Ends every request, and all that are still to come, with EngineStopped."""
        self._failure = reason
        for waiter in self._waiters.values():
            _settle(waiter, EngineStopped(reason))

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after its present step; whether it has ended in time."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _deliver(self, outcomes: Mapping[str, CompletionOutput | Exception]) -> None:
        for request_id, outcome in outcomes.items():
            if request_id in self._waiters:  # else its caller has gone
                _settle(self._waiters[request_id], outcome)

    # ---- the thread's side

    def _run(self) -> None:
        try:
            llm = self._load()
        except BaseException as error:  # whoever waits for the model must learn of it, whatever it is
            self._post(_settle, self._loaded, error)
            return
        self._post(_settle, self._loaded, llm)
        try:
            self._serve(llm.engine)
        except Exception as error:
            log.exception("the engine failed")
            self._post(self.fail, f"the engine failed ({type(error).__name__}); the server must be restarted")

    def _serve(self, engine: Engine) -> None:
        self._engine = engine
        while True:
            for command in self._commands(wait=not self._sequences):
                if command is None:
                    return
                command()
            if self._sequences:
                self._step()

    def _commands(self, wait: bool) -> Iterator[Callable[[], None] | None]:
        """All that have come; if there are none and `wait`, the next one."""
        with suppress(Empty):
            while True:
                yield self._inbox.get(block=wait)
                wait = False

    def _add(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        try:
            sequence = self._engine.prepare(request_id, prompt_ids, params)
        except Exception as error:  # a request's own data fails that request only
            self._post(self._deliver, {request_id: error})
            return
        self._engine.add(sequence)
        self._sequences[request_id] = sequence

    def _drop(self, request_id: str) -> None:
        waiting, sequence = self._engine.scheduler.waiting, self._sequences.get(request_id)
        if sequence is not None and sequence in waiting:
            waiting.remove(sequence)
            del self._sequences[request_id]

    def _step(self) -> None:
        touched = self._engine.step()
        if not touched:
            raise RuntimeError("requests are left that no step takes up")
        outcomes = {
            s.request_id: CompletionOutput(0, s.output_ids, finish_reason=s.finish_reason)
            for s in touched
            if s.finish_reason is not None
        }
        if outcomes:
            for request_id in outcomes:
                del self._sequences[request_id]
            self._post(self._deliver, outcomes)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *args)


def _settle(waiter: asyncio.Future[Any], outcome: Any) -> None:
    if waiter.done():  # cancelled, or failed before
        return
    if isinstance(outcome, BaseException):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)
