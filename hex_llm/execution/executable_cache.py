"""Compiled programs that are kept for the next start.

JAX keeps them too, but finds a program by what it was lowered to, so that every start traces and lowers all
of them, in one thread: most of a later start on a GPU. Here a program is found by what it is made from: our
own sources, the versions of what compiles, the devices, and whatever else its maker names. What cannot be
loaded is compiled anew. Not known here: what a program does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

log = logging.getLogger(__name__)

SOURCES = [Path(__file__).parent.parent / part for part in ("execution", "kernels", "models", "parallel")]
COMPILERS = ("jax", "nvidia-")  # how the packages begin that compile, or are called by what they compile
SETTINGS = ("JAX_", "XLA_")  # how the environment variables begin that change what is compiled
FORGOTTEN_S = 30 * 24 * 3600  # what nobody has loaded for so long is deleted


class ExecutableCache:
    """Those of some devices, in a folder that only this user can write: loading one runs it.

    Not for CPUs: XLA saves executables there that may lack functions when they run.
    """

    def __init__(self, folder: Path, devices: list[jax.Device], *made_from: Any) -> None:
        """The representations of `made_from` must tell all that programs depend on."""
        self._folder = folder
        self._devices = devices
        self._made_from = repr((_surroundings(devices), made_from))
        _forget_old(folder)

    def load(self, name: str, arguments: tuple[Any, ...], out_shardings: Any) -> Any | None:
        """The program of these arguments, if there is one; its results have `out_shardings`' structure."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            data = path.read_bytes()
            path.touch()
            in_tree, out_tree = jax.tree.structure((arguments, {})), jax.tree.structure(out_shardings)
            return deserialize_and_load(
                data, in_tree, out_tree, self._devices[0].client, execution_devices=self._devices
            )
        except Exception as error:
            log.warning("a compiled program could not be loaded: %s", str(error)[:300])
            return None

    def save(self, name: str, program: Any) -> None:
        try:
            data, _, _ = serialize(program)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(data)
            Path(file.name).replace(self._path(name))  # others may read it, or write the same
        except Exception as error:
            log.warning("a compiled program could not be kept: %s", str(error)[:300])

    def _path(self, name: str) -> Path:
        return self._folder / hashlib.sha256(f"{self._made_from}\0{name}".encode()).hexdigest()


def _forget_old(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(OSError):  # another process may be at it
            if time.time() - path.stat().st_mtime > FORGOTTEN_S:
                path.unlink()


def _surroundings(devices: list[jax.Device]) -> tuple[Any, ...]:
    sources = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in folder.iterdir() if path.is_file()):
        sources.update(path.read_bytes())
    return (
        sources.hexdigest(),
        sorted({(one.name, one.version) for one in distributions() if one.name.startswith(COMPILERS)}),
        devices[0].client.platform_version,
        [(device.id, device.device_kind) for device in devices],
        sorted(item for item in os.environ.items() if item[0].startswith(SETTINGS)),
    )
