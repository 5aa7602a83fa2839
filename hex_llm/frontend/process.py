"""An engine's process, for its front end: started, spoken to, watched, and ended with its children. One that
dies after it was ready, or is ended because it is stuck, is replaced, a few times.

Knows nothing of requests. Lives in one event loop. No jax.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from hex_llm.errors import EngineStopped, HexError, ModelError
from hex_llm.frontend.link import EngineLink
from hex_llm.ipc import protocol
from hex_llm.ipc.children import environment, kill_family, private_folder
from hex_llm.ipc.protocol import Ready, Report
from hex_llm.ipc.pulse import Watch
from hex_llm.ipc.stats import EngineState

if TYPE_CHECKING:
    from hex_llm.frontend.replica import Replica

log = logging.getLogger(__name__)

TICK_S = 0.5  # between two looks at a process
# What it may be silent for before it is loaded: libraries of gigabytes are imported with the GIL held.
LOADING_S = 60.0
END_S = 5  # what an idle engine gets to end by itself
KILL_S = 5  # what the system gets to end a killed process
MAX_RESTARTS = 3  # one after another, of engines that then do not serve for STEADY_S
STEADY_S = 30
PAUSE_S = 1.0  # before the second restart; twice as long before the third
STARTING = (EngineState.LOADING, EngineState.RESTARTING)
ALIVE = (EngineState.SERVING, EngineState.DRAINING, *STARTING)


class EngineProcess:
    """`receive` must be called again and again: the reports of a process are its signs of life."""

    def __init__(self) -> None:
        self.is_loaded = self.is_ending = False
        self._silent_s = 0.0
        self._step_s = 0.0  # that it has been at its present step
        self._process: asyncio.subprocess.Process | None = None
        self._at_end = ExitStack()
        self.folder = private_folder()
        self._at_end.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.link = EngineLink(self.folder)
        self._at_end.callback(self.link.close)

    async def start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """`variables` of its environment, besides ours."""
        self._process = await asyncio.create_subprocess_exec(
            *command,
            str(self.folder),
            stdin=asyncio.subprocess.PIPE,  # closed by our death, which the worker notices
            start_new_session=True,  # Ctrl-C in a terminal is for us alone
            env=environment(variables),
        )

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started yet"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def receive(self) -> Report:
        """Its next report."""
        report = await self.link.receive()
        self._silent_s = 0.0
        if isinstance(report, protocol.Beat):
            self._step_s = report.step_s
        self.is_loaded |= isinstance(report, Ready)
        return report

    # ---- life and death

    async def ended(self, stuck_s: float, step_s: float) -> str:
        """How it ended, in words. One that is silent for `stuck_s`, or longer than `step_s` (0: any) at one
        step, is killed, and not waited for."""
        assert self._process is not None
        ending, watch = asyncio.ensure_future(self._process.wait()), Watch(TICK_S)
        while not (await asyncio.wait((ending,), timeout=TICK_S))[0]:
            passed = watch.look()
            if self.is_ending:
                continue
            self._silent_s = 0.0 if self.link.has_more else self._silent_s + passed
            if trouble := self._trouble(stuck_s, step_s):
                self.kill()
                return f"{trouble}, and was killed"
        code = ending.result()
        return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with the exit code {code}"

    def _trouble(self, stuck_s: float, step_s: float) -> str:
        if self._silent_s > (stuck_s if self.is_loaded else max(stuck_s, LOADING_S)):
            return f"has shown no sign of life for {self._silent_s:.0f} s (--stuck_timeout)"
        if step_s and self._step_s > step_s:
            return f"has been at one step for {self._step_s:.0f} s (--step_timeout)"
        return ""

    def kill(self) -> None:
        if self.is_running:
            kill_family(self.pid)

    async def end(self, timeout_s: float) -> None:
        """After its present step or, if that or loading takes longer than `timeout_s`, at once."""
        self.is_ending = True
        try:
            if self._process is not None:
                if self.is_running:
                    self.link.send(protocol.Shutdown())
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), timeout_s if self.is_loaded else 0)
                self.kill()
                await asyncio.wait_for(self._process.wait(), KILL_S)
        finally:
            self._at_end.close()


class Supervisor:
    """Keeps a replica's process running."""

    process: EngineProcess | None = None

    def __init__(self, owner: Replica, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._owner = owner
        self._command, self._variables = command, variables
        self._settings = owner.client
        self._status = owner.status
        self._num_restarts = 0  # since the engine has served for long
        self._serving_since = 0.0
        self._serving: EngineProcess | None = None  # the last that was ready
        self._receiver: asyncio.Task[None] | None = None
        self._watchers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Returns when the engine serves; raises why it could not be loaded, and nothing is left then."""
        self._loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._status.progress = "starting"
        self.process = process = EngineProcess()
        self._owner.link = process.link
        try:
            await process.start(self._command, self._variables)
            self._receiver = asyncio.create_task(self._receive(process))
            watcher = asyncio.create_task(self._watch(process))
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)
            level = logging.getLogger("hex_llm").getEffectiveLevel()
            told = self._settings
            is_again = self._serving is not None
            process.link.send(protocol.Start(told.config, level, told.log_format, told.num_fronts, is_again))
            await self._owner.adopt(await self._loaded)
            if self._status.state not in STARTING:
                raise EngineStopped(self._status.state.value)
            self._status.state, self._status.progress = EngineState.SERVING, ""
            self._serving, self._serving_since = process, time.monotonic()
        except BaseException:
            await self._release(0)
            raise

    async def stop(self, timeout_s: float) -> None:
        """After its present step or, if that or loading takes longer, at once."""
        watchers = [*self._watchers]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await self._release(timeout_s)

    async def restart(self) -> None:
        """On purpose, once its requests have ended: it gets no more of them from now on."""
        self._status.state = EngineState.DRAINING
        await self._owner.emptied()
        if self._status.state is EngineState.DRAINING:  # else it has died, and is being replaced already
            await self._release(END_S)
            self._owner.fail(EngineState.FAILED)
            self._num_restarts = 0
            await self._restart()
        while self._status.state in (EngineState.FAILED, EngineState.RESTARTING):
            await asyncio.sleep(TICK_S)

    async def _release(self, timeout_s: float) -> None:
        """The process, if there is one."""
        if self._receiver is not None:
            self._receiver.cancel()
        if self.process is not None:
            await self.process.end(timeout_s)

    async def _watch(self, process: EngineProcess) -> None:
        how = await process.ended(self._settings.stuck_timeout_s, self._settings.step_timeout_s)
        await asyncio.sleep(0.1)  # what it said last may still be on its way, and tells more
        if process.is_ending:  # we are done with it
            return
        self._lose(ModelError(f"the engine's process {how}"))
        if process is self._serving:
            await self._restart()

    async def _restart(self) -> None:
        """A new process for one that has ended; again, if that does not come to serve."""
        if time.monotonic() - self._serving_since > STEADY_S:
            self._num_restarts = 0
        while self._status.state is EngineState.FAILED:
            if self._num_restarts == MAX_RESTARTS:
                log.critical(EngineState.GIVEN_UP.value)
                self._owner.fail(EngineState.GIVEN_UP)
                return
            log.warning("starting the engine again")
            self._status.state = EngineState.RESTARTING
            self._num_restarts += 1
            try:
                await self._release(0)
                await asyncio.sleep((self._num_restarts - 1) * PAUSE_S)
                await self.start()
                log.info("the engine is ready again")
            except Exception as error:  # also of the system, which may lack memory, processes or space
                log.error("the engine could not be started again: %s", error)
                if self._status.state is EngineState.RESTARTING:
                    self._status.state = EngineState.FAILED

    def _lose(self, error: HexError) -> None:
        """The engine will not answer any more; the first reason counts.

        An unforeseen error's message is for who starts the server, not for its clients.
        """
        if self._status.state not in ALIVE:
            return
        if self._loaded.done():
            log.error("%s", error)
        else:
            self._loaded.set_exception(error)
        # An engine that ends by itself follows one on another host, which has ended.
        ended = isinstance(error, EngineStopped)
        self._owner.fail(EngineState.SHUTTING_DOWN if ended else EngineState.FAILED)

    async def _receive(self, process: EngineProcess) -> None:
        while True:
            try:
                await self._take(await process.receive())
            except Exception:  # nothing may end this loop: all requests would wait for ever
                log.exception("a report of the engine could not be taken in")
                self._owner.fail(EngineState.FAILED)
                process.kill()

    async def _take(self, report: Report) -> None:
        match report:
            case protocol.Progress(message):
                self._status.progress = message
                log.info("%s", message)
            case Ready():
                if not self._loaded.done():
                    self._loaded.set_result(report)
            case protocol.Failed(kind, message):
                self._lose(protocol.error_of(kind, message))
            case _:
                await self._owner.take(report)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
