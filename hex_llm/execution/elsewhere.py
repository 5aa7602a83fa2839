"""A runner whose devices another process has: it tells that process every call (leading.py), which carries it
out in order, and gives what steps choose and what is asked for back, in order too."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import msgspec
import numpy as np
import numpy.typing as npt

from hex_llm.errors import EngineStopped, HexError
from hex_llm.execution.adapters import HostAdapter
from hex_llm.execution.batch import Ints, Paddings, StepShape
from hex_llm.execution.leading import Call, Finish, Launch, Place, Score, Write, carry_out
from hex_llm.execution.messages import Address, Answer, Loaded, Tensor, Told, Warm
from hex_llm.execution.moving import Post
from hex_llm.execution.profile import Recorder
from hex_llm.execution.runner import CompiledLate, Runner
from hex_llm.execution.step_runner import Launched, StepRunner
from hex_llm.models.adapters import Slots
from hex_llm.types import TokenLogprobs

log = logging.getLogger(__name__)

LISTEN_S = 0.5  # at a time, for an answer
GONE = "the devices that worked at this request are gone"
MAX_OPEN = 2  # steps that are in flight at a time, or read


# ---- what the process is told, besides leading.Call


class Take(msgspec.Struct, tag=True, array_like=True):
    """What blocks hold is sent to another group."""

    parcel: int
    to: Address
    blocks: list[int]


class Put(msgspec.Struct, tag=True, array_like=True):
    """A parcel that has come, into blocks."""

    parcel: int
    blocks: list[int]


class Drop(msgspec.Struct, tag=True, array_like=True):
    parcel: int


class States(msgspec.Struct, tag=True, array_like=True):
    """Those of one of the last steps are asked for."""

    step: int


_CALLS = msgspec.msgpack.Decoder(Call | Take | Put | Drop | States)


class Line(Protocol):
    """To the process."""

    @property
    def is_running(self) -> bool: ...

    @property
    def error(self) -> HexError:
        """Why it is not."""

    @property
    def warm(self) -> Warm | None: ...

    def tell(self, frame: bytes) -> None: ...

    def listen(self, timeout_s: float) -> None:
        """Takes in what has come; waits for it, if nothing has."""


class Coming:
    """An answer, as a jax.Array that is being computed."""

    answer: Answer | None = None

    def __init__(self, line: Line) -> None:
        self._line, self.asked_at = line, time.monotonic()

    def is_ready(self) -> bool:
        return self.answer is not None

    def copy_to_host_async(self) -> None:
        """It comes by itself."""

    def awaited(self) -> Answer:
        while self.answer is None:
            if not self._line.is_running:
                raise EngineStopped(GONE)
            self._line.listen(LISTEN_S)
        if self.answer.late:
            raise CompiledLate(self.answer.late)
        return self.answer

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        array = self.awaited().array
        assert array is not None
        return array.array()


class RemoteRunner(StepRunner):
    def __init__(self, like: Runner, loaded: Loaded, line: Line) -> None:
        """`like`: one that holds the same model on devices of this process."""
        paddings = Paddings(like.config, loaded.limits, like.paddings.max_len, loaded.max_single)
        super().__init__(like.spec, paddings, Recorder(None), bool(like.adapters))
        self._kv_dtype, self._line = like.kv_dtype, line
        self._asked: deque[Coming] = deque()
        self._num_launched = 0

    @property
    def kv_dtype(self) -> str:
        return self._kv_dtype

    def fits(self, loaded: Loaded) -> bool:
        """Whether another process of the group can go on where this one has ended."""
        return (loaded.limits, loaded.max_single) == (self.paddings.limits, self.paddings.max_single)

    @property
    def waiting_s(self) -> float:
        """How long the oldest question has been without an answer."""
        return time.monotonic() - self._asked[0].asked_at if self._asked else 0.0

    def begin_anew(self) -> None:
        """The process is another one."""
        self._asked.clear()
        self._num_launched = 0

    def take_in(self, answer: Answer) -> None:
        """To the oldest question."""
        self._asked.popleft().answer = answer
        self.num_late_compiles = max(self.num_late_compiles, answer.num_late_compiles)

    def tell(self, call: Call | Take | Put | Drop | States) -> None:
        if self.is_up:
            self._line.tell(msgspec.msgpack.encode(call))

    def _ask(self, call: Launch | Finish | Score | States) -> Coming:
        coming = Coming(self._line)
        self._asked.append(coming)
        self.tell(call)
        return coming

    def launch(self, shape: StepShape, packed: Ints, num_rows: int) -> Launched:
        self._num_launched += 1
        choices = self._ask(Launch(shape, Tensor.of(packed), num_rows))
        return Launched(choices, StatesElsewhere(self, self._num_launched))

    def states_of(self, step: int) -> npt.NDArray[Any]:
        return np.asarray(self._ask(States(step)))

    def finish(self, states: npt.NDArray[Any], adapters: Ints) -> npt.NDArray[Any]:
        return np.asarray(self._ask(Finish(Tensor.of(states), Tensor.of(adapters))))

    def logprobs_of(
        self, hidden: npt.NDArray[Any], following: Ints, num_top: int, adapter: int = 0
    ) -> list[TokenLogprobs]:
        asked = self._ask(Score(Tensor.of(hidden), Tensor.of(following), num_top, adapter))
        return asked.awaited().logprobs or []

    def write_slots(self, records: Sequence[tuple[int, Ints]]) -> None:
        super().write_slots(records)
        if records:
            self.tell(Write.of("all", records))

    def write_allowed(self, words: Sequence[tuple[int, Ints]]) -> None:
        if words:
            self.tell(Write.of("allowed", words))

    def stage(self, adapter: HostAdapter) -> Slots:
        return {}  # the process does it

    def write_adapter(self, slot: int, adapter: HostAdapter, staged: Slots) -> None:
        self.tell(Place.of(slot, adapter))

    def warm_up(self, progress: bool = False, meet: Callable[[], object] = tuple) -> dict[int, float]:
        """The process does it by itself, as soon as it has loaded."""
        while self._line.warm is None:
            if not self._line.is_running:
                raise self._line.error
            self._line.listen(LISTEN_S)
        return self._line.warm.seconds


class StatesElsewhere:
    """The tokens as a step left them: fetched by who looks at them, which few do."""

    def __init__(self, runner: RemoteRunner, step: int) -> None:
        self._runner, self._step = runner, step

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self._runner.states_of(self._step)


class CarriedOut:
    """On the side of the process: what it is told, done. `tell` may be called by any thread."""

    def __init__(self, runner: Runner, post: Post, tell: Callable[[Told], None]) -> None:
        self._runner, self._post, self._tell = runner, post, tell
        self._states: deque[tuple[int, jax.Array]] = deque(maxlen=MAX_OPEN)
        self._num_launched = 0
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._answer, name="answers", daemon=True).start()

    def obey(self, frame: bytes) -> None:
        """Returns before the devices have done it."""
        match _CALLS.decode(frame):
            case Take(parcel, to, blocks):
                self._post.send(parcel, to, self._runner.take_blocks(blocks), len(blocks))
            case Put(parcel, blocks):
                self._runner.put_blocks(blocks, self._post.take(parcel))
            case Drop(parcel):
                self._post.drop(parcel)
            case States(step):
                self._answers.put(dict(self._states)[step])
            case Launch() as call:
                self._launch(call)
            case call:
                if (answer := carry_out(self._runner, call)) is not None:
                    self._answers.put(answer)

    def _launch(self, call: Launch) -> None:
        self._num_launched += 1
        try:
            launched = carry_out(self._runner, call)
        except CompiledLate as error:
            self._answers.put(error)
            return
        assert isinstance(launched, Launched)
        launched.choices.copy_to_host_async()
        self._states.append((self._num_launched, launched.states))
        self._answers.put(launched.choices)

    def _answer(self) -> None:
        """A thread that waits for what devices compute."""
        while True:
            match self._answers.get():
                case CompiledLate() as error:
                    answer = Answer(late=str(error))
                case list() as logprobs:
                    answer = Answer(logprobs=logprobs)
                case array:
                    answer = Answer(Tensor.of(self._computed(array)))
            answer.num_late_compiles = self._runner.num_late_compiles
            self._tell(answer)

    def _computed(self, array: jax.Array) -> npt.NDArray[Any]:
        try:
            return np.asarray(array)
        except Exception:  # whoever asked would wait for ever
            log.exception("the devices failed: the process ends")
            os._exit(1)
