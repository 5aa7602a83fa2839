"""Safetensors folders, single or sharded by an index: named tensors, read slice by slice.

The format is read here rather than by the `safetensors` package, which takes a name that is listed twice,
cannot hand float8 to numpy, and maps the file: one that is cut short while being read would end the process.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from hex_llm.errors import ModelError
from hex_llm.weights.checkpoint import Checkpoint, Slices
from hex_llm.weights.files import PICKLES, like, read_into

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 16 << 20  # one of 91,000 tensors takes 9 MB
MAX_HEADER_BYTES = 8 << 20
MAX_RANK = 8
SHARD = re.compile(r"[^/\\]+\.safetensors")
FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
INTEGERS = {f"{kind.upper()}{8 * size}": np.dtype(f"<{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)}
# A file may hold these too, as long as they are not the model's weights.
OTHERS = {
    "C64": 64,
    **dict.fromkeys(("BOOL", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
BITS = OTHERS | {name: 8 * dtype.itemsize for name, dtype in (FLOATS | INTEGERS).items()}

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SafeTensor:
    path: Path
    file: BinaryIO  # stays open: a file that takes the path's place later is not mixed in
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self, index: Slices, integers: np.dtype[Any] | None = None) -> Array:
        """See checkpoint.Tensor."""
        readable = FLOATS if integers is None else {k: v for k, v in INTEGERS.items() if v == integers}
        if self.dtype not in readable:
            raise ModelError(
                f"tensor {self.name!r:.120} holds {self.dtype}, but these weights must be one of "
                f"{', '.join(readable)}: take a model that is quantized as config.json says, or not at all"
            )
        cuts = [range(size)[cut] for cut, size in zip(index, self.shape, strict=True)]
        out: Array = np.empty([len(cut) for cut in cuts], readable[self.dtype])
        if out.size:
            runs, starts = self._runs(cuts, out.itemsize)
            size = out.nbytes // runs
            view = out.reshape(-1).view(np.uint8).data
            for i, start in enumerate(starts):
                self._fill(view[i * size : (i + 1) * size], start)
        return out

    def viewed(self, *shape: int) -> SafeTensor:
        """The same values in another shape."""
        assert math.prod(shape) == math.prod(self.shape), f"{self.name}: {self.shape} cannot be {shape}"
        return replace(self, shape=shape)

    def nth(self, i: int) -> SafeTensor:
        """Of the first axis."""
        num_bytes = math.prod(self.shape[1:]) * BITS[self.dtype] // 8
        return replace(self, shape=self.shape[1:], offset=self.offset + i * num_bytes)

    def _runs(self, cuts: list[range], itemsize: int) -> tuple[int, Iterator[int]]:
        """How many stretches of the file hold the cuts, all of one length, and where each starts."""
        strides = [itemsize * math.prod(self.shape[axis + 1 :]) for axis in range(len(cuts))]
        first = self.offset + sum(cut.start * stride for cut, stride in zip(cuts, strides, strict=True))
        last = max((axis for axis, cut in enumerate(cuts) if len(cut) < self.shape[axis]), default=0)
        outer = [range(0, len(cuts[axis]) * strides[axis], strides[axis]) for axis in range(last)]
        return math.prod(map(len, outer)), (first + sum(steps) for steps in itertools.product(*outer))

    def _fill(self, view: memoryview, start: int) -> None:
        try:
            read_into(view, self.file, start)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        except EOFError:
            raise _broken(self.path, "it was cut short while being read") from None


def open_safetensors(folder: Path) -> Checkpoint:
    """Reads only headers. Every file that the index names must be there, whole and inside the folder."""
    try:
        index = folder / INDEX
        return _indexed(folder, _weight_map(index)) if os.path.lexists(index) else _unindexed(folder)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unindexed(folder: Path) -> Checkpoint:
    files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    if not files:
        raise ModelError(_nothing_to_load(folder))
    tensors: dict[str, SafeTensor] = {}
    for path in files:
        in_file = _header(path)
        twice = tensors.keys() & in_file.keys()
        if twice:
            raise ModelError(
                f"{path.name!r:.120}: tensor {min(twice)!r:.120} is also in another file, "
                "and there is no index: keep only the files of one model"
            )
        tensors |= in_file
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    _check_file(index)
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise ModelError(f"{INDEX} is larger than {MAX_INDEX_BYTES >> 20} MiB: not an index")
    try:
        names = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{INDEX} is not a JSON object with a weight_map: download the model again"
        ) from error
    if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()):
        raise ModelError(f"{INDEX}: weight_map must map tensor names to file names: download the model again")
    return names


def _indexed(folder: Path, names: dict[str, str]) -> Checkpoint:
    files = sorted(set(names.values()))
    for file in files:
        if not SHARD.fullmatch(file) or not file.isprintable():
            raise ModelError(
                f"{INDEX} points outside the folder or to another format ({file!r:.80}): do not trust it"
            )
        if not os.path.lexists(folder / file):
            raise ModelError(f"{file!r:.120} is missing, but {INDEX} lists it: download the model again")
    tensors = {file: _header(folder / file) for file in files}
    lost = [name for name, file in names.items() if name not in tensors[file]]
    if lost:
        raise ModelError(
            f"{INDEX} lists {lost[0]!r:.120} in a file that does not hold it: download the model again"
        )
    return {name: tensors[file][name] for name, file in names.items()}


def read_tensors(path: Path, data: bytes) -> dict[str, Array]:
    """All tensors of a file with these bytes, which are floats; `path` is what it is called."""
    header = _parsed_header(path, BytesIO(data))
    if other := next((one for one in header.values() if one.dtype not in FLOATS), None):
        raise ModelError(f"tensor {other.name!r:.120} holds {other.dtype}, not floats")
    return {
        name: np.frombuffer(data, FLOATS[one.dtype], math.prod(one.shape), one.offset).reshape(one.shape)
        for name, one in header.items()
    }


def _header(path: Path) -> dict[str, SafeTensor]:
    _check_file(path)
    try:
        return _parsed_header(path, path.open("rb"))
    except OSError as error:
        raise _unreadable(path, error) from error


def _parsed_header(path: Path, file: BinaryIO) -> dict[str, SafeTensor]:
    try:
        return {tensor.name: tensor for tensor in _tensors(path, file)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else "its header makes no sense"
        raise _broken(path, reason) from error


def _tensors(path: Path, file: BinaryIO) -> Iterator[SafeTensor]:
    """8 bytes of length, a JSON header of that length, then the tensors without a gap."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = json.loads(file.read(length), object_pairs_hook=_unique)
    header.pop("__metadata__", None)
    start, end = 8 + length, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, shape = end, _shape(entry["shape"])
        end += -(-math.prod(shape) * BITS[entry["dtype"]] // 8)
        if entry["data_offsets"] != [begin, end]:
            raise ValueError(f"tensor {name!r:.80} does not lie at bytes {begin} to {end}")
        yield SafeTensor(path, file, name, entry["dtype"], shape, start + begin)
    if start + end != size:
        raise ValueError(f"its tensors end at byte {start + end} of {size}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name is listed twice")
    return values


def _shape(sizes: list[Any]) -> tuple[int, ...]:
    if len(sizes) > MAX_RANK or any(type(size) is not int or size < 0 for size in sizes):
        raise TypeError
    return tuple(sizes)


def _check_file(path: Path) -> None:
    if not path.is_file():  # a folder, a dangling link, or a pipe, which would be waited for
        raise ModelError(f"{path.name!r:.120} is not a file: download the model again")


def _broken(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path.name!r:.120} is broken or cut short ({reason:.120}): download the model again")


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path.name!r:.120} cannot be read ({error.strerror}): check its permissions")


def _nothing_to_load(folder: Path) -> str:
    unsafe = like(sorted(path.name for path in folder.iterdir()), *PICKLES)
    if unsafe:
        return f"only PyTorch files ({unsafe[0]!r:.80}), which can run code: convert them to safetensors"
    return "no *.safetensors file in the folder: is this a model?"
