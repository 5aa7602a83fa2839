"""What adapters add to a product: one signature for all platforms, chosen once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jax import Array

from hex_llm.kernels.experts import Activation


class Fused(NamedTuple):
    """How the modules of a matrix share its outputs: one after another along one axis."""

    axis: int = 0
    starts: tuple[int, ...] = ()  # of the second and later ones

    @property
    def num_modules(self) -> int:
        return 1 + len(self.starts)

    def range_of(self, module: int, size: int) -> tuple[int, int]:
        ends = (0, *self.starts, size)
        return ends[module], ends[module + 1]


class Tiles(NamedTuple):
    """A step's rows in tiles, each of which has rows of one slot."""

    slots: Array  # int32 [N] counted from 1; 0: none
    rows: Array  # int32 [N, R]; what fills up is T


class Owners(NamedTuple):
    """Whose adapters a step's rows have."""

    which: Array  # int32 [T] slots, counted from 1; 0: none
    tiles: Tiles | None = None  # for kernels that ask for them


class Ranked(NamedTuple):
    """What a matrix multiplies, and what the first factors of its adapters make of it."""

    x: Array  # [T, inputs]
    ranks: Array  # [splits, T, ranks], as of `Pending`


class AddAdapters(Protocol):
    def __call__(
        self,
        out: Array,  # [T, *outputs]
        x: Any,  # [T, inputs], or Ranked
        down: Array,  # [slots, modules * ranks, inputs]
        up: Array,  # [*outputs, slots, ranks]
        fused: Fused,
        owners: Owners,
        activation: Activation | None = None,
        following: Array | None = None,  # [slots, ranks, F] first factors of the matrix that is next
    ) -> Array | Ranked:
        """`out` and what each row's own adapter adds; with an activation, outputs [F, 2] become [F], and may
        be ranked for the following."""
        ...


class Pending(NamedTuple):
    """What adapters have yet to add to a product: a kernel that reads it next does so on its way."""

    ranks: Array  # float32 [splits, T, modules * ranks]: of each row's own slot, to be summed over splits
    up: Array  # [*outputs, slots, ranks]
    fused: Fused
    owners: Owners


class BeginAdapters(Protocol):
    def __call__(self, x: Array, down: Array, up: Array, fused: Fused, owners: Owners) -> Pending: ...


class JoinAdapters(Protocol):
    def __call__(
        self,
        around: Array,  # [T, D]
        out: Array,  # [T, D]: the base's product
        x: Any,  # [T, inputs], or Ranked
        down: Array,  # [slots, ranks, inputs]
        up: Array,  # [D, slots, ranks]
        owners: Owners,
        norm: Norm,
    ) -> tuple[Array, Array | None]:
        """`around`, `out` and what adapters add; and that normed, if it was made on the way."""
        ...


class Norm(NamedTuple):
    """By the root of the mean square."""

    weight: Array  # [D]
    eps: float
    offset: float  # is added to the weight


class AdapterKernels(NamedTuple):
    """What a platform has for it. None: it has none."""

    add: AddAdapters
    begin: BeginAdapters | None = None
    join: JoinAdapters | None = None
    tiles: Callable[[Array, int], Tiles | None] | None = None  # of `which` and the number of slots
    slots_first: bool = False  # `up` is [slots, *outputs, ranks] to all of them
