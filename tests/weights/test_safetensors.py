"""Safetensors: a broken file is one line of ModelError; a whole one reads as the package reads it."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hex_llm.errors import ModelError
from hex_llm.weights.safetensors import INDEX, MAX_HEADER_BYTES, MAX_INDEX_BYTES, open_safetensors

MODEL = "model.safetensors"
CUBE = np.arange(4 * 6 * 10, dtype=np.float32).reshape(4, 6, 10)
NUMPY_FLOATS = ("F16", "F32", "F64", "BF16")
WHOLE = save({"a": CUBE, "b": np.float16([1, 2, 3]), "none": np.zeros((0, 3), np.float32)}, {"format": "pt"})


def entry(begin: Any = 0, end: Any = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def whole(tensor: Any) -> np.ndarray:
    return tensor.read((slice(None),) * len(tensor.shape))


def read_all(folder: Path) -> None:
    for tensor in open_safetensors(folder).values():
        whole(tensor)


def refusal(folder: Path, of: Callable[[Path], object] = open_safetensors) -> str:
    """What opening, or reading, says: one line, in little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError) as caught:
        of(folder)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 300
    assert ": " in message, "it says what to do"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    return message


# ---- whole files


@pytest.mark.parametrize(
    "index",
    [
        (slice(0, 4), slice(0, 6), slice(0, 10)),
        (slice(1, 3), slice(0, 6), slice(0, 10)),
        (slice(0, 4), slice(2, 3), slice(0, 10)),
        (slice(1, 4), slice(0, 6), slice(3, 7)),
        (slice(2, 3), slice(1, 5), slice(9, 10)),
        (slice(None), slice(4, None), slice(None)),
        (slice(2, 2), slice(0, 6), slice(0, 10)),
    ],
)
def test_slices(index: tuple[slice, ...], tmp_path: Path) -> None:
    (tmp_path / MODEL).write_bytes(WHOLE)
    tensors = open_safetensors(tmp_path)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "a": (4, 6, 10),
        "b": (3,),
        "none": (0, 3),
    }
    np.testing.assert_array_equal(tensors["a"].read(index), CUBE[index])
    np.testing.assert_array_equal(tensors["b"].read((slice(1, 3),)), np.float16([2, 3]))
    assert tensors["none"].read((slice(0, 0), slice(0, 3))).shape == (0, 3)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("F64", np.float64([1, -2])),
        ("F32", np.float32([1, -2])),
        ("F16", np.float16([1, -2])),
        ("BF16", np.array([1, -2], ml_dtypes.bfloat16)),
        ("F8_E4M3", np.array([1, -2], ml_dtypes.float8_e4m3fn)),
        ("F8_E5M2", np.array([1, -2], ml_dtypes.float8_e5m2)),
    ],
)
def test_every_floating_type(dtype: str, values: np.ndarray, tmp_path: Path) -> None:
    header = {
        "a": entry(0, values.nbytes, [2], dtype),
        "one": entry(values.nbytes, values.nbytes + 8, [], "F64"),
    }
    (tmp_path / MODEL).write_bytes(file_of(header, values.tobytes() + struct.pack("<d", 7)))
    tensors = open_safetensors(tmp_path)
    np.testing.assert_array_equal(tensors["a"].read((slice(0, 2),)).astype(np.float32), np.float32([1, -2]))
    assert tensors["one"].read(()) == 7


@pytest.mark.parametrize(("dtype", "size"), [("I64", 16), ("BOOL", 2), ("U8", 2), ("F4", 1), ("F6_E2M3", 2)])
def test_other_types_are_refused_by_name_when_they_are_weights(dtype: str, size: int, tmp_path: Path) -> None:
    (tmp_path / MODEL).write_bytes(file_of({"position_ids": entry(0, size, [2], dtype)}, bytes(size)))
    assert open_safetensors(tmp_path)["position_ids"].shape == (2,)
    message = refusal(tmp_path, read_all)
    assert "'position_ids'" in message
    assert dtype in message


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_are_read_where_they_are_asked_for(dtype: str, tmp_path: Path) -> None:
    packed = np.arange(24).reshape(4, 6).astype(dtype)
    (tmp_path / MODEL).write_bytes(save({"packed": packed, "scales": CUBE}))
    tensors = open_safetensors(tmp_path)
    found = tensors["packed"].read((slice(1, 3), slice(2, 6)), np.dtype(dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, packed[1:3, 2:6])
    for name, integers in (("packed", None), ("packed", np.dtype(bool)), ("scales", np.dtype(dtype))):
        with pytest.raises(ModelError, match=f"'{name}' holds"):
            tensors[name].read((slice(None),) * 2, integers)


# ---- broken files

BROKEN = {
    "empty": b"",
    "header only": WHOLE[: len(WHOLE) - CUBE.nbytes - 6],
    "half": WHOLE[: len(WHOLE) // 2],
    "last byte missing": WHOLE[:-1],
    "a byte too many": WHOLE + b"\0",
    "half of the length": WHOLE[:4],
    "header of 2^63": file_of({"a": entry()}, length=1 << 63),
    "header of 100 MB claimed": file_of({"a": entry()}, length=100_000_000),
    "header of 0": file_of(b""),
    "overlap": file_of({"a": entry(), "b": entry(4, 12)}, bytes(12)),
    "the same bytes": file_of({"a": entry(), "b": entry()}),
    "negative": file_of({"a": entry(-8, 0)}),
    "backwards": file_of({"a": entry(8, 0)}),
    "gap": file_of({"a": entry(), "b": entry(12, 20)}, bytes(20)),
    "gap at the start": file_of({"a": entry(8, 16)}, bytes(16)),
    "outside": file_of({"a": entry(), "b": entry(8, 8 + (4 << 40), [1 << 40])}),
    "shape too large": file_of({"a": entry(shape=[3])}),
    "shape too small": file_of({"a": entry(shape=[1])}),
    "shape of 2^64 bytes": file_of({"a": entry(shape=[1 << 62, 4])}),
    "negative shape": file_of({"a": entry(shape=[-1, -2])}),
    "shape of truth": file_of({"a": entry(shape=[True, 2])}),
    "shape of fractions": file_of({"a": entry(shape=[2.0])}),
    "shape of many axes": file_of({"a": entry(shape=[1 << 60] * 100_000)}),
    "shape is a text": file_of({"a": entry(shape="2")}),
    "dtype too wide": file_of({"a": entry(dtype="F64")}),
    "dtype unknown": file_of({"a": entry(dtype="Q4_0")}),
    "dtype is a list": file_of({"a": entry(dtype=["F32"])}),
    "no dtype": file_of({"a": {"shape": [2], "data_offsets": [0, 8]}}),
    "three offsets": file_of({"a": {**entry(), "data_offsets": [0, 4, 8]}}),
    "mixed offsets": file_of({"a": entry(), "b": entry("x", None)}),
    "offset of 5000 digits": file_of(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,' + b"9" * 5000 + b"]}}"
    ),
    "duplicate": file_of(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2)),
    "duplicate field": file_of(
        b'{"a": {"dtype": "F32", "shape": [3], "shape": [2], "data_offsets": [0, 8]}}'
    ),
    "not JSON": file_of(b'{"a": '),
    "not UTF-8": file_of(b'{"\xff": 1}'),
    "a list": file_of(b"[1, 2]"),
    "a text": file_of(b'"abc"'),
    "entries are numbers": file_of({"a": 1, "b": 2}),
    "deeply nested": file_of(b"[" * 100_000),
    "a long name": file_of({"x\n" * 10_000: entry(0, 9)}),
    "many lists": file_of(b"[" + b"[]," * 1_000_000 + b"[]]"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(case: str, tmp_path: Path) -> None:
    (tmp_path / MODEL).write_bytes(BROKEN[case])
    assert f"'{MODEL}' is broken or cut short (" in refusal(tmp_path)


def test_a_header_that_is_too_long(tmp_path: Path) -> None:
    with (tmp_path / MODEL).open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(1 << 30)
    assert str(MAX_HEADER_BYTES + 1) in refusal(tmp_path)


def not_a_file(kind: str, path: Path) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link"])
@pytest.mark.parametrize("name", [MODEL, INDEX])
def test_what_is_not_a_file(kind: str, name: str, tmp_path: Path) -> None:
    not_a_file(kind, tmp_path / name)
    assert f"{name!r} is not a file" in refusal(tmp_path)


@pytest.fixture
def closed_folder(tmp_path: Path) -> Iterator[Path]:
    user = os.geteuid()
    (tmp_path / MODEL).write_bytes(WHOLE)
    tmp_path.chmod(0)
    if user == 0:  # root may enter everywhere
        os.seteuid(65534)
    yield tmp_path
    os.seteuid(user)
    tmp_path.chmod(0o700)


def test_an_unreadable_folder(closed_folder: Path) -> None:
    assert "cannot be read (Permission denied): check its permissions" in refusal(closed_folder)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    (tmp_path / MODEL).write_bytes(WHOLE)
    monkeypatch.setattr(Path, "open", denied)
    assert refusal(tmp_path) == f"{MODEL!r} cannot be read (Permission denied): check its permissions"


@pytest.mark.parametrize("size", [0, 4, len(WHOLE) // 2, len(WHOLE) - 7])
def test_a_file_cut_short_after_opening(size: int, tmp_path: Path) -> None:
    (tmp_path / MODEL).write_bytes(WHOLE)
    tensor = open_safetensors(tmp_path)["a"]
    os.truncate(tmp_path / MODEL, size)
    with pytest.raises(ModelError, match="cut short while being read"):
        whole(tensor)


def test_a_file_replaced_after_opening_is_not_mixed_in(tmp_path: Path) -> None:
    (tmp_path / MODEL).write_bytes(WHOLE)
    tensor = open_safetensors(tmp_path)["a"]
    (tmp_path / "new").write_bytes(file_of({"a": entry()}))
    os.replace(tmp_path / "new", tmp_path / MODEL)
    np.testing.assert_array_equal(whole(tensor), CUBE)


# ---- several files

ONE, TWO = "model-1-of-2.safetensors", "model-2-of-2.safetensors"


def sharded(folder: Path, index: Any, files: tuple[str, ...] = (ONE, TWO)) -> Path:
    for name, tensor in zip((ONE, TWO), "ab", strict=True):
        if name in files:
            (folder / name).write_bytes(file_of({tensor: entry()}))
    (folder / INDEX).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    return folder


def mapped(**names: Any) -> dict[str, Any]:
    return {"weight_map": names}


def test_shards(tmp_path: Path) -> None:
    tensors = open_safetensors(sharded(tmp_path, mapped(a=ONE, b=TWO)))
    assert sorted(tensors) == ["a", "b"]
    (tmp_path / INDEX).unlink()
    assert sorted(open_safetensors(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    "place",
    [
        "../x.safetensors",
        "/abs.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "x.safetensors/../../y",
        "x\0.safetensors",
        "\ud800.safetensors",
        "..",
        "",
        "model.bin",
        "model.pt",
    ],
)
def test_an_index_may_not_leave_the_folder(place: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for outside in ("x.safetensors", "model/sub.safetensors"):
        (tmp_path / outside).write_bytes(file_of({"a": entry()}))
    message = refusal(sharded(tmp_path / "model", mapped(a=place)))
    assert message.startswith(f"{INDEX} points outside the folder or to another format")


def test_links_into_the_hub_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(file_of({"a": entry()}))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ONE).symlink_to("../blob")
    assert sorted(open_safetensors(sharded(tmp_path / "model", mapped(a=ONE), ()))) == ["a"]


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (mapped(a=ONE, b="gone.safetensors"), "'gone.safetensors' is missing"),
        (mapped(a=ONE, b="x" * 4096 + ".safetensors"), "is missing"),
        (mapped(a=ONE, b=ONE), "lists 'b' in a file that does not hold it"),
        (mapped(a=ONE, c=TWO), "lists 'c' in a file that does not hold it"),
        (mapped(a=1), "must map tensor names"),
        (mapped(a=[ONE]), "must map tensor names"),
        ({"weight_map": [ONE]}, "must map tensor names"),
        ({"weight_map": None}, "must map tensor names"),
        ({}, "not a JSON object"),
        ([ONE], "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"", "not a JSON object"),
        (b'{"weight_map": ', "not a JSON object"),
        (b"\xff\xfe\xfd", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b'{"a":' * 100_000, "not a JSON object"),
        (b" " * (MAX_INDEX_BYTES + 1), "larger than"),
    ],
)
def test_broken_indexes(index: Any, said: str, tmp_path: Path) -> None:
    message = refusal(sharded(tmp_path, index))
    assert said in message
    assert INDEX in message


def test_a_tensor_in_two_files_without_an_index(tmp_path: Path) -> None:
    for name in (ONE, TWO):
        (tmp_path / name).write_bytes(file_of({"a": entry()}))
    assert "'a' is also in another file" in refusal(tmp_path)


# ---- nothing is executed


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "a.pth", "a.pkl", "a.ckpt", MODEL])
def test_pickles_are_never_read(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "executed"
    (tmp_path / name).write_bytes(pickle.dumps(Canary(canary)))
    assert name in refusal(tmp_path)
    assert not canary.exists()


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "no *.safetensors" in refusal(tmp_path)


# ---- any damage at all


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(WHOLE[: draw(st.integers(0, len(WHOLE))) or None])
    header_end = 8 + struct.unpack("<Q", WHOLE[:8])[0]
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, header_end - 1))
        if place < len(data):
            data[place] = draw(st.integers(0, 255) | st.sampled_from(b'0123456789[]{}:,"-'))
    return bytes(data)


@settings(max_examples=500, deadline=1000)
@given(data=damaged())
def test_damage_is_a_model_error_and_what_is_read_is_what_the_package_reads(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged" / MODEL
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    try:
        ours = open_safetensors(path.parent)
    except ModelError:
        return
    with suppress(SafetensorError), safe_open(path, framework="np") as theirs:
        for name, tensor in ours.items():
            if tensor.dtype in NUMPY_FLOATS:
                np.testing.assert_array_equal(whole(tensor), theirs.get_tensor(name))
