"""What the parts of a quantized matrix stand for."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from hex_llm.weights.checkpoint import Slices
from hex_llm.weights.grouped import Part, form_of


def assert_parts_give_the_same(tensor: Any, index: Slices, group: int) -> None:
    """As `tensor.read(index)` gives, but for rounding; the cut begins and ends at groups of this size."""
    form = form_of(tensor)
    assert form is not None
    assert form.group % group == 0
    rows, columns = (slice(*cut.indices(size)[:2]) for cut, size in zip(index, tensor.shape, strict=True))
    codes = Part(tensor, "codes", 1).read((rows, columns))
    assert codes.dtype == form.dtype
    assert form.bits == 8 or codes.max(initial=0) < 16
    groups = slice(columns.start // group, columns.stop // group)

    def of_each(part: Any) -> np.ndarray:
        read = Part(tensor, part, group).read((rows, groups))
        assert read.dtype == np.float32
        return read.astype(np.float64).repeat(group, axis=1)

    codes = 2 * codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) if form.is_e2m1 else codes
    values = (codes.astype(np.float64) - form.zero) * of_each("scales")
    if form.has_offsets:
        values += of_each("offsets")
    expected = tensor.read((rows, columns))
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=2e-6 * np.abs(expected).max(initial=0))
