"""Quantized matrices in the one form that products take: codes, and for groups of inputs scales and offsets.

A weight is (code - zero) * scale + offset. Whatever a file holds is brought into it while it is read; what
cannot be is read as floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from hex_llm.weights.checkpoint import Slices, bounded

Array = np.ndarray[Any, Any]


class Form(NamedTuple):
    bits: int  # 4: codes are 0 to 15; 8: -128 to 127
    group: int  # so many inputs share a scale and an offset
    zero: int = 0
    has_offsets: bool = False
    # Codes of 8 bits are float8_e4m3fn, and with a group of 0 all inputs of an output share its scale; of 4
    # bits they are e2m1, and what is scaled is twice the float, a whole number.
    is_float: bool = False

    @property
    def is_e2m1(self) -> bool:
        return self.is_float and self.bits == 4

    @property
    def dtype(self) -> np.dtype[Any]:
        if self.bits == 4:
            return np.dtype(np.uint8)
        return np.dtype(ml_dtypes.float8_e4m3fn if self.is_float else np.int8)


# The whole numbers that e2m1 floats are twice of.
E2M1 = 2 * np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


PartName = Literal["codes", "scales", "offsets"]


class GroupedTensor(Protocol):
    """A matrix [outputs, inputs]; also a checkpoint.Tensor, whose `read` gives floats."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def form(self) -> Form | None:
        """None: it is read as floats only."""
        ...

    def read_part(self, name: PartName, rows: slice, columns: slice, group: int) -> Array:
        """[rows, columns]: the codes (`group` is 1), or the scales or offsets in float32 of so many inputs
        each, which are no more than share one."""
        ...


def form_of(tensor: object) -> Form | None:
    form: Form | None = getattr(tensor, "form", None)
    return form


@dataclass(frozen=True)
class Part:
    """One of the arrays that a quantized matrix is made of, as a checkpoint.Tensor."""

    tensor: GroupedTensor
    name: PartName
    group: int  # of inputs: 1 for codes; may be finer than the tensor's own

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.tensor.shape
        return outputs, inputs // self.group

    def read(self, index: Slices, integers: np.dtype[Any] | None = None) -> Array:
        rows, columns = bounded(index, self.shape)
        return self.tensor.read_part(self.name, rows, columns, self.group)
