"""Kernels of our own for one CPU, in float32: cpu.cc, compiled where there is a C++ compiler.

Matrices lie in panels: [outputs / width, inputs, width], so that a product reads them in order. For
quantized ones see cpu_quantized.py.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from stat import S_ISVTX

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.kernels.attention import Batch, KVPages, Options
from hex_llm.kernels.experts import Activation
from hex_llm.kernels.matrix import PlainMatrix
from hex_llm.kernels.reference import write_kv

log = logging.getLogger(__name__)

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cc")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
# Left to itself, GCC moves the products of a tile round until its registers no longer suffice.
FLAGS = ("-O3", "-march=native", "-fno-schedule-insns", "-std=c++17", "-fPIC", "-w")
COMPILE_S = 120
PANEL_VECTORS = 2  # in a panel's width; head sizes are whole vectors
MATMUL, ATTENTION = "hex_llm_matmul", "hex_llm_attention"
QUANTIZED_MATMUL = "hex_llm_quantized_matmul"


class PanelMatrix(PlainMatrix):
    """A Matrix [*outputs, *inputs] (models/linear.py), cut into panels of some outputs each."""

    outputs: tuple[int, ...]
    turned: bool  # the two axes of outputs lie turned round

    @property
    def width(self) -> int:
        """Outputs of a panel."""
        raise NotImplementedError

    def _multiply(self, x: jax.Array, num_columns: int, gated: bool = False) -> jax.Array:
        raise NotImplementedError

    def matmul(self, x: jax.Array) -> jax.Array:
        """x [T, inputs] -> [T, *outputs]."""
        out = self._multiply(x, math.prod(self.outputs))
        if self.turned:
            return out.reshape(len(x), *reversed(self.outputs)).swapaxes(1, 2)
        return out.reshape(len(x), *self.outputs)

    def gated(self, x: jax.Array, activation: Activation, bias: jax.Array | None = None) -> jax.Array:
        """Of outputs [F, 2]: x [T, D] -> [T, F], the activation of the gates times the ups; silu is applied
        while its block is still in the cache."""
        if activation is jax.nn.silu and bias is None and self.can_gate:
            return self._multiply(x, self.outputs[0], gated=True)
        return super().gated(x, activation, bias)

    @property
    def can_gate(self) -> bool:
        """No panel has both gates and ups."""
        return self.turned and self.outputs[0] % self.width == 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Panels(PanelMatrix):
    """Of float32; outputs and inputs are filled up with zeros to multiples of the width."""

    panels: jax.Array  # [N, inputs, width]
    outputs: tuple[int, ...] = field(metadata={"static": True})
    num_inputs: int = field(metadata={"static": True})
    turned: bool = field(default=False, metadata={"static": True})

    @property
    def width(self) -> int:
        return int(self.panels.shape[2])

    def rows(self, which: jax.Array) -> jax.Array:
        """[..., inputs]: the weights of some outputs."""
        return self.panels[which // self.width, : self.num_inputs, which % self.width]

    def _multiply(self, x: jax.Array, num_columns: int, gated: bool = False) -> jax.Array:
        shape = jax.ShapeDtypeStruct((len(x), num_columns), jnp.float32)
        x = jnp.pad(x, ((0, 0), (0, self.panels.shape[1] - self.num_inputs)))
        return jax.ffi.ffi_call(MATMUL, shape)(x, self.panels, gated=gated)


@functools.partial(jax.jit, static_argnums=(1, 2), static_argnames="turned")
def to_panels(weight: jax.Array, num_output_axes: int, width: int, turned: bool = False) -> Panels:
    outputs = weight.shape[:num_output_axes]
    matrix = (weight.swapaxes(0, 1) if turned else weight).reshape(math.prod(outputs), -1)
    num_inputs = matrix.shape[1]
    matrix = jnp.pad(matrix, ((0, -len(matrix) % width), (0, -num_inputs % width)))
    panels = matrix.reshape(-1, width, matrix.shape[1]).swapaxes(1, 2)
    return Panels(panels, outputs, num_inputs, turned)


def paged_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: KVPages, batch: Batch, options: Options
) -> tuple[jax.Array, KVPages]:
    """See kernels.attention.PagedAttention; pages are plain ones of float32."""
    pages = write_kv(k, v, pages, batch.kv_slots)
    out = jax.ffi.ffi_call(ATTENTION, jax.ShapeDtypeStruct(q.shape, q.dtype))(
        q,
        pages,
        batch.tables,
        batch.positions,
        batch.rows,
        jnp.full(q.shape[1:3], -jnp.inf) if options.sinks is None else options.sinks,
        scale=np.float32(options.scale),
        softcap=np.float32(options.softcap or 0),
        window=np.int64(options.mask.window or 0),
        chunk=np.int64(options.mask.attention_chunk or 0),
    )
    return out, pages


def panel_width() -> int | None:
    """None: there are no kernels here. The first question compiles them, beside what XLA keeps of its own."""
    return panel_widths()[0]


def quantized_panel_width() -> int | None:
    """None: or none for quantized matrices, for this processor does not multiply bytes."""
    return panel_widths()[1]


@functools.cache
def panel_widths() -> tuple[int | None, int | None]:
    try:
        library = _load_library()
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no CPU kernels, so the model runs about half as fast: %s", error)
        return None, None
    quantized = int(library.hex_llm_quantized_panel_width()) or None
    for name in (MATMUL, ATTENTION, *([QUANTIZED_MATMUL] if quantized else [])):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library[name]), platform="cpu")
    return int(library.hex_llm_panel_width()), quantized


def claim_folder(folder: Path) -> bool:
    """Makes it where it is missing; false where anyone but this user can put files there, or another folder
    in its place: what is loaded from there runs as this user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    own, parent = folder.stat(), folder.resolve().parent.stat()
    if own.st_uid != os.getuid() or own.st_mode & 0o022:
        return False
    # In a sticky one, such as /tmp, only owners can rename what is theirs.
    return parent.st_uid in (os.getuid(), 0) and not (parent.st_mode & 0o022 and not parent.st_mode & S_ISVTX)


def _load_library() -> ctypes.CDLL:
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if cache and "://" not in cache and claim_folder(Path(cache)):
        return ctypes.CDLL(str(_compile(Path(cache))))
    with tempfile.TemporaryDirectory() as folder:  # once loaded, the file is not needed
        return ctypes.CDLL(str(_compile(Path(folder))))


def _compile(folder: Path) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler is installed")
    path = folder / f"hex_llm-{_fingerprint(compiler)}.so"
    if path.exists():
        return path
    with (folder / "hex_llm-compiling").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who starts at the same time as another waits for its library
        if not path.exists():
            _compile_to(path, compiler)
    return path


def _compile_to(path: Path, compiler: str) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as parts, ThreadPoolExecutor() as compilers:

        def run(output: str, *arguments: str) -> str:
            made, include = f"{parts}/{output}", f"-I{jax.ffi.include_dir()}"
            command = [compiler, *FLAGS, include, *arguments, "-o", made]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
            return made

        objects = compilers.map(lambda source: run(f"{source.stem}.o", "-c", str(source)), SOURCES)
        Path(run("whole", "-shared", *objects)).replace(path)


def _fingerprint(compiler: str) -> str:
    """Of all that the library depends on: it is made for this very processor."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else [platform.processor()]
    features = {line for line in lines if line.startswith(("flags", "Features", "CPU part", "model name"))}
    texts = [source.read_text() for source in (*SOURCES, *HEADERS)]
    parts = [*texts, compiler, *FLAGS, version("jaxlib"), platform.machine(), *sorted(features)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
