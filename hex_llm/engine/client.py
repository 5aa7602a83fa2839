"""The front end's side of an engine process: starts it, submits requests, puts their outputs together.

Lives in one event loop. Text is made here, so that the engine's process only steps. Every request gets one
end: its output, an InvalidRequest or QueueFull, or EngineStopped. No jax.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import zmq
import zmq.asyncio

from hex_llm import errors
from hex_llm.config import EngineConfig
from hex_llm.engine.admission import Limits, make_request
from hex_llm.engine.outputs import Delta, OutputCollector, for_engine
from hex_llm.engine.protocol import (
    MAX_COMMAND,
    MAX_REPORT,
    Abort,
    Add,
    Command,
    Failed,
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
from hex_llm.errors import ConfigError, EngineStopped, HexError, InvalidRequest, ModelError
from hex_llm.sampling_params import SamplingParams
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import RequestOutput, Update
from hex_llm.weights.model_files import open_tokenizer
from hex_llm.weights.source import fetch_for

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "hex_llm.engine.worker")
LOADING = "the model is being loaded"
FAILED = "the engine has failed; the server must be restarted"
MAX_PATH = 107  # bytes of a Unix socket's name
KILL_S = 5  # what the system gets to end a killed process


class Generation:
    """One request under way: an async iterator of what is new, as small as it is read soon."""

    def __init__(self, collector: OutputCollector) -> None:
        self.collector = collector
        self._error: HexError | None = None
        self._news = asyncio.Event()
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
        while True:
            await self._news.wait()
            self._news.clear()
            ended = self.ended  # what comes while the deltas are read makes news again
            for delta in self.collector.deltas():
                yield delta
            if ended:
                break
        if self._error is not None:
            raise self._error

    def add(self, update: Update) -> bool:
        """As OutputCollector.add."""
        must_stop = self.collector.add(update)
        self._news.set()
        if self.collector.finished:
            self._end.set()
        return must_stop

    def fail(self, error: HexError) -> None:
        if not self.ended:
            self._error = error
            self._news.set()
            self._end.set()


class EngineClient:
    """An engine in a process of its own. `limits` and `tokenizer` are known once it is ready."""

    limits: Limits | None = None
    tokenizer: Tokenizer | None = None

    def __init__(self, config: EngineConfig, model_name: str = "", command: Sequence[str] = WORKER) -> None:
        self.config = config
        self.model_name = model_name
        self.num_steps = 0  # that the engine has told of
        self._command = command
        self._failure: str | None = LOADING
        self._open: dict[str, Generation] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._at_end = ExitStack()

    @property
    def ready(self) -> bool:
        return self._failure is None

    @property
    def max_len(self) -> int:
        assert self.limits is not None, "not loaded yet"
        return self.limits.max_len

    # ---- the process

    async def start(self) -> None:
        """Returns when the engine is ready; raises why it could not be loaded."""
        self._loaded: asyncio.Future[Limits] = asyncio.get_running_loop().create_future()
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
        for work in (self._receive(), self._watch(self._process)):
            self._at_end.callback(asyncio.create_task(work).cancel)
        self._send(Start(self.config, logging.getLogger("hex_llm").getEffectiveLevel()))
        self.limits = await self._loaded
        # Now: the engine has fetched the files, and two must not do so at the same time.
        self.tokenizer = await asyncio.to_thread(tokenizer_of, self.config)
        if self._failure != LOADING:
            raise EngineStopped(str(self._failure))
        self._failure = None

    async def stop(self, timeout_s: float) -> None:
        """Ends the process: after its present step or, if that or loading takes longer, at once."""
        self.fail("the engine was stopped")
        if self._process is not None:
            self._send(Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), timeout_s if self.limits is not None else 0)
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

    def _lost(self, error: HexError) -> None:
        """The engine will not answer any more; the first reason counts.

        An unforeseen error's message is for who starts the server, not for its clients.
        """
        if self._failure not in (None, LOADING):
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
        # Long prompts take long to be cut into tokens and to be checked.
        collector = await asyncio.to_thread(self._prepare, prompt, params, priority, cache_salt)
        self._check_ready()
        request_id = collector.request.request_id
        generation = self._open[request_id] = Generation(collector)
        try:
            self._send(Add(for_engine(collector.request)))
            yield generation
        finally:
            if self._open.pop(request_id, None) is not None:
                self._send(Abort(request_id))

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
        return await asyncio.to_thread(generation.output)

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

    # ---- messages

    def _send(self, command: Command) -> None:
        frame = encode(command)
        if len(frame) > MAX_COMMAND:
            raise InvalidRequest(f"the request takes {len(frame)} bytes, more than {MAX_COMMAND}")
        self._outbox.send(frame)

    async def _receive(self) -> None:
        while True:
            report = self._reader.decode(await self._inbox.recv())
            if report is not None:
                try:
                    self._take(report)
                except Exception:  # nothing may end this loop: all requests would wait for ever
                    log.exception("a report of the engine could not be taken in")
                    self.fail(FAILED)

    def _take(self, report: Report) -> None:
        match report:
            case Step(updates, num_steps):
                self.num_steps = num_steps
                for update in updates:
                    self._update(update)
            case Refused(request_id, kind, message, param):
                if generation := self._open.pop(request_id, None):
                    generation.fail(_error(kind, message, param))
            case Ready(limits):
                if not self._loaded.done():
                    self._loaded.set_result(limits)
            case Failed(kind, message):
                self._lost(_error(kind, message))

    def _update(self, update: Update) -> None:
        generation = self._open.get(update.request_id)
        if generation is None:  # it has ended for its reader
            return
        try:
            if generation.add(update):
                self._send(Stop(update.request_id, update.index))
        except Exception:  # a request's own data fails that request only
            log.exception("the output of a request could not be put together")
            generation.fail(HexError("the output could not be put together; the server's log tells more"))
            self._send(Abort(update.request_id))
        if generation.ended:
            del self._open[update.request_id]


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
