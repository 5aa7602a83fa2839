"""`hex-llm doctor`: what this machine has, what is wrong with it, and what to type."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hex_llm import __version__
from hex_llm.bench.arguments import SWITCH, Parser
from hex_llm.config import EngineConfig, ServerConfig
from hex_llm.errors import HexError, SourceError

GIB = 1 << 30
LEAST_BYTES = 2 * GIB


class Finding(NamedTuple):
    name: str
    value: str
    problem: str = ""  # empty: all is well
    remedy: str = ""  # what to type


def doctor(argv: Sequence[str]) -> None:
    parser = Parser(
        "doctor", "What this machine has, what is wrong, and what to type.", "[--json]", program="hex-llm"
    )
    parser.add_flags("flags", [("json", SWITCH, False, "print JSON")])
    args = parser.parse_all(argv)
    found = [finding for check in CHECKS for finding in check()]
    print(json.dumps([one._asdict() for one in found], indent=1) if args.json else as_text(found))
    if wrong := sum(bool(one.problem) for one in found):
        raise HexError(f"{wrong} problem{'s' * (wrong > 1)} found")


def as_text(found: Sequence[Finding]) -> str:
    lines = []
    for one in found:
        lines.append(f"{'!' if one.problem else ' '} {one.name:<10} {one.value}")
        if one.problem:
            lines.append(f"{'':13}{one.problem}" + (f": {one.remedy}" if one.remedy else ""))
    return "\n".join(lines)


def _packages() -> list[Finding]:
    """Versions of what is required; a missing one would have ended the command before."""
    names = ("jax", "jaxlib", "numpy", "fastapi", "tokenizers", "huggingface_hub", "llguidance")
    told = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    value = f"hex-llm {__version__}, Python {platform.python_version()} on {platform.machine()}, {told}"
    return [Finding("versions", value)]


def _devices() -> list[Finding]:
    """What JAX sees, and accelerators that it does not."""
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        return [Finding("devices", "none", " ".join(str(error).split())[:160], "unset JAX_PLATFORMS")]
    first, kinds = devices[0], sorted({one.device_kind for one in devices})
    stats = first.memory_stats() or {}
    memory = f", {stats['bytes_limit'] / GIB:.1f} GiB each" if "bytes_limit" in stats else ""
    value = f"{len(devices)} × {', '.join(kinds)} ({first.platform}){memory}"
    found = [Finding("devices", value)]
    here = {"gpu": _nvidia_driver(), "tpu": next((str(one) for one in Path("/dev").glob("accel*")), None)}
    for kind, what in ((kind, what) for kind, what in here.items() if what):
        unseen = (f"JAX does not see this {kind.upper()}", f'pip install "hex-llm[{kind}]"')
        found.append(Finding("driver", what, *(unseen if first.platform == "cpu" else ())))
    return found


def _nvidia_driver() -> str | None:
    if (command := shutil.which("nvidia-smi")) is None:
        return None
    query = [command, "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return "; ".join(done.stdout.splitlines()) or None


def _host() -> list[Finding]:
    from hex_llm.kernels import cpu

    # CPUs' own kernels are compiled when they are first used.
    slow = ("CPUs are served by slower kernels", "" if shutil.which("g++") else "apt-get install g++")
    found = [Finding("kernels", "of CPUs", *(() if cpu.panel_width() else slow))]
    free = free_bytes_of_host()
    little = ("little memory is free", "stop something") if free < LEAST_BYTES else ()
    return [*found, Finding("memory", f"{free / GIB:.1f} GiB free", *little)]


def free_bytes_of_host() -> int:
    import jax

    from hex_llm.execution.load import free_bytes

    return free_bytes(jax.devices("cpu")[:1]) or 0


def _disk() -> list[Finding]:
    from hex_llm.weights.source import private_folder

    folder = EngineConfig().cache_dir
    try:
        free = shutil.disk_usage(private_folder(folder / "default")).free
    except (OSError, SourceError) as error:
        return [Finding("cache", str(folder), str(error), "set HEX_LLM_CACHE to a folder of yours")]
    full = ("the disk is nearly full", f"rm -r {folder}") if free < LEAST_BYTES else ()
    return [Finding("cache", f"{folder}, {free / GIB:.1f} GiB free", *full)]


def _net() -> list[Finding]:
    port = int(os.environ.get("AIP_HTTP_PORT") or os.environ.get("PORT") or ServerConfig().port)
    with socket.socket() as one:
        one.settimeout(1)
        is_taken = one.connect_ex(("127.0.0.1", port)) == 0
    taken = ("someone listens there already", "hex-llm serve --port=0") if is_taken else ()
    has_token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    hub = "offline" if os.environ.get("HF_HUB_OFFLINE") else "online"
    told = f"{hub}, {'a token' if has_token else 'no token: gated models are refused'}"
    return [Finding("port", str(port), *taken), Finding("hub", told)]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (_packages, _devices, _host, _disk, _net)
