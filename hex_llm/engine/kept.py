"""Compiled programs that are kept for the next start.

JAX can do that too, but finds programs by what they were lowered to, so that every start traces and lowers
all of them, in one thread: most of a warm start. Here a program is found by what it is made from: our own
sources, the versions of JAX and of the devices' software, the machine, and whatever else its maker names.
What cannot be loaded is compiled anew. Not known here: what a program does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from hex_llm.weights.source import private_folder

log = logging.getLogger(__name__)

SOURCES = [Path(__file__).parent.parent / part for part in ("engine", "kernels", "models", "parallel")]
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # that change what is compiled
NEVER_S = 1e9
FORGOTTEN_S = 30 * 24 * 3600  # what nobody has loaded for so long is deleted


def folder_for_programs(cache_dir: Path) -> Path | None:
    """None: the user has told JAX where to keep programs, so JAX does.

    It must be one of the two: on CPUs a program that JAX itself has loaded is incomplete when it is saved
    again. JAX is told of the folder, where other things are kept too, but writes nothing there.
    """
    folder = private_folder(cache_dir / "programs")
    if jax.config.jax_compilation_cache_dir not in (None, str(folder)):  # type: ignore[attr-defined]
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", NEVER_S)
    return folder


class KeptPrograms:
    """Those of some devices, in a folder that only this user can write: loading one runs it."""

    def __init__(self, folder: Path, devices: list[jax.Device], *made_from: Any) -> None:
        """The representations of `made_from` must tell all that programs depend on."""
        self._folder = folder
        self._devices = devices
        self._made_from = repr((_surroundings(devices), made_from))
        _forget_old(folder)

    def load(self, name: str, arguments: tuple[Any, ...], placed: Any) -> Any | None:
        """A program of these arguments, whose results have the structure of `placed`; None: there is none."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            data = path.read_bytes()
            path.touch()
            in_tree, out_tree = jax.tree.structure((arguments, {})), jax.tree.structure(placed)
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
    for path in (path for path in folder.iterdir() if not path.suffix):  # others' have one
        with suppress(OSError):  # another process may be at it
            if time.time() - path.stat().st_mtime > FORGOTTEN_S:
                path.unlink()


def _surroundings(devices: list[jax.Device]) -> tuple[Any, ...]:
    sources = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in folder.iterdir() if path.is_file()):
        sources.update(path.read_bytes())
    return (
        sources.hexdigest(),
        jax.__version__,
        version("jaxlib"),
        devices[0].client.platform_version,
        [(device.id, device.device_kind) for device in devices],
        _machine() if devices[0].platform == "cpu" else "",
        [os.environ.get(name) for name in ENVIRONMENT],
    )


def _machine() -> str:
    """The instructions that this machine's processors know."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
