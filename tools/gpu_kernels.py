"""Compiles the Pallas-Triton kernels of known models' steps for GPUs, without a GPU, and says what they need.

    python -m tools.gpu_kernels [--gpus L4,A100,...] [--models "llama-8b;..."] [--all]

The compiler is that of the `triton` package. XLA's is of another version: in registers they may differ; in
what a program shares between its warps they did not. tools/gpu_compile.py has XLA's, which takes gigabytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.triton import dialect

from hex_llm.execution.batch import StepShape
from hex_llm.kernels import gpu_launch
from tools.gpu_lowering import lowered
from tools.gpu_models import GPUS, MODELS, STEPS, Gpu, Model, can_have, step_of


class Kernel(NamedTuple):
    name: str
    text: str  # in Triton's own language
    warps: int
    stages: int


class Needs(NamedTuple):
    shared: int  # bytes
    registers: int  # of a thread
    spilled: int  # bytes of a thread that registers have no room for


# ---- which kernels there are


def kernels_of_step(model: Model, shape: StepShape, gpu: Gpu) -> Iterator[Kernel]:
    with gpu_launch.made_for(gpu.capability):
        yield from lowered_kernels(*step_of(model, shape))


def lowered_kernels(function: Any, *arguments: Any) -> Iterator[Kernel]:
    """Within gpu_launch.made_for."""
    program: Any = lowered(function, *arguments).compiler_ir()
    dialect.register_dialect(program.context)
    for call in _kernel_calls(program):
        with program.context:
            text = ir.Module.parse(call["ir"].value_bytes).operation.get_asm(enable_debug_info=False)
        yield Kernel(call["name"].value, text, call["num_warps"].value, call["num_stages"].value)


def _kernel_calls(op: Any) -> Iterator[dict[str, Any]]:
    op = op.operation
    if op.name == "stablehlo.custom_call" and "triton" in str(op.attributes["call_target_name"]):
        yield {one.name: one.attr for one in ir.DictAttr(op.attributes["mhlo.backend_config"])}
    for region in op.regions:
        for block in region:
            for inner in block:
                yield from _kernel_calls(inner)


# ---- what they need


def needs_of(kernel: Kernel, capability: float) -> Needs:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler
    from triton.compiler import compile as compile_kernel

    target = GPUTarget("cuda", round(10 * capability), 32)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ttir", Path(folder) / "kernel.cubin"
        source.write_text(kernel.text)
        made = compile_kernel(str(source), target=target, options=options)
        binary.write_bytes(made.asm["cubin"])
        tool = Path(compiler.__file__).parent / "bin" / "cuobjdump"
        told = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found
    return Needs(made.metadata.shared, *map(int, found.groups()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", default="L4,A100,H200", help=f"of {', '.join(GPUS)}")
    parser.add_argument("--models", help="with semicolons; without it, all of these: " + "; ".join(MODELS))
    parser.add_argument("--all", action="store_true", help="a line for each kernel")
    options = parser.parse_args()
    names, failed = options.models.split(";") if options.models else list(MODELS), False
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for name in options.gpus.split(","):
            gpu = GPUS[name]
            found = _kernels(names, gpu)
            print(f"{name}: {len(found)} kernels", flush=True)
            needs = pool.map(partial(needs_of, capability=gpu.capability), found, chunksize=4)
            for kernel, one in zip(found, needs, strict=True):
                fits = one.shared <= gpu.most_shared
                failed |= not fits
                if options.all or not fits or one.spilled > 128:
                    print(f"  {kernel.name} shares {one.shared:,}, {one.registers} registers", end="")
                    print(f", {one.spilled} bytes spilled: {found[kernel][0]}" + " TOO MUCH" * (not fits))
    sys.exit(failed)


def _kernels(names: list[str], gpu: Gpu) -> dict[Kernel, list[str]]:
    """And in which steps they are."""
    found: dict[Kernel, list[str]] = {}
    for name in names:
        for shape in STEPS if can_have(MODELS[name], gpu) else []:
            for kernel in kernels_of_step(MODELS[name], shape, gpu):
                found.setdefault(kernel, []).append(f"{name}, {shape.num_tokens} tokens")
    return found


if __name__ == "__main__":
    main()
