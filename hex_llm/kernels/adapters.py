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
