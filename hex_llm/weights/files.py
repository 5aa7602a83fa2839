"""Which of a model's files are wanted, whatever place they come from, and what a disk does or refuses."""

from __future__ import annotations

import errno
import fnmatch
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hex_llm.errors import SourceError

PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED_DISK = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class WantedFiles:
    """Files of a model: those like `files`, if one is like `required`; else the only GGUF."""

    files: tuple[str, ...]
    required: tuple[str, ...]
    max_bytes: int | None = None  # of all of them; None: any

    def check_size(self, num_bytes: int, origin: str) -> None:
        """Before anything is fetched."""
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            raise SourceError(
                f"{origin} has {num_bytes} bytes, more than {self.max_bytes}: not for this model"
            )


TEXT = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")
MODEL = WantedFiles((*TEXT, "*.safetensors"), ("*.safetensors",))
TOKENIZER = WantedFiles(TEXT, ("tokenizer.json", "tokenizer.model", "vocab.json"))
ADAPTER = WantedFiles(("adapter_config.json", "adapter_model.safetensors"), ("adapter_model.safetensors",))
CONFIG = WantedFiles(("config.json", "generation_config.json"), ("config.json",))


def choose(names: Iterable[str], wish: WantedFiles, origin: str, joint: str) -> list[str]:
    """The wanted ones of `names`. Only the top folder counts, for others hold copies in other formats; but at
    the end, what sentence-transformers' models tell of themselves."""
    names = sorted(names)
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            raise SourceError(
                f"{origin} holds {name!r}, a name that leads out of its folder; do not trust it"
            )
    top = [name for name in names if "/" not in name]
    if not like(top, *wish.required):
        return [_single_gguf(top, wish, origin, joint)]
    chosen = like(top, *wish.files)
    copies = like(chosen, "consolidated*.safetensors") if like(chosen, "model*.safetensors") else []
    modules = like(names, "[0-9]_*/config.json") if "modules.json" in chosen else []
    return [name for name in chosen if name not in copies] + modules


def _single_gguf(names: list[str], wish: WantedFiles, origin: str, joint: str) -> str:
    ggufs = like(names, "*.gguf")
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise SourceError(f"{origin} holds several GGUF files; name one: {some(ggufs, origin + joint)}")
    if pickles := like(names, *PICKLES):
        raise SourceError(
            f"{origin} holds only PyTorch files ({some(pickles)}), which can run code when they are read; "
            "convert them to safetensors"
        )
    raise SourceError(
        f"{origin} holds no {' or '.join(wish.required)} and no GGUF file; check that it is a model"
    )


def like(names: Iterable[str], *patterns: str) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def some(names: list[str], prefix: str = "") -> str:
    return ", ".join(prefix + name for name in names[:20]) + (", …" if len(names) > 20 else "")


def folder_or_gguf(paths: list[Path]) -> Path:
    return paths[0] if paths[0].suffix == ".gguf" else paths[0].parent


def read_into(view: memoryview, file: BinaryIO, start: int) -> None:
    """Fills it with the bytes from `start` on. EOFError: the file was cut short."""
    while view:
        count = os.preadv(file.fileno(), [view], start)
        if not count:
            raise EOFError
        view, start = view[count:], start + count


@contextmanager
def refusals(explain: Callable[[Exception], str]) -> Iterator[None]:
    """Inside, what a library raises becomes a SourceError in the words of `explain`; a disk's error stays."""
    try:
        yield
    except SourceError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (*FULL_DISK, *CLOSED_DISK):
            raise
        raise SourceError(explain(error)) from error


def disk_problem(error: OSError) -> str:
    if error.errno in FULL_DISK:
        return "the disk is full; make room, or set another --download_dir (HF_HOME for the hub's cache)"
    return (
        f"{error.strerror or type(error).__name__}; check the permissions of its folder and of --download_dir"
    )
