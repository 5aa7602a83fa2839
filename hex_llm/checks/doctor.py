"""`hex-llm doctor`: what this machine has, what is wrong with it, and what to type."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hex_llm import __version__
from hex_llm.bench.arguments import SWITCH, Parser
from hex_llm.config import EngineConfig, ServerConfig
from hex_llm.errors import HexError, SourceError
from hex_llm.flags import unknown

GIB = 1 << 30
LEAST_DISK = 2 * GIB
LEAST_MEMORY = 2 * GIB


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
    args, rest = parser.parse(argv)
    if rest:
        raise unknown(rest[0].partition("=")[0], vars(args))
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


def _python() -> list[Finding]:
    value = f"{platform.python_version()}, {platform.machine()}, {sys.platform}; hex-llm {__version__}"
    return [
        Finding("python", value, *(() if os.name == "posix" else ("only Linux and macOS are known to work",)))
    ]


def _packages() -> list[Finding]:
    """Versions of what is required; a missing one would have ended the command before."""
    names = ("jax", "jaxlib", "numpy", "fastapi", "tokenizers", "huggingface_hub", "llguidance")
    versions = {name: importlib.metadata.version(name) for name in names}
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    if versions["jax"].split(".")[:2] == versions["jaxlib"].split(".")[:2]:
        return [Finding("packages", told)]
    return [
        Finding("packages", told, "jax and jaxlib are of different versions", "pip install -U jax jaxlib")
    ]


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
    driver = _nvidia_driver()
    if driver is not None:
        found.append(Finding("driver", driver))
        if first.platform == "cpu":
            remedy = 'pip install "hex-llm[gpu]"'
            found[-1] = Finding("driver", driver, "there is a GPU, but JAX does not see it", remedy)
    if first.platform == "cpu" and list(Path("/dev").glob("accel*")):
        remedy = 'pip install "hex-llm[tpu]"'
        found.append(Finding("tpu", "/dev/accel0", "there is a TPU, but JAX does not see it", remedy))
    return found


def _nvidia_driver() -> str | None:
    if (command := shutil.which("nvidia-smi")) is None:
        return None
    query = [command, "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return "; ".join(done.stdout.splitlines()) or None


def _compiler() -> list[Finding]:
    """CPUs' own kernels are compiled when they are first used."""
    from hex_llm.kernels import cpu

    if cpu.panel_width() is not None:
        return [Finding("kernels", "the CPU's own are compiled")]
    compiler = shutil.which("c++") or shutil.which("g++")
    remedy = "" if compiler else "apt-get install g++"
    return [Finding("kernels", compiler or "no c++", "CPUs are served by slower kernels", remedy)]


def _memory() -> list[Finding]:
    text = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"(\w+): +(\d+) kB", text)}
    if not sizes:
        return []
    free, shared = sizes["MemAvailable"], shutil.disk_usage("/dev/shm") if Path("/dev/shm").exists() else None
    value = f"{free / GIB:.1f} of {sizes['MemTotal'] / GIB:.1f} GiB free"
    value += f", {shared.free / GIB:.1f} GiB of shared memory" if shared else ""
    return [
        Finding(
            "memory", value, *(("little memory is free", "stop something") if free < LEAST_MEMORY else ())
        )
    ]


def _disk() -> list[Finding]:
    from hex_llm.weights.source import private_folder

    folder = EngineConfig().cache_dir
    try:
        free = shutil.disk_usage(private_folder(folder / "default")).free
    except (OSError, SourceError) as error:
        return [Finding("cache", str(folder), str(error), "set HEX_LLM_CACHE to a folder of yours")]
    value = f"{folder}, {free / GIB:.1f} GiB free"
    return [
        Finding(
            "cache", value, *(("the disk is nearly full", f"rm -r {folder}") if free < LEAST_DISK else ())
        )
    ]


def _port() -> list[Finding]:
    port = int(os.environ.get("AIP_HTTP_PORT") or os.environ.get("PORT") or ServerConfig().port)
    with socket.socket() as one:
        one.settimeout(1)
        is_taken = one.connect_ex(("127.0.0.1", port)) == 0
    problem = ("someone listens there already", "hex-llm serve --port=0") if is_taken else ()
    return [Finding("port", str(port), *problem)]


def _hub() -> list[Finding]:
    has_token = any(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    mode = "offline (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else "online"
    return [Finding("hub", f"{mode}, {'a token' if has_token else 'no token: gated models are refused'}")]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    _python, _packages, _devices, _compiler, _memory, _disk, _port, _hub,
)  # fmt: skip
