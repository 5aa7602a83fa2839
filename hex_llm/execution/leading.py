"""One replica's runners on several hosts: the leader's tells the others of every call that it gets, and they
do the same. What of it reaches the host (tokens) only the leader reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from hex_llm.execution.adapters import HostAdapter
from hex_llm.execution.batch import Ints, StepShape
from hex_llm.execution.messages import Tensor
from hex_llm.execution.runner import Runner
from hex_llm.execution.step_runner import Launched
from hex_llm.models.adapters import SlotMatrices, Slots
from hex_llm.types import TokenLogprobs


class Launch(msgspec.Struct, tag=True, array_like=True):
    shape: StepShape
    packed: Tensor
    num_rows: int


class Write(msgspec.Struct, tag=True, array_like=True):
    columns: Literal["all", "allowed"]
    slots: list[int]
    rows: Tensor

    @classmethod
    def of(cls, columns: Literal["all", "allowed"], rows: Sequence[tuple[int, Ints]]) -> Write:
        slots, values = zip(*rows, strict=True)
        return cls(columns, list(slots), Tensor.of(np.stack(values)))


class Finish(msgspec.Struct, tag=True, array_like=True):
    states: Tensor
    adapters: Tensor


class Score(msgspec.Struct, tag=True, array_like=True):
    hidden: Tensor
    following: Tensor
    num_top: int
    adapter: int


class Place(msgspec.Struct, tag=True, array_like=True):
    slot: int
    digest: str
    matrices: dict[str, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, slot: int, adapter: HostAdapter) -> Place:
        matrices = {path: (Tensor.of(m.down), Tensor.of(m.up)) for path, m in adapter.matrices.items()}
        return cls(slot, adapter.digest, matrices)


Call = Launch | Write | Finish | Score | Place
_DECODER = msgspec.msgpack.Decoder(Call)


class LeadingRunner(Runner):
    """`tell` sends a frame to every other host."""

    def __init__(self, tell: Callable[[bytes], None], *args: Any) -> None:
        super().__init__(*args)
        self._send = tell

    def launch(self, shape: StepShape, packed: Ints, num_rows: int) -> Launched:
        self._tell(Launch(shape, Tensor.of(packed), num_rows))
        return super().launch(shape, packed, num_rows)

    def write_slots(self, records: Sequence[tuple[int, Ints]]) -> None:
        if records:
            self._tell(Write.of("all", records))
        super().write_slots(records)

    def write_allowed(self, words: Sequence[tuple[int, Ints]]) -> None:
        if words:
            self._tell(Write.of("allowed", words))
        super().write_allowed(words)

    def finish(self, states: npt.NDArray[Any], adapters: Ints) -> npt.NDArray[Any]:
        self._tell(Finish(Tensor.of(states), Tensor.of(adapters)))
        return super().finish(states, adapters)

    def logprobs_of(
        self, hidden: npt.NDArray[Any], following: Ints, num_top: int, adapter: int = 0
    ) -> list[TokenLogprobs]:
        self._tell(Score(Tensor.of(hidden), Tensor.of(following), num_top, adapter))
        return super().logprobs_of(hidden, following, num_top, adapter)

    def write_adapter(self, slot: int, adapter: HostAdapter, staged: Slots) -> None:
        self._tell(Place.of(slot, adapter))
        super().write_adapter(slot, adapter, staged)

    def _tell(self, call: Call) -> None:
        self._send(msgspec.msgpack.encode(call))


def follow(runner: Runner, frame: bytes) -> None:
    """Does what the leader's runner does."""
    carry_out(runner, _DECODER.decode(frame))


def carry_out(runner: Runner, call: Call) -> Launched | npt.NDArray[Any] | list[TokenLogprobs] | None:
    """What it gives, where that is anything."""
    match call:
        case Launch(shape, packed, num_rows):
            return runner.launch(shape, packed.array(), num_rows)
        case Write(columns, slots, rows):
            write = runner.write_slots if columns == "all" else runner.write_allowed
            write(list(zip(slots, rows.array(), strict=True)))
        case Finish(states, adapters):
            return runner.finish(states.array(), adapters.array())
        case Score(hidden, following, num_top, adapter):
            return runner.logprobs_of(hidden.array(), following.array(), num_top, adapter)
        case Place(slot, digest, matrices):
            parts = {path: SlotMatrices(down.array(), up.array()) for path, (down, up) in matrices.items()}
            held = HostAdapter(digest, parts)
            runner.write_adapter(slot, held, runner.stage(held))
    return None
