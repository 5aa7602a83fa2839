"""How values lie in GGUF files: as floats, or in blocks of codes, scales and offsets (see grouped.py).

In all block formats a weight is a code times its group's scale, and in some plus an offset. Bytes of a block
lie in the order in which they are taken apart here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from hex_llm.weights.grouped import E2M1, Form

Array = np.ndarray[Any, Any]

_AT_ONCE = 1 << 17  # values that are made of codes: the temporaries then stay in the cache


class Blocks(NamedTuple):
    """Of n blocks."""

    codes: Array  # [n, values of a block]
    scales: Array  # [n, its groups] float32
    offsets: Array | None = None


def _floats(raw: Array, count: int) -> tuple[list[Array], Array]:
    """The float16 that blocks [n, bytes] begin with, each [n, 1], and the bytes behind them."""
    numbers = np.ascontiguousarray(raw[:, : 2 * count]).view("<f2").astype(np.float32)
    return [numbers[:, i : i + 1] for i in range(count)], raw[:, 2 * count :]


def _nibbles(raw: Array, chunk: int) -> Array:
    """Of each `chunk` bytes, first all that lie below, then all above."""
    chunks = raw.reshape(len(raw), -1, 1, chunk)
    return np.concatenate([chunks & 15, chunks >> 4], axis=2).reshape(len(raw), -1)


def _bits(raw: Array) -> Array:
    return np.unpackbits(raw, axis=1, bitorder="little")


def _q4(raw: Array, num_floats: int) -> Blocks:
    """A scale, of Q4_1 and Q5_1 an offset, and 32 codes."""
    floats, rest = _floats(raw, num_floats)
    return Blocks(_nibbles(rest, 16), *floats)


def _q5(raw: Array, num_floats: int) -> Blocks:
    """The same with a fifth bit of each code before the others."""
    floats, rest = _floats(raw, num_floats)
    codes = _nibbles(rest[:, 4:], 16) | _bits(rest[:, :4]) << 4
    return Blocks(codes.view(np.int8) - np.int8(16 if num_floats == 1 else 0), *floats)


def _q8_0(raw: Array) -> Blocks:
    (scale,), rest = _floats(raw, 1)
    return Blocks(np.ascontiguousarray(rest).view(np.int8), scale)


def _mxfp4(raw: Array) -> Blocks:
    """An exponent, and floats of 4 bits."""
    return Blocks(_nibbles(raw[:, 1:], 16), np.ldexp(np.float32(0.5), raw[:, :1].astype(np.int32) - 127))


def _k_scales(raw: Array) -> tuple[Array, Array, Array]:
    """The scales and offsets [n, 8] of a K block, each of 6 bits in 12 bytes, and the bytes behind them."""
    (scale, offset), rest = _floats(raw, 2)
    low, middle, high = rest[:, 0:4], rest[:, 4:8], rest[:, 8:12]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    offsets = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    return scale * scales, -(offset * offsets), rest[:, 12:]


def _q4_k(raw: Array) -> Blocks:
    scales, offsets, rest = _k_scales(raw)
    return Blocks(_nibbles(rest, 32), scales, offsets)


def _q5_k(raw: Array) -> Blocks:
    scales, offsets, rest = _k_scales(raw)
    fifth = _bits(rest[:, :32]).reshape(-1, 32, 8).swapaxes(1, 2).reshape(-1, 256)
    return Blocks((_nibbles(rest[:, 32:], 32) | fifth << 4).view(np.int8), scales, offsets)


def _q6_k(raw: Array) -> Blocks:
    low, high, scales = raw[:, :128], raw[:, 128:192], np.ascontiguousarray(raw[:, 192:208]).view(np.int8)
    (scale,), _ = _floats(raw[:, 208:], 1)
    pairs = high.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = _nibbles(low, 64) | pairs.reshape(-1, 256) << 4
    return Blocks(codes.view(np.int8) - np.int8(32), scale * scales)


class Format(NamedTuple):
    """`size` bytes of the file hold `block` values."""

    name: str
    block: int
    size: int
    dtype: np.dtype[Any]  # of the values
    form: Form | None = None  # None: these lie there as they are
    take_apart: Callable[[Array], Blocks] | None = None  # blocks [n, size]

    def values(self, raw: Array) -> Array:
        """[n, values] of rows [n, bytes] of whole blocks."""
        if self.form is None or self.take_apart is None:
            return raw.view(self.dtype)
        blocks = raw.reshape(-1, self.size)
        out = np.empty((len(blocks), self.block // self.form.group, self.form.group), np.float32)
        step = _AT_ONCE // self.block
        for i in range(0, len(blocks), step):
            codes, scales, offsets = self.take_apart(blocks[i : i + step])
            part = out[i : i + step]
            codes = E2M1.take(codes) if self.form.is_e2m1 else codes
            np.subtract(codes.reshape(part.shape), np.float32(self.form.zero), out=part)
            part *= scales[..., None]
            if offsets is not None:
                part += offsets[..., None]
        return out.reshape(len(raw), -1)


_F32 = np.dtype("<f4")
FORMATS = {
    0: Format("F32", 1, 4, _F32),
    1: Format("F16", 1, 2, np.dtype("<f2")),
    2: Format("Q4_0", 32, 18, _F32, Form(4, 32, zero=8), partial(_q4, num_floats=1)),
    3: Format("Q4_1", 32, 20, _F32, Form(4, 32, has_offsets=True), partial(_q4, num_floats=2)),
    6: Format("Q5_0", 32, 22, _F32, Form(8, 32), partial(_q5, num_floats=1)),
    7: Format("Q5_1", 32, 24, _F32, Form(8, 32, has_offsets=True), partial(_q5, num_floats=2)),
    8: Format("Q8_0", 32, 34, _F32, Form(8, 32), _q8_0),
    12: Format("Q4_K", 256, 144, _F32, Form(4, 32, has_offsets=True), _q4_k),
    13: Format("Q5_K", 256, 176, _F32, Form(8, 32, has_offsets=True), _q5_k),
    14: Format("Q6_K", 256, 210, _F32, Form(8, 16), _q6_k),
    30: Format("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    39: Format("MXFP4", 32, 17, _F32, Form(4, 32, is_float=True), _mxfp4),
}
