"""The GGUF file format: a header of keys and tensor places, then the tensors, mostly quantized in blocks.

The header is read here rather than by `gguf.GGUFReader`, which takes 4 s for a vocabulary of 49k and follows
counts and lengths without checking them. What the keys and the tensors mean for a model is not known here.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hex_llm.errors import ModelError
from hex_llm.weights.checkpoint import Slices
from hex_llm.weights.files import read_into
from hex_llm.weights.gguf_blocks import FORMATS, Format
from hex_llm.weights.grouped import Form, PartName

Array = np.ndarray[Any, Any]
Metadata = Mapping[str, Any]  # scalars and strings as Python values, arrays as list[str] or numpy arrays

_HEADER_LIMIT = 1 << 26  # a vocabulary of 262k tokens with its merges takes 16 MB

_SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One matrix or vector of the file, in the values and the row order of the HF checkpoint."""

    path: Path
    file: BinaryIO
    name: str
    shape: tuple[int, ...]
    format: Format
    offset: int
    heads: int = 0  # conversion interleaved the two rotary halves of each of these heads' rows
    added: float = 0.0  # what conversion added to every value

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.format.block * self.format.size

    def read(self, index: Slices, integers: np.dtype[Any] | None = None) -> Array:
        """See checkpoint.Tensor. float32, or float16/bfloat16 where the file has them; decodes only the
        blocks that `index` needs."""
        if integers is not None:
            raise ModelError(f"{self.path}: tensor {self.name} holds {self.format.name}, not {integers.name}")
        if len(self.shape) == 1:
            whole = self._read_rows(np.zeros(1, np.int64), slice(0, self.shape[0])).reshape(-1)
            return whole.take(self._rows_in_file(index[0]))
        return self._read_rows(self._rows_in_file(index[0]), index[1])

    def _rows_in_file(self, index: slice) -> Array:
        rows = np.arange(*index.indices(self.shape[0]))
        if not self.heads:
            return rows
        dim = self.shape[0] // self.heads
        head, row = np.divmod(rows, dim)
        half, pair = np.divmod(row, dim // 2)
        return np.asarray(head * dim + 2 * pair + half)

    def _read_rows(self, rows: Array, columns: slice) -> Array:
        start, stop, _ = columns.indices(self.shape[-1])
        if not rows.size or start >= stop:
            return np.zeros((rows.size, max(stop - start, 0)), self.format.dtype)
        raw, first = self._raw(rows, start, stop)
        values = self.format.values(raw)[:, start - first : stop - first]
        return values - np.float32(self.added) if self.added else np.ascontiguousarray(values)

    @property
    def form(self) -> Form | None:
        """See grouped.GroupedTensor."""
        return None if len(self.shape) != 2 or self.added else self.format.form

    def read_part(self, name: PartName, rows: slice, columns: slice, group: int) -> Array:
        assert self.format.form is not None
        assert self.format.take_apart is not None
        raw, first = self._raw(self._rows_in_file(rows), columns.start * group, columns.stop * group)
        numbers: Array = getattr(self.format.take_apart(raw.reshape(-1, self.format.size)), name)
        numbers = numbers.reshape(len(raw), -1)
        if name == "codes":
            return np.ascontiguousarray(numbers[:, columns.start - first : columns.stop - first])
        inputs = np.arange(columns.start, columns.stop) * group
        return numbers.take((inputs - first) // self.format.form.group, axis=1)

    def _raw(self, rows: Array, start: int, stop: int) -> tuple[Array, int]:
        """The bytes [rows, ...] of the blocks that hold these inputs, of rows of the file; and the first
        input of those."""
        _, block, size, *_ = self.format
        low, high = int(rows.min()), int(rows.max()) + 1
        raw = np.empty((high - low, self.row_bytes), np.uint8)
        try:
            read_into(raw.reshape(-1).data, self.file, self.offset + low * self.row_bytes)
        except EOFError:
            raise ModelError(
                f"{self.path}: ends inside of tensor {self.name}; it was cut short while loading"
            ) from None
        raw = raw[:, start // block * size : -(-stop // block) * size]
        return np.ascontiguousarray(raw[rows - low] if self.heads else raw), start // block * block


def read_gguf(path: Path) -> tuple[Metadata, dict[str, GGUFTensor]]:
    """The keys and, by name, the tensors, which keep the file open and hold nothing of its data."""
    try:
        if not path.is_file():  # opening a FIFO would wait for its other end
            raise ModelError(f"{path}: not a file; --model needs a GGUF file here")
        file = path.open("rb")
        size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from error
    return _Header(path, file, size).read()


class _Header:
    """Reads the header front to back; what does not fit into the file is refused before it is allocated."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.position = 0

    def read(self) -> tuple[Metadata, dict[str, GGUFTensor]]:
        tensor_count, pair_count = self._preamble()
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._name("a key")
            metadata[key] = self._value(self._number("I", key), key)
        tensors: dict[str, GGUFTensor] = {}
        for _ in range(tensor_count):
            tensor = self._tensor()
            if tensor.name in tensors:
                raise self._damaged(f"tensor {tensor.name} is listed twice")
            tensors[tensor.name] = tensor
        start = self._data_start(metadata)
        return metadata, {name: self._placed(tensor, start) for name, tensor in tensors.items()}

    def _preamble(self) -> tuple[int, int]:
        if self.size < 24 or (magic := self._take(4, "the magic number")) != b"GGUF":
            fault = f"it starts with {magic!r}" if self.size >= 24 else f"it has {self.size} bytes"
            raise ModelError(f"{self.path}: not a GGUF file: {fault}; fetch or convert the model again")
        version = self._number("I", "the version")
        if version not in (2, 3):
            raise ModelError(
                f"{self.path}: GGUF version {version} cannot be read, 2 and 3 can; convert the model again"
            )
        tensors, pairs = self._number("Q", "the tensor count"), self._number("Q", "the key count")
        if tensors * 24 + pairs * 13 > self.size:
            raise self._damaged(f"it announces {tensors} tensors and {pairs} keys in {self.size} bytes")
        return tensors, pairs

    def _tensor(self) -> GGUFTensor:
        name = self._name("a tensor's name")
        rank = self._number("I", name)
        if not 1 <= rank <= 4:
            raise self._damaged(f"tensor {name} has {rank} dimensions")
        # The file lists the fastest axis first.
        shape = tuple(self._number("Q", name) for _ in range(rank))[::-1]
        form = self._format(name, self._number("I", name))
        if min(shape) < 1 or shape[-1] % form.block:
            raise self._damaged(f"tensor {name} cannot have the shape {shape} as {form.name}")
        return GGUFTensor(self.path, self.file, name, shape, form, self._number("Q", name))

    def _format(self, name: str, kind: int) -> Format:
        if kind in FORMATS:
            return FORMATS[kind]
        import gguf

        names = {member.value: member.name for member in gguf.GGMLQuantizationType}
        raise ModelError(
            f"{self.path}: tensor {name} is of the unsupported type {names.get(kind, f'number {kind}')}; "
            f"take a file in one of {', '.join(form.name for form in FORMATS.values())}"
        )

    def _data_start(self, metadata: Metadata) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment not in (1 << bit for bit in range(17)):
            raise self._damaged(f"general.alignment is {alignment!r}")
        return -(-self.position // alignment) * alignment

    def _placed(self, tensor: GGUFTensor, start: int) -> GGUFTensor:
        end = start + tensor.offset + math.prod(tensor.shape[:-1]) * tensor.row_bytes
        if end > self.size:
            raise self._damaged(f"tensor {tensor.name} ends at byte {end} of {self.size}")
        return replace(tensor, offset=start + tensor.offset)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._damaged(f"key {key} has a value of type {kind}")
        return self._number(_SCALARS[kind], key)

    def _array(self, key: str) -> list[str] | Array:
        kind, count = self._number("I", key), self._number("Q", key)
        if kind == _STRING:
            self._check(8 * count, key)
            return [self._string(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._damaged(f"key {key} has an array of type {kind}")
        item = np.dtype(_SCALARS[kind]).newbyteorder("<")
        return np.frombuffer(self._take(count * item.itemsize, key), item)

    def _name(self, what: str) -> str:
        name = self._string(what)
        if len(name) > 200 or not name.isprintable():
            raise self._damaged(f"{what} is {name[:40]!r}")
        return name

    def _string(self, what: str) -> str:
        return self._take(self._number("Q", what), what).decode("utf-8", "replace")

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code), what))[0]

    def _take(self, count: int, what: str) -> bytes:
        self._check(count, what)
        self.position += count
        data = self.file.read(count)
        if len(data) < count:
            raise self._damaged("it was cut short while being read")
        return data

    def _check(self, count: int, what: str) -> None:
        if self.position + count > min(self.size, _HEADER_LIMIT):
            raise self._damaged(f"{what} needs {count} bytes at byte {self.position} of {self.size}")

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: damaged or cut short: {what}; fetch the file again")
