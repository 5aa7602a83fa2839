"""Processes that this one starts: what they are given, and how they are ended with all of theirs. No jax."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from hex_llm.errors import ConfigError
from hex_llm.ipc import protocol

# Stands in for a process on another host; the number of the replica or group, and a folder, follow.
STAND_IN = (sys.executable, "-P", "-m", "hex_llm.launch.remote")
MAX_PATH = 107  # bytes of a Unix socket's name


def kill_family(leader: int) -> None:
    """A session's leader and all of its children, in whatever session, stopped or not."""
    for pid in (leader, *_descendants(leader)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _descendants(pid: int) -> Iterable[int]:
    """As far as the system tells."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            # The name before these may hold anything, also brackets.
            numbers = file.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(numbers[1])
    family = [pid]
    for one in family:
        family += [child for child, parent in parents.items() if parent == one]
    return family[1:]


def environment(variables: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """For a process of ours, which finds what this one finds; `variables` besides."""
    found = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": found, **variables}


def private_folder() -> Path:
    """A new folder for sockets, which only this user can enter; short enough for the names of sockets."""
    base = tempfile.gettempdir()
    if len(os.fsencode(protocol.command_address(Path(base, "hex_llm-12345678")))) > MAX_PATH:
        base = "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix="hex_llm-", dir=base))
    except OSError as error:
        raise ConfigError(f"{base}: no folder can be made there: {error.strerror}") from error
