"""Which adapters requests may name, and their files, wherever these come from.

Names are the callers': a folder is looked into only where it is allowed, whatever links lead there, and only
regular files of a size that an adapter can have are read. No jax.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError, InvalidRequest, ModelError, SourceError, UnknownModel, one_line
from hex_llm.types import AdapterRef
from hex_llm.weights.adapters import CONFIG, WEIGHTS
from hex_llm.weights.bucket import fetch_from_bucket
from hex_llm.weights.files import ADAPTER, disk_problem
from hex_llm.weights.model_files import MAX_CONFIG_BYTES
from hex_llm.weights.source import HUB_NAME, private_folder

Stamp = tuple[tuple[int, ...], ...]  # changes when one of the files does


class AdapterNames:
    """What the names of adapters stand for: those that are registered, and places that are allowed."""

    def __init__(self, config: EngineConfig) -> None:
        """ConfigError: --lora_modules cannot be read."""
        self.is_on = config.enable_lora
        self.registered = _modules(config.lora_modules)
        self._trusted = frozenset(self.registered.values())
        self._allowed = config.allowed_lora_sources.split(",")

    def resolve(self, name: str) -> AdapterRef:
        """InvalidRequest: no adapters, or not from there; UnknownModel: no such name."""
        if not self.is_on:
            raise InvalidRequest("adapters are off (--enable_lora)", "model")
        source = self.registered.get(name, name)
        if not self.allows(source):
            if "://" in source or source.startswith(("/", "~", ".")):
                raise InvalidRequest(
                    f"adapters are not taken from `{_shown(name)}` (--allowed_lora_sources)", "model"
                )
            raise unknown(name)
        return AdapterRef(name, source)

    def allows(self, source: str) -> bool:
        """What is registered at the start may lie anywhere."""
        if source in self._trusted:
            return True
        place = source
        if source.startswith("/"):
            place = os.path.normpath(source)
        elif _hub_name(source):
            place = f"hf://{source}"
        return any(f"{place}/".startswith(f"{one.rstrip('/')}/") for one in self._allowed)

    def roots(self, source: str) -> list[Path] | None:
        """Folders that its files must lie in; None: anywhere."""
        if source in self._trusted or not source.startswith("/"):
            return None
        return [Path(one).resolve() for one in self._allowed if one.startswith("/")]


def unknown(name: str) -> UnknownModel:
    return UnknownModel(f"The model `{_shown(name)}` does not exist.", "model")


def _modules(text: str | None) -> dict[str, str]:
    """--lora_modules: the places by name."""
    pairs: Any = [one.partition("=")[::2] for one in re.split(r"[,\s]+", text or "") if one]
    if text and text.lstrip().startswith(("{", "[")):
        try:
            values = json.loads(text)
            listed = values if isinstance(values, list) else [values]
            pairs = [(one["name"], one["path"]) for one in listed]
        except (ValueError, KeyError, TypeError):
            pairs = [("", "")]
    if not all(isinstance(one, str) and one for pair in pairs for one in pair) or len(dict(pairs)) < len(
        pairs
    ):
        raise ConfigError(
            '--lora_modules: must be name=place,... or {"name": ..., "path": ...}, no name twice'
        )
    return {name: local_or_remote(place) for name, place in pairs}


def local_or_remote(place: str) -> str:
    """A folder that is here by its whole path; anything else as it is."""
    path = os.path.expanduser(place)
    return os.path.abspath(path) if os.path.isdir(path) else place


def _hub_name(source: str) -> re.Match[str] | None:
    """Names without an owner are taken for registered ones."""
    name = HUB_NAME.fullmatch(source)
    return name if name and "/" in name["repo"] and not name["file"] else None


@contextmanager
def adapter_folder(config: EngineConfig, source: str, max_bytes: int) -> Iterator[Path]:
    """Where its files are, fetched if need be. SourceError: they are not there."""
    wish = replace(ADAPTER, max_bytes=max_bytes)
    try:
        if source.startswith("/"):
            yield Path(source)
            return
        with nullcontext("") if config.enable_lora_cache else TemporaryDirectory() as temporary:
            cache = Path(temporary) if temporary else config.cache_dir
            if source.startswith("gs://"):
                yield fetch_from_bucket(source, private_folder(cache / "gs"), wish)
            elif name := _hub_name(source):
                from hex_llm.weights.hub import fetch_from_hub

                own = Path(temporary) if temporary else None
                yield fetch_from_hub(name["repo"], None, name["commit"], config.hf_token, wish, own)
            else:
                raise SourceError("there is no such adapter")
    except (OSError, ValueError) as error:  # a path with a zero byte in it is a ValueError
        reason = disk_problem(error) if isinstance(error, OSError) else "no path"
        raise SourceError(f"the adapter is unavailable: {reason}") from error


def stamp_of(folder: Path) -> Stamp:
    def stamp(path: Path) -> tuple[int, ...]:
        found = path.stat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    return tuple(stamp(folder / name) for name in (CONFIG, WEIGHTS))


def read_files(folder: Path, roots: list[Path] | None, max_bytes: int) -> tuple[bytes, bytes]:
    """The bytes of its two files. SourceError: they lie outside of `roots`; ModelError: they are none."""
    return _read(folder / CONFIG, roots, MAX_CONFIG_BYTES), _read(folder / WEIGHTS, roots, max_bytes)


def _read(path: Path, roots: list[Path] | None, max_bytes: int) -> bytes:
    real = path.resolve(strict=True)
    _check_inside(real, roots)
    # A pipe must not be waited for; and what has taken the file's place since is no link.
    with open(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        if os.path.exists(opened := f"/proc/self/fd/{file.fileno()}"):  # nor has a folder become one
            _check_inside(Path(os.path.realpath(opened)), roots)
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ModelError(f"the adapter's {path.name} is not a file")
        if found.st_size > max_bytes:
            raise ModelError(
                f"the adapter's {path.name} is larger than {max_bytes} bytes: not for this model"
            )
        return file.read(max_bytes)


def _check_inside(path: Path, roots: list[Path] | None) -> None:
    if roots is not None and not any(path.is_relative_to(root) for root in roots):
        raise ModelError("the adapter's files lie outside of the allowed folders (--allowed_lora_sources)")


def _shown(name: str) -> str:
    return one_line(name)[:80]
