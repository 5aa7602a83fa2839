"""What a stepper asks of who runs its steps: on devices of this process (runner.py), or of another one
(elsewhere.py). What both do alike is here: choosing a step's shape, packing it, reading what it chose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hex_llm.execution.adapters import HostAdapter
from hex_llm.execution.batch import Ints, Paddings, StepShape, pack
from hex_llm.execution.profile import Recorder
from hex_llm.execution.results import Choices
from hex_llm.execution.slots import SlotLayout
from hex_llm.models.adapters import Slots
from hex_llm.models.spec import ModelSpec
from hex_llm.types import StepPlan, TokenLogprobs


class Launched(NamedTuple):
    """What a step will bring: arrays of devices, or what stands for them (`is_ready`, `__array__`)."""

    choices: Any
    states: Any  # of all tokens, as `finish` takes them


class InFlight(NamedTuple):
    """A step that was sent off."""

    plan: StepPlan
    shape: StepShape
    choices: Any
    states: Any


class StepRunner(ABC):
    is_up = True  # False: those who run its steps are gone, for now
    is_compiling = False
    num_late_compiles = 0

    def __init__(self, spec: ModelSpec, paddings: Paddings, recorder: Recorder, has_adapters: bool) -> None:
        self.spec, self.paddings, self.config = spec, paddings, paddings.config
        self.recorder, self._has_adapters = recorder, has_adapters
        most = paddings.limits.max_decode_seqs
        self.layout = SlotLayout(most + 1, paddings.max_len, spec.vocab_size, paddings.table_width)
        self._adapters_of = [0] * self.layout.num_slots

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Sends a step off."""
        with self.recorder.step():
            shape = self.paddings.shape(plan)
            if self._has_adapters and any(self._adapters_of[chunk.slot] for chunk in plan.chunks):
                shape = shape._replace(adapted=True)
            with self.recorder.phase("pack"):
                packed = pack(plan, shape, self.config.block_size)
            launched = self.launch(shape, packed, len(plan.chunks))
            launched.choices.copy_to_host_async()
            return InFlight(plan, shape, *launched)

    def read(self, step: InFlight) -> Choices:
        """Waits for a step; one row for each of the plan's."""
        with self.recorder.phase("wait"):
            choices = np.asarray(step.choices)
        self.recorder.read_step()
        return Choices(choices[: len(step.plan.chunks)])

    def prompt_logprobs(
        self, step: InFlight, row: int, following: Ints, num_top: int, adapter: int = 0
    ) -> list[TokenLogprobs]:
        """Of the tokens that follow the first ones of a step's prefill. Rare, so the host hands pieces of
        one size to one program instead of every step carrying the work along."""
        start = sum(chunk.num_tokens for chunk in step.plan.chunks[:row])
        places = np.arange(start, start + len(following))
        hidden = self.hidden(step, places, np.full_like(places, adapter))
        return self.logprobs_of(hidden, following, num_top, adapter)

    def hidden(
        self, step: InFlight, tokens: npt.NDArray[Any], adapters: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        """The hidden states of some of a step's tokens, by the adapters in these slots."""
        return self.finish(np.asarray(step.states)[tokens], adapters.astype(np.int32))

    def write_slots(self, records: Sequence[tuple[int, Ints]]) -> None:
        """Whole rows of slots, before the next step."""
        for slot, record in records:
            self._adapters_of[slot] = self.layout.adapter_of(record)

    @property
    @abstractmethod
    def kv_dtype(self) -> str:
        """What blocks hold."""

    @abstractmethod
    def launch(self, shape: StepShape, packed: Ints, num_rows: int) -> Launched:
        """A packed step, of which so many rows are no padding."""

    @abstractmethod
    def finish(self, states: npt.NDArray[Any], adapters: Ints) -> npt.NDArray[Any]:
        """What the last feed-forward makes of tokens: steps do that for those that choose alone."""

    @abstractmethod
    def logprobs_of(
        self, hidden: npt.NDArray[Any], following: Ints, num_top: int, adapter: int = 0
    ) -> list[TokenLogprobs]:
        """Of a token behind each hidden state, by the adapter in this slot."""

    @abstractmethod
    def write_allowed(self, words: Sequence[tuple[int, Ints]]) -> None:
        """Which tokens may come next in some slots."""

    @abstractmethod
    def stage(self, adapter: HostAdapter) -> Slots:
        """On its way to the devices, for `write_adapter`; any thread may ask."""

    @abstractmethod
    def write_adapter(self, slot: int, adapter: HostAdapter, staged: Slots) -> None:
        """Into a slot, counted from 1, before the next step."""

    @abstractmethod
    def warm_up(self, progress: bool = False, meet: Callable[[], object] = tuple) -> dict[int, float]:
        """Compiles every program that can be needed, runs it, and finds out how long steps take: seconds by
        number of tokens, empty if they run op by op. `meet` is called before the first one runs."""
