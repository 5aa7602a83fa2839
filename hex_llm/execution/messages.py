"""What processes of one replica tell each other of its groups (elsewhere.py). No jax: who waits for another
process to come has not loaded it yet."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from hex_llm.parallel.links import Keys
from hex_llm.scheduling.limits import StepLimits
from hex_llm.types import TokenLogprobs


class Tensor(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Tensor:
        return cls(array.dtype.name, array.shape, array.tobytes())

    def array(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.data, np.dtype(self.dtype)).reshape(self.shape)


class MoveKeys(msgspec.Struct, array_like=True):
    """Of who takes in, and of who sends."""

    inlet: Keys
    outlet: Keys

    @classmethod
    def make(cls) -> MoveKeys:
        return cls(zmq.curve_keypair(), zmq.curve_keypair())


class Address(msgspec.Struct, array_like=True, frozen=True):
    group: int
    url: str


class Joining(msgspec.Struct, array_like=True):
    """What a group is told after protocol.Start."""

    group: int
    keys: MoveKeys
    num_blocks: int | None = None  # that the process before it had


# ---- what a group's process tells


class Loaded(msgspec.Struct, tag=True):
    """All that is known of it before its first step."""

    facts: dict[str, str]  # that must be the same everywhere
    limits: StepLimits
    max_single: int
    num_blocks: int
    url: str  # where parcels are sent to


class Warm(msgspec.Struct, tag=True):
    """How long its steps take, if they were measured: from now on it is as fast as can be."""

    seconds: dict[int, float]


class Answer(msgspec.Struct, tag=True):
    array: Tensor | None = None
    logprobs: list[TokenLogprobs] | None = None
    late: str = ""  # what was not compiled
    num_late_compiles: int = 0


class Came(msgspec.Struct, tag=True):
    parcel: int
    is_whole: bool  # False: it never will


Told = Loaded | Warm | Answer | Came
