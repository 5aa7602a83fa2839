"""--profile: a trace of an engine's first steps, for Perfetto and XProf.

Who runs steps says when one begins, when its result was read, and what the host does between; this starts the
trace with the first step and writes it after some, or when the process ends before. Knows nothing of models,
requests or shapes. Whatever goes wrong with a trace is logged, and serving goes on.
"""

from __future__ import annotations

import atexit
import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import jax

from hex_llm.errors import ConfigError

log = logging.getLogger(__name__)

NUM_STEPS = 100  # enough to see both kinds of steps settle, and a file that Perfetto opens at once
NOTHING = nullcontext()


class Recorder:
    """Records once; without a folder, and after the recording, its calls do nothing."""

    def __init__(self, folder: str | None, num_steps: int = NUM_STEPS) -> None:
        self._num_begun = self._num_read = 0
        self._num_steps = num_steps
        self._is_over = folder is None
        self._folder = _made(folder) if folder is not None else Path()

    def step(self) -> AbstractContextManager[object]:
        """Around sending a step off, shown as dispatch; the first one starts the trace."""
        if self._is_over:
            return NOTHING
        if self._num_begun == 0:
            self._start()
        self._num_begun += 1
        return jax.profiler.StepTraceAnnotation("dispatch", step_num=self._num_begun)

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Around what the host does, shown under this name."""
        return NOTHING if self._is_over else jax.profiler.TraceAnnotation(name)

    def read_step(self) -> None:
        """The result of a step was read; that of the last to be recorded ends the trace."""
        if self._is_over:
            return
        self._num_read += 1
        if self._num_read >= self._num_steps:
            self.stop()

    def stop(self) -> None:
        """Writes what was recorded."""
        if self._is_over:
            return
        self._is_over = True
        atexit.unregister(self.stop)
        try:
            jax.profiler.stop_trace()
            written = self._folder.glob("plugins/profile/*/perfetto_trace.json.gz")
            newest = max(written, key=lambda path: path.stat().st_mtime)
            log.info("--profile: %d steps are in %s, for ui.perfetto.dev", self._num_read, newest)
        except Exception:
            log.exception("--profile: the trace could not be written")

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call would be shown, and be several times slower
        try:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
            atexit.register(self.stop)
            log.info("--profile: recording %d steps", self._num_steps)
        except Exception:
            self._is_over = True
            log.exception("--profile: no trace could be started")


def _made(folder: str) -> Path:
    """At the start, not only once the model has served for a while."""
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--profile={folder}: no folder can be made there: {error.strerror}") from error
    return path
