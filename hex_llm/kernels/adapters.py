"""What adapters add to a product: one signature for all platforms, chosen once."""

from __future__ import annotations

from typing import NamedTuple, Protocol

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


class AddAdapters(Protocol):
    def __call__(
        self,
        out: Array,  # [T, *outputs]
        x: Array,  # [T, inputs]
        down: Array,  # [slots, modules * ranks, inputs]
        up: Array,  # [*outputs, slots, ranks]
        fused: Fused,
        which: Array,  # int32 [T] each row's slot, counted from 1; 0: none
        activation: Activation | None = None,
    ) -> Array:
        """`out` and what each row's own adapter adds; with an activation, outputs [F, 2] become [F]."""
        ...


class Pending(NamedTuple):
    """What adapters have yet to add to a product: a kernel that reads it next does so on its way."""

    ranks: Array  # float32 [splits, T, modules * ranks]: of each row's own slot, to be summed over splits
    up: Array  # [*outputs, slots, ranks]
    fused: Fused
    which: Array


class BeginAdapters(Protocol):
    def __call__(self, x: Array, down: Array, up: Array, fused: Fused, which: Array) -> Pending: ...


class JoinAdapters(Protocol):
    def __call__(
        self,
        around: Array,  # [T, D]
        out: Array,  # [T, D]: the base's product
        x: Array,  # [T, inputs]
        down: Array,  # [slots, ranks, inputs]
        up: Array,  # [D, slots, ranks]
        which: Array,
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
    slots_first: bool = False  # `up` is [slots, *outputs, ranks] to all of them
