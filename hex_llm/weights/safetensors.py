"""Safetensors folders, single or sharded by an index: named tensors, read slice by slice."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors looks up by name
import numpy as np
from safetensors import SafetensorError, safe_open

from hex_llm.errors import ModelError
from hex_llm.weights.checkpoint import Checkpoint, Slices

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20
UNSAFE = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True)
class SafeTensor:
    path: Path
    name: str
    shape: tuple[int, ...]

    def read(self, index: Slices) -> np.ndarray[Any, Any]:
        # Opened anew for each read: an open file maps what was read, and so grows the process by it.
        try:
            with safe_open(self.path, framework="np") as file:
                values: np.ndarray[Any, Any] = file.get_slice(self.name)[index]
                return values
        except (SafetensorError, OSError, TypeError) as error:
            raise _broken(self.path, error) from error


def open_safetensors(folder: Path) -> Checkpoint:
    """Reads only headers. Every file that the index names must be there, whole and inside the folder."""
    index = folder / INDEX
    if index.exists():
        return _indexed(folder, _weight_map(index))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(_nothing_to_load(folder))
    tensors: dict[str, SafeTensor] = {}
    for path in files:
        found = _header(path)
        twice = tensors.keys() & found.keys()
        if twice:
            raise ModelError(
                f"{path.name}: tensor {min(twice)!r:.120} is also in another file, and there is no index"
            )
        tensors |= found
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ModelError(f"{INDEX} is larger than {MAX_INDEX_BYTES >> 20} MiB: not an index")
        names = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{INDEX} cannot be read: download the model again") from error
    if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()):
        raise ModelError(f"{INDEX}: weight_map must map tensor names to file names")
    return names


def _indexed(folder: Path, names: dict[str, str]) -> Checkpoint:
    tensors: dict[str, SafeTensor] = {}
    for file in sorted(set(names.values())):
        if not file.endswith(".safetensors") or Path(file).name != file or "\\" in file:
            raise ModelError(f"{INDEX} points outside the folder or to another format: {file!r:.120}")
        if not (folder / file).exists():
            raise ModelError(f"{file!r:.120} is missing, but {INDEX} lists it: download the model again")
        tensors |= _header(folder / file)
    lost = [name for name in names if name not in tensors or tensors[name].path.name != names[name]]
    if lost:
        raise ModelError(
            f"{INDEX} lists {lost[0]!r:.120} in a file that does not hold it: download the model again"
        )
    return tensors


def _header(path: Path) -> dict[str, SafeTensor]:
    if not path.is_file():  # a folder, a pipe, a dangling link
        raise ModelError(f"{path.name} is not a file")
    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            return {name: SafeTensor(path, name, tuple(file.get_slice(name).get_shape())) for name in names}
    except (SafetensorError, OSError) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> ModelError:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return ModelError(f"{path.name} is broken or cut short ({reason}): download the model again")


def _nothing_to_load(folder: Path) -> str:
    unsafe = [path.name for path in sorted(folder.iterdir()) if path.suffix in UNSAFE]
    if unsafe:
        return f"only PyTorch files ({unsafe[0]:.80}), which can run code: convert them to safetensors"
    return "no *.safetensors file in the folder: is this a model?"
