"""The front end's side of an engine process: starts it, submits requests, puts their outputs together.

Lives in one event loop. Text is made here, so that the engine's process only steps. Every request gets one
end: its output, an InvalidRequest, QueueFull, TimedOut or EngineStopped. A process that dies after it was
ready, or is ended because it is stuck, is started again, a few times. No jax.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from hex_llm import errors
from hex_llm.admission import Limits, make_request
from hex_llm.config import EngineConfig
from hex_llm.errors import EngineStopped, HexError, InvalidRequest, ModelError, TimedOut
from hex_llm.frontend.beside import read
from hex_llm.frontend.generation import Generation
from hex_llm.frontend.outputs import OutputCollector, for_engine
from hex_llm.frontend.process import EngineProcess
from hex_llm.frontend.room import Room
from hex_llm.ipc.protocol import (
    Abort,
    Add,
    Beat,
    Command,
    Failed,
    Progress,
    Ready,
    Refused,
    Report,
    Start,
    Step,
    Stop,
)
from hex_llm.ipc.stats import LOADING, EngineStatus, Observer, Stats, Timeline
from hex_llm.sampling_params import SamplingParams
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import FinishReason, Request, RequestOutput, Update
from hex_llm.weights.model_files import open_tokenizer
from hex_llm.weights.source import fetch_for, pinned

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "hex_llm.engine.worker")
FAILED = "the engine has failed"
RESTARTING = "the engine has failed and is being restarted"
GIVEN_UP = "the engine has failed too often; it is not started again"
MAX_RESTARTS = 3  # one after another, of engines that then do not serve for STEADY_S
STEADY_S = 30
PAUSE_S = 1.0  # before the second restart; twice as long before the third
UPDATES_AT_A_TIME = 32  # are taken in before their readers get a turn: the last need not wait for all others


class EngineClient:
    """An engine in a process of its own. `limits` and `tokenizer` are known once it is ready.

    `observer` is told of requests; it, `log_format` and the timeouts may be set before the start.
    """

    limits: Limits | None = None
    tokenizer: Tokenizer | None = None

    def __init__(self, config: EngineConfig, model_name: str = "", command: Sequence[str] = WORKER) -> None:
        self.config = config
        self.model_name = model_name
        self.observer = Observer()
        self.log_format = "text"
        self.request_timeout_s = 0.0  # what a request may take in all; 0: any
        self.stuck_timeout_s = 20.0  # that the engine may be silent
        self.step_timeout_s = 300.0  # for a step; 0: any
        self.engine_status = EngineStatus()
        self._command = command
        self._open: dict[str, Generation] = {}
        self._untold: set[Generation] = set()  # whose readers do not know yet that there is news
        self._room = Room()
        self._num_restarts = 0  # since the engine has served for long
        self._serving_since = 0.0
        self._process: EngineProcess | None = None
        self._serving: EngineProcess | None = None  # the last that was ready
        self._receiver: asyncio.Task[None] | None = None
        self._watchers: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        return not self.engine_status.trouble

    @property
    def num_steps(self) -> int:
        """That the engine has told of."""
        return self.engine_status.num_steps

    @property
    def max_len(self) -> int:
        assert self.limits is not None, "not loaded yet"
        return self.limits.longest

    @property
    def max_sequences(self) -> int:
        """That may be waiting and running."""
        assert self.limits is not None, "not loaded yet"
        return self.limits.max_sequences

    # ---- the process

    async def start(self) -> None:
        """Returns when the engine is ready; raises why it could not be loaded, and nothing is left then."""
        # Once: the tokenizer and the engines that follow this one are of the same version of the model.
        self.config = await asyncio.to_thread(pinned, self.config)
        self._loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.engine_status.progress = "starting"
        self._process = process = EngineProcess()
        try:
            await process.start(self._command)
            self._receiver = asyncio.create_task(self._receive(process))
            self._watch(process)
            level = logging.getLogger("hex_llm").getEffectiveLevel()
            self._send(Start(self.config, level, self.log_format))
            await self._adopt(await self._loaded)
            self._serving = process
        except BaseException:
            await self._release(0)
            raise

    async def _adopt(self, ready: Ready) -> None:
        if self.limits is None:
            # Now: the engine has fetched the files, and two must not do so at the same time.
            self.tokenizer = await asyncio.to_thread(tokenizer_of, self.config)
        if self.engine_status.trouble not in (LOADING, RESTARTING):
            raise EngineStopped(self.engine_status.trouble)
        self.limits, self.engine_status.memory, self.engine_status.progress = ready.limits, ready.memory, ""
        log.info("sequences that may run and wait: %d (--max_concurrent_requests)", self.max_sequences)
        self.engine_status.trouble, self._serving_since = "", time.monotonic()

    async def stop(self, timeout_s: float) -> None:
        """Ends the process: after its present step or, if that or loading takes longer, at once."""
        self.fail("the engine was stopped")
        watchers = [*self._watchers]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await self._release(timeout_s)

    async def _release(self, timeout_s: float) -> None:
        """The process, if there is one."""
        if self._receiver is not None:
            self._receiver.cancel()
        if self._process is not None:
            await self._process.end(timeout_s)

    def fail(self, reason: str) -> None:
        """Ends every request, and all that are still to come, with EngineStopped."""
        self.engine_status.trouble = reason
        for generation in self._open.values():
            generation.fail(EngineStopped(reason))
            self._note_end(generation, FinishReason.ERROR)
        self._open.clear()

    def _watch(self, process: EngineProcess) -> None:
        watcher = asyncio.create_task(self._watched(process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watched(self, process: EngineProcess) -> None:
        how = await process.ended(self.stuck_timeout_s, self.step_timeout_s)
        await asyncio.sleep(0.1)  # what it said last may still be on its way, and tells more
        if process.is_ending:  # we are done with it
            return
        self._lost(ModelError(f"the engine's process {how}"))
        self._room.clear()
        self.engine_status.num_pending = 0
        if process is self._serving:
            await self._restart()

    async def _restart(self) -> None:
        """A new process for one that has ended; again, if that does not come to serve."""
        if time.monotonic() - self._serving_since > STEADY_S:
            self._num_restarts = 0
        while self.engine_status.trouble == FAILED:
            if self._num_restarts == MAX_RESTARTS:
                log.critical(GIVEN_UP)
                self.fail(GIVEN_UP)
                return
            log.warning("starting the engine again")
            self.engine_status.trouble = RESTARTING
            self._num_restarts += 1
            try:
                await self._release(0)
                await asyncio.sleep((self._num_restarts - 1) * PAUSE_S)
                await self.start()
                log.info("the engine is ready again")
            except Exception as error:  # also of the system, which may lack memory, processes or space
                log.error("the engine could not be started again: %s", error)
                if self.engine_status.trouble == RESTARTING:
                    self.engine_status.trouble = FAILED

    def _lost(self, error: HexError) -> None:
        """The engine will not answer any more; the first reason counts.

        An unforeseen error's message is for who starts the server, not for its clients.
        """
        if self.engine_status.trouble not in ("", LOADING, RESTARTING):
            return
        if self._loaded.done():
            log.error("%s", error)
        else:
            self._loaded.set_exception(error)
        self.fail(FAILED)

    # ---- requests

    @asynccontextmanager
    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[Generation]:
        """A request under way; leaving it before its end aborts it. Raises what is wrong with it."""
        self._check_ready()
        self.check_room(params.num_choices)
        timeline = Timeline(params.num_choices, params.max_tokens)
        with self._room.preparing(params.num_choices):
            if isinstance(prompt, str) and self.tokenizer and params.truncate_prompt_tokens is None:
                self.tokenizer.refuse_longer(prompt, self.max_len)
            # Long prompts take long to be cut into tokens and to be checked.
            prepare = partial(self._prepare, prompt, params, priority, cache_salt)
            collector = await read(len(prompt) if isinstance(prompt, str) else 0, prepare)
        self._check_ready()
        request_id = collector.request.request_id
        timeline.num_prompt = len(collector.request.prompt_ids)
        self.observer.began(timeline)
        generation = self._open[request_id] = Generation(collector, timeline)
        timer = self._end_in_time(generation)
        try:
            self._submit(collector.request)
            timeline.sent = time.monotonic()
            yield generation
        finally:
            if timer is not None:
                timer.cancel()
            if self._open.pop(request_id, None) is not None:
                self._send(Abort(request_id))
                self._note_end(generation, FinishReason.ABORT)

    async def complete(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestOutput:
        """The whole output, once it is there; cancelled, the request is aborted."""
        async with self.generate(prompt, params, priority=priority, cache_salt=cache_salt) as generation:
            await generation.until_end()
        return generation.output()

    def check_room(self, num_sequences: int) -> None:
        """Refuses what there is no room for, before anything is made for it, whether or not the engine
        answers: InvalidRequest, if there never is, else QueueFull."""
        self._room.check(num_sequences, self.max_sequences)

    def _check_ready(self) -> None:
        if self.engine_status.trouble:
            raise EngineStopped(self.engine_status.trouble)

    def _prepare(
        self, prompt: str | Sequence[int], params: SamplingParams, priority: int, cache_salt: str
    ) -> OutputCollector:
        """Runs in a thread. Ids are ours: who knew another's could abort it."""
        assert self.limits is not None
        request = make_request(
            uuid.uuid4().hex,
            self._encode(prompt) if isinstance(prompt, str) else prompt,
            params,
            self.limits,
            self.tokenizer,
            priority=priority,
            cache_salt=cache_salt,
        )
        return OutputCollector(request, self.tokenizer, prompt if isinstance(prompt, str) else None)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequest(
                "prompt: this server has no tokenizer (--skip_tokenizer_init); send token ids", "prompt"
            )
        return self.tokenizer.encode(text)

    def _end_in_time(self, generation: Generation) -> asyncio.TimerHandle | None:
        if not self.request_timeout_s:
            return None
        left = generation.timeline.arrived + self.request_timeout_s - time.monotonic()
        request_id = generation.collector.request.request_id
        return asyncio.get_running_loop().call_later(left, self._expire, request_id)

    def _expire(self, request_id: str) -> None:
        if generation := self._open.pop(request_id, None):
            self._send(Abort(request_id))
            generation.fail(TimedOut(f"the request has taken longer than {self.request_timeout_s:g} s"))
            self._note_end(generation, FinishReason.ABORT)

    def _submit(self, request: Request) -> None:
        self._send(Add(for_engine(request)))
        if not self.engine_status.num_pending:
            self.engine_status.progressed = time.monotonic()
        self._room.send(request.request_id, request.params.num_choices)
        self.engine_status.num_pending = self._room.num_requests

    def _settle(self, request_id: str, num_choices: int | None = None) -> None:
        """The engine has told the end of so many choices; None: of all."""
        self._room.settle(request_id, num_choices)
        self.engine_status.num_pending = self._room.num_requests

    def _note_end(self, generation: Generation, left: FinishReason) -> None:
        """`left` is the reason of those choices that have not ended."""
        timeline, reasons = generation.timeline, generation.reasons
        timeline.ended = time.monotonic()
        self.observer.ended(timeline, [reasons.get(i, left) for i in range(timeline.num_choices)])

    # ---- messages

    def _send(self, command: Command) -> None:
        assert self._process is not None
        self._process.send(command)

    async def _receive(self, process: EngineProcess) -> None:
        while True:
            try:
                await self._take(await process.receive())
            except Exception:  # nothing may end this loop: all requests would wait for ever
                log.exception("a report of the engine could not be taken in")
                self.fail(FAILED)
                process.kill()

    async def _take(self, report: Report) -> None:
        match report:
            case Step(updates, num_steps, stats):
                status, now = self.engine_status, time.monotonic()
                status.num_steps, status.stats, status.progressed = num_steps, stats, now
                for request_id, seconds in stats.waited:
                    if generation := self._open.get(request_id):
                        generation.timeline.queued_s = seconds
                await self._take_updates(updates, stats, now)
            case Refused(request_id, kind, message, param):
                self._settle(request_id)
                if generation := self._open.pop(request_id, None):
                    generation.fail(_error(kind, message, param))
            case Beat(is_busy):
                # Without a limit for steps, who watches the server must judge how long they take.
                if is_busy and self.step_timeout_s:
                    self.engine_status.progressed = time.monotonic()
            case Progress(message):
                self.engine_status.progress = message
                log.info("%s", message)
            case Ready():
                if not self._loaded.done():
                    self._loaded.set_result(report)
            case Failed(kind, message):
                self._lost(_error(kind, message))

    async def _take_updates(self, updates: Sequence[Update], stats: Stats, now: float) -> None:
        num_tokens, pauses = 0, []
        # Behind, it is better that readers get several tokens at once, later.
        is_behind = self._process is not None and self._process.has_more
        for i, update in enumerate(updates, 1):
            if i % UPDATES_AT_A_TIME == 0 and not is_behind:
                await asyncio.sleep(0)
            if update.finish_reason is not None:
                self._settle(update.request_id, 1)
            generation = self._open.get(update.request_id)
            if generation is None:  # it has ended for its reader
                continue
            if (num_new := len(update.token_ids)) and update.index not in generation.reasons:
                num_tokens += num_new
                pause = generation.timeline.add_tokens(update.index, num_new, now)
                if pause is not None:
                    pauses.append(pause)
                elif not generation.timeline.first:
                    self._note_first_token(generation.timeline, update, now)
            try:
                if generation.add(update, tell=not is_behind):
                    self._send(Stop(update.request_id, update.index))
            except Exception as error:
                self._spoil(generation, error)
            if generation.ended:
                self._close(generation)
            elif is_behind:
                self._untold.add(generation)
        self.observer.stepped(stats, num_tokens, pauses)
        while self._untold and not is_behind:
            generation = self._untold.pop()
            try:
                generation.tell()
            except Exception as error:
                self._spoil(generation, error)
                self._close(generation)

    def _spoil(self, generation: Generation, error: Exception) -> None:
        """A request's own data fails that request only."""
        log.error("the output of a request could not be put together", exc_info=error)
        generation.fail(HexError("the output could not be put together; the server's log tells more"))
        self._send(Abort(generation.collector.request.request_id))

    def _close(self, generation: Generation) -> None:
        if self._open.pop(generation.collector.request.request_id, None) is not None:
            self._note_end(generation, FinishReason.ERROR)

    def _note_first_token(self, timeline: Timeline, update: Update, now: float) -> None:
        timeline.first, timeline.num_cached = now, update.num_cached
        self.observer.got_first_token(timeline)


def _error(kind: str, message: str, param: str | None = None) -> HexError:
    """What the engine raised; errors that are none of ours are told by their class."""
    if kind == InvalidRequest.__name__:
        return InvalidRequest(message, param)
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, HexError):
        return known(message)
    return ModelError(f"the engine failed: {kind}: {message}")


def tokenizer_of(config: EngineConfig) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    path = fetch_for(config, config.tokenizer or config.model, tokenizer_only=True)
    return open_tokenizer(path, config.tokenizer_mode)
