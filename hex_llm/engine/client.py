"""The front end's side of an engine process: starts it, submits requests, puts their outputs together.

Lives in one event loop. Text is made here, so that the engine's process only steps. Every request gets one
end: its output, an InvalidRequest, QueueFull, TimedOut or EngineStopped. A process that dies after it was
ready is started again, a few times. No jax.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import zmq
import zmq.asyncio

from hex_llm import errors
from hex_llm.config import EngineConfig
from hex_llm.engine.admission import Limits, make_request
from hex_llm.engine.beside import decoded, read
from hex_llm.engine.generation import Generation
from hex_llm.engine.outputs import OutputCollector, for_engine
from hex_llm.engine.protocol import (
    LARGE_REPORT,
    MAX_COMMAND,
    MAX_REPORT,
    Abort,
    Add,
    Command,
    Failed,
    Progress,
    Reader,
    Ready,
    Refused,
    Report,
    Shutdown,
    Start,
    Step,
    Stop,
    command_address,
    encode,
    report_address,
    set_limits,
)
from hex_llm.engine.stats import Observer, Stats, Timeline, Vitals
from hex_llm.errors import ConfigError, EngineStopped, HexError, InvalidRequest, ModelError, TimedOut
from hex_llm.sampling_params import SamplingParams
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import FinishReason, Request, RequestOutput, Update
from hex_llm.weights.model_files import open_tokenizer
from hex_llm.weights.source import fetch_for

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "hex_llm.engine.worker")
LOADING = "the model is being loaded"
FAILED = "the engine has failed"
RESTARTING = "the engine has failed and is being restarted"
MAX_RESTARTS = 3  # within RESTARTS_S
RESTARTS_S = 600
UPDATES_AT_A_TIME = 32  # are taken in before their readers get a turn: the last need not wait for all others
MAX_PATH = 107  # bytes of a Unix socket's name
KILL_S = 5  # what the system gets to end a killed process


class EngineClient:
    """An engine in a process of its own. `limits` and `tokenizer` are known once it is ready.

    `observer` is told of requests; it, `log_format` and `request_timeout_s` may be set before the start.
    """

    limits: Limits | None = None
    tokenizer: Tokenizer | None = None

    def __init__(self, config: EngineConfig, model_name: str = "", command: Sequence[str] = WORKER) -> None:
        self.config = config
        self.model_name = model_name
        self.observer = Observer()
        self.log_format = "text"
        self.request_timeout_s = 0.0  # what a request may take in all; 0: any
        self.vitals = Vitals()
        self._command = command
        self._failure: str | None = LOADING
        self._open: dict[str, Generation] = {}
        self._untold: set[Generation] = set()  # whose readers do not know yet that there is news
        self._pending: dict[str, int] = {}  # choices of requests whose ends the engine has not told yet
        self._restarts: list[float] = []  # when they were
        self._watchers: set[asyncio.Task[None]] = set()
        self._process: asyncio.subprocess.Process | None = None
        self._at_end = ExitStack()

    @property
    def ready(self) -> bool:
        return self._failure is None

    @property
    def num_steps(self) -> int:
        """That the engine has told of."""
        return self.vitals.num_steps

    @property
    def max_len(self) -> int:
        assert self.limits is not None, "not loaded yet"
        return self.limits.max_len

    # ---- the process

    async def start(self) -> None:
        """Returns when the engine is ready; raises why it could not be loaded."""
        self._loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._pending.clear()
        self.vitals.num_pending, self.vitals.progress = 0, "starting"
        self._folder = private_folder()
        self._at_end.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._connect()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            str(self._folder),
            stdin=asyncio.subprocess.PIPE,  # closed by our death, which the worker notices
            start_new_session=True,  # Ctrl-C in a terminal is for us alone
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        self._at_end.callback(asyncio.create_task(self._receive()).cancel)
        watcher = asyncio.create_task(self._watch(self._process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        level = logging.getLogger("hex_llm").getEffectiveLevel()
        self._send(Start(self.config, level, self.log_format))
        ready = await self._loaded
        if self.limits is None:
            # Now: the engine has fetched the files, and two must not do so at the same time.
            self.tokenizer = await asyncio.to_thread(tokenizer_of, self.config)
        if self._failure not in (LOADING, RESTARTING):
            raise EngineStopped(str(self._failure))
        self.limits, self.vitals.memory, self.vitals.progress = ready.limits, ready.memory, ""
        self._failure = None

    async def stop(self, timeout_s: float) -> None:
        """Ends the process: after its present step or, if that or loading takes longer, at once."""
        self.fail("the engine was stopped")
        for watcher in self._watchers:
            watcher.cancel()
        if self._process is not None:
            with suppress(zmq.ZMQError):  # closed: the process has died, and its successor is not there yet
                self._send(Shutdown())
            try:
                loaded = self._loaded.done() and not self._loaded.cancelled()
                await asyncio.wait_for(self._process.wait(), timeout_s if loaded else 0)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._process.kill()
                await asyncio.wait_for(self._process.wait(), KILL_S)
            self._process = None
        self._at_end.close()

    def fail(self, reason: str) -> None:
        """Ends every request, and all that are still to come, with EngineStopped."""
        self._failure = reason
        for generation in self._open.values():
            generation.fail(EngineStopped(reason))
            self._note_end(generation, FinishReason.ERROR)
        self._open.clear()

    def _connect(self) -> None:
        self._context = zmq.Context()
        self._at_end.callback(self._context.term)  # which would wait for open sockets
        self._inbox = zmq.asyncio.Socket(self._context, zmq.PULL)
        self._outbox = zmq.Socket(self._context, zmq.PUSH)
        for each, max_frame in ((self._inbox, MAX_REPORT), (self._outbox, MAX_COMMAND)):
            set_limits(each, max_frame)
            self._at_end.callback(each.close, linger=0)
        self._inbox.bind(report_address(self._folder))
        self._outbox.connect(command_address(self._folder))
        self._reader: Reader[Report] = Reader(Report)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        await asyncio.sleep(0.1)  # what it said last may still be on its way, and tells more
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with the exit code {code}"
        self._lost(ModelError(f"the engine's process {how}"))
        if self.limits is not None and self._failure == FAILED:
            await self._restart()

    async def _restart(self) -> None:
        """A new process for one that died."""
        now = time.monotonic()
        self._restarts = [one for one in self._restarts if now - one < RESTARTS_S] + [now]
        if len(self._restarts) > MAX_RESTARTS:
            log.critical("the engine has failed too often; it is not started again")
            return
        log.warning("starting the engine again")
        self._failure = RESTARTING
        self._at_end.close()
        try:
            await self.start()
            log.info("the engine is ready again")
        except HexError as error:  # whoever watches the new process goes on from there
            log.error("the engine could not be started again: %s", error)

    def _lost(self, error: HexError) -> None:
        """The engine will not answer any more; the first reason counts.

        An unforeseen error's message is for who starts the server, not for its clients.
        """
        if self._failure not in (None, LOADING, RESTARTING):
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
        timeline = Timeline(params.num_choices, params.max_tokens)
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

    def _check_ready(self) -> None:
        if self._failure is not None:
            raise EngineStopped(self._failure)

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
        if not self._pending:
            self.vitals.progressed = time.monotonic()
        self._pending[request.request_id] = request.params.num_choices
        self.vitals.num_pending = len(self._pending)

    def _settle(self, request_id: str, num_choices: int) -> None:
        """The engine has told the end of so many choices."""
        left = self._pending.get(request_id, 0) - num_choices
        if left > 0:
            self._pending[request_id] = left
        else:
            self._pending.pop(request_id, None)
        self.vitals.num_pending = len(self._pending)

    def _note_end(self, generation: Generation, left: FinishReason) -> None:
        """`left` is the reason of those choices that have not ended."""
        timeline, reasons = generation.timeline, generation.reasons
        timeline.ended = time.monotonic()
        self.observer.ended(timeline, [reasons.get(i, left) for i in range(timeline.num_choices)])

    # ---- messages

    def _send(self, command: Command) -> None:
        frame = encode(command)
        if len(frame) > MAX_COMMAND:
            raise InvalidRequest(f"the request takes {len(frame)} bytes, more than {MAX_COMMAND}")
        self._outbox.send(frame)

    async def _receive(self) -> None:
        while True:
            frame = await self._inbox.recv()
            if len(frame) < LARGE_REPORT:
                report = self._reader.decode(frame)
            else:
                report = await decoded(partial(self._reader.decode_large, frame))
            if report is not None:
                try:
                    await self._take(report)
                except Exception:  # nothing may end this loop: all requests would wait for ever
                    log.exception("a report of the engine could not be taken in")
                    self.fail(FAILED)
                    if self._process is not None and self._process.returncode is None:
                        self._process.kill()

    async def _take(self, report: Report) -> None:
        match report:
            case Step(updates, num_steps, stats):
                now = time.monotonic()
                self.vitals.num_steps, self.vitals.stats, self.vitals.progressed = num_steps, stats, now
                for request_id, seconds in stats.waited:
                    if generation := self._open.get(request_id):
                        generation.timeline.queued_s = seconds
                await self._take_updates(updates, stats, now)
            case Refused(request_id, kind, message, param):
                self._settle(request_id, self._pending.get(request_id, 0))
                if generation := self._open.pop(request_id, None):
                    generation.fail(_error(kind, message, param))
            case Progress(message):
                self.vitals.progress = message
                log.info("%s", message)
            case Ready():
                if not self._loaded.done():
                    self._loaded.set_result(report)
            case Failed(kind, message):
                self._lost(_error(kind, message))

    async def _take_updates(self, updates: Sequence[Update], stats: Stats, now: float) -> None:
        num_tokens, pauses = 0, []
        # Behind, it is better that readers get several tokens at once, later.
        is_behind = int(self._inbox.get(zmq.EVENTS)) & zmq.POLLIN
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


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def private_folder() -> Path:
    """A new folder for sockets, which only this user can enter; short enough for the names of sockets."""
    base = tempfile.gettempdir()
    if len(os.fsencode(command_address(Path(base, "hex_llm-12345678")))) > MAX_PATH:
        base = "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix="hex_llm-", dir=base))
    except OSError as error:
        raise ConfigError(f"{base}: no folder can be made there: {error.strerror}") from error


def tokenizer_of(config: EngineConfig) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    path = fetch_for(config, config.tokenizer or config.model, tokenizer_only=True)
    return open_tokenizer(path, config.tokenizer_mode)
