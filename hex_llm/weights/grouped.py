"""Quantized matrices in the one form that products take: codes, and for groups of inputs scales and offsets.

A weight is (code - zero) * scale + offset. Whatever a file holds is brought into it while it is read; what
cannot be is read as floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from hex_llm.weights.checkpoint import Slices

Array = np.ndarray[Any, Any]


class Form(NamedTuple):
    bits: int  # 4: codes are 0 to 15; 8: -128 to 127
    group: int  # so many inputs share a scale and an offset
    zero: int = 0
    has_offsets: bool = False
    is_float: bool = False  # codes are float8_e4m3fn, and all inputs of an output share its scale

    @property
    def dtype(self) -> np.dtype[Any]:
        if self.is_float:
            return np.dtype(ml_dtypes.float8_e4m3fn)
        return np.dtype(np.uint8 if self.bits == 4 else np.int8)


class GroupedTensor(Protocol):
    """A matrix [outputs, inputs]; also a checkpoint.Tensor, whose `read` gives floats."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def form(self) -> Form | None:
        """None: it is read as floats only."""
        ...

    def read_codes(self, index: Slices) -> Array: ...

    def read_scales(self, rows: slice, inputs: Array) -> Array:
        """[rows, inputs] float32: of the groups of these inputs."""
        ...

    def read_offsets(self, rows: slice, inputs: Array) -> Array: ...


def form_of(tensor: object) -> Form | None:
    form: Form | None = getattr(tensor, "form", None)
    return form


PartName = Literal["codes", "scales", "offsets"]


@dataclass(frozen=True)
class Part:
    """One of the arrays that a quantized matrix is made of, as a checkpoint.Tensor."""

    tensor: GroupedTensor
    name: PartName
    group: int  # of inputs; may be finer than the tensor's own

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.tensor.shape
        return outputs, inputs if self.name == "codes" else inputs // self.group

    def read(self, index: Slices, integers: np.dtype[Any] | None = None) -> Array:
        if self.name == "codes":
            return self.tensor.read_codes(index)
        rows, columns = (slice(*cut.indices(size)[:2]) for cut, size in zip(index, self.shape, strict=True))
        inputs = np.arange(columns.start, columns.stop) * self.group
        read = self.tensor.read_scales if self.name == "scales" else self.tensor.read_offsets
        return read(rows, inputs)
