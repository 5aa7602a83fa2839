"""What the loader needs of a checkpoint, whatever its format: named tensors, read slice by slice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

Slices = tuple[slice, ...]  # one per axis, step 1


def bounded(index: Slices, shape: tuple[int, ...]) -> Slices:
    """The same cuts with a start and a stop."""
    return tuple(slice(*cut.indices(size)[:2]) for cut, size in zip(index, shape, strict=True))


class Tensor(Protocol):
    """A tensor that lies in a file; nothing is read before `read`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, index: Slices, integers: np.dtype[Any] | None = None) -> np.ndarray[Any, Any]:
        """The values at `index`, in a fresh array: floats of any width, or those `integers`. ModelError: it
        holds something else, or its file was cut short."""
        ...


Checkpoint = Mapping[str, Tensor]  # keyed by the names of Hugging Face checkpoints


def text_name(name: str) -> str:
    """Of a model with vision, a tensor's or module's name as it was when the text half was a whole model."""
    if name.partition(".")[0] == "lm_head":
        return f"language_model.{name}"
    return name.replace("model.language_model", "language_model.model", 1)
