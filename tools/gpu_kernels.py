"""Compiles the Pallas-Triton kernels of known models' steps for GPUs, without a GPU, and says what they need.

    python -m tools.gpu_kernels [--gpus L4,A100] [--models llama-8b,...] [--all]

Weights and pages are only described. The compiler is that of the `triton` package; XLA has one of another
version: in registers they may differ, in what a program shares between its warps two versions did not.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jaxlib.mlir import ir
from jaxlib.triton import dialect

from hex_llm.execution import programs
from hex_llm.execution.adapters import AdapterLayout
from hex_llm.execution.batch import StepShape, num_choices
from hex_llm.execution.kernel_choice import DTYPES, KV_DTYPES, Devices, choose_kernels, page_shapes
from hex_llm.execution.slots import SlotLayout
from hex_llm.execution.weight_layouts import for_gpus, in_words
from hex_llm.execution.weight_plan import FORMS, plan_weights
from hex_llm.kernels import gpu_experts, gpu_launch
from hex_llm.models.families import model_spec
from hex_llm.models.linear import Dense
from hex_llm.models.params import Param, Weights
from hex_llm.models.quantized import Quantized, quantize
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import make_mesh
from hex_llm.weights.grouped import Form
from tools.gpu_common import SHAPES
from tools.tpu_models import AWQ, GEMMA_2_9B, GEMMA_3_27B, MIXTRAL_8X7B

CAPABILITIES = {"A100": 8.0, "A10": 8.6, "L4": 8.9, "H100": 9.0}
QUANTIZED = {"awq": AWQ, "mxfp4": Form(4, group=32, is_float=True), **FORMS}
BLOCK, MAX_LEN, MOST, NUM_BLOCKS = 32, 8192, 512, 1001
ADAPTERS = (16, 16)  # slots, and ranks of each
STEPS = [StepShape(n, n, 0) for n in (1, 8, 16, 64, 128, 256, 512)]
STEPS += [StepShape(64, 16, 2), StepShape(512, 64, 4), StepShape(2048, 64, 4), StepShape(8192, 64, 8)]


class Kernel(NamedTuple):
    name: str
    text: str  # in Triton's own language
    warps: int
    stages: int


class Needs(NamedTuple):
    shared: int  # bytes
    registers: int  # of a thread
    spilled: int  # bytes of a thread that registers have no room for


class Model(NamedTuple):
    config: dict[str, Any]
    quantized: str | None = None
    kv_dtype: str = "auto"
    adapted: bool = False
    dtype: str = "bfloat16"


def _known() -> dict[str, Model]:
    llama, gpt_oss = SHAPES["llama-8b"], SHAPES["gpt-oss-20b"]
    few_heads = llama | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    many_kv_heads = llama | {"num_key_value_heads": 32, "hidden_size": 3072}  # of 96
    return {
        "llama-8b": Model(llama),
        **{f"llama-8b in {form}": Model(llama, form) for form in ("awq", "int8", "fp8")},
        "llama-8b, pages of int8": Model(llama, kv_dtype="int8"),
        "llama-8b, adapters": Model(llama, adapted=True),
        "llama-8b in float16": Model(llama, dtype="float16"),
        "llama-8b in float16, pages of fp8": Model(llama, kv_dtype="fp8", dtype="float16"),
        "llama-8b in float32": Model(llama, dtype="float32"),
        "heads of 64": Model(few_heads),
        "heads of 96": Model(many_kv_heads),
        "gemma-2-9b": Model(GEMMA_2_9B),
        "gemma-2-9b, pages of int8": Model(GEMMA_2_9B, kv_dtype="int8"),
        "gemma-2-9b in float32": Model(GEMMA_2_9B, dtype="float32"),
        "gemma-3-27b": Model(GEMMA_3_27B),
        "qwen3-8b": Model(SHAPES["qwen3-8b"]),
        "qwen3-30b-a3b": Model(SHAPES["qwen3-30b-a3b"]),
        "qwen3-30b-a3b in awq": Model(SHAPES["qwen3-30b-a3b"], "awq"),
        "mixtral-8x7b": Model(MIXTRAL_8X7B),
        "mixtral-8x7b in awq": Model(MIXTRAL_8X7B, "awq"),
        "mixtral-8x7b in awq, float16": Model(MIXTRAL_8X7B, "awq", dtype="float16"),
        "gpt-oss-20b": Model(gpt_oss),
        "gpt-oss-20b in mxfp4": Model(gpt_oss, "mxfp4"),
    }


MODELS = _known()

# ---- which kernels there are


def kernels_of_step(model: Model, shape: StepShape, capability: float) -> Iterator[Kernel]:
    """Those of the last two layers, which have all kinds that the model has, and of the logits."""
    jax.clear_caches()  # of what was traced for another
    with gpu_launch.made_for(capability):
        spec = model_spec(model.config, max_model_len=MAX_LEN)
        spec = replace(spec, layers=spec.layers[-2:])
        dtype = np.dtype(DTYPES[model.dtype])
        kv_dtype = dtype if model.kv_dtype == "auto" else np.dtype(KV_DTYPES[model.kv_dtype])
        yield from lowered_kernels(*_step(spec, Devices("gpu", 1, BLOCK, dtype, kv_dtype), model, shape))


def lowered_kernels(function: Any, *arguments: Any) -> Iterator[Kernel]:
    """Of a function as it is lowered for GPUs: within gpu_launch.made_for."""
    gpu = AbstractDevice("NVIDIA", None, "gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    program: Any = lowered.compiler_ir()
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


def _step(spec: ModelSpec, devices: Devices, model: Model, shape: StepShape) -> tuple[Any, ...]:
    """The function and its arguments."""
    kernels = choose_kernels(spec, devices)
    form = QUANTIZED[model.quantized] if model.quantized else None
    weights = _held(plan_weights(spec, None, 1, kernels.can_multiply, form).weights, spec, devices.dtype)
    layout = SlotLayout(MOST + 1, MAX_LEN, spec.vocab_size, MAX_LEN // BLOCK)
    shapes = page_shapes(spec, devices, NUM_BLOCKS)
    pages = [jax.eval_shape(partial(kernels.empty_pages, one, devices.kv_dtype)) for one in shapes]
    slots = jax.ShapeDtypeStruct((layout.num_slots, layout.width), jnp.int32)
    mesh = make_mesh(1, jax.devices("cpu")[:1])
    adapters = AdapterLayout(spec, mesh, devices.dtype, *ADAPTERS, kernels.adapter_kernels.slots_first)
    setting = programs.ProgramContext(
        spec,
        mesh,
        layout,
        num_choices(MOST),
        kernels.attention,
        kernels.experts,
        adapters,
        kernels.adapter_kernels,
    )
    held = _described(adapters.params(ADAPTERS[0]), devices.dtype) if model.adapted else {}
    key = shape._replace(adapted=model.adapted)
    described = programs.described(key, setting, weights, pages, slots, held)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), described.arguments)
    return described.function, *arguments


def _held(weights: Weights, spec: ModelSpec, dtype: np.dtype[Any]) -> Any:
    def loaded(part: Any) -> Any:
        described = _described(part, dtype)
        if isinstance(part, Dense) and (to := part.array.rounded_to) is not None:
            return jax.eval_shape(partial(quantize, to=to), described)
        return described

    weights = jax.tree.map(loaded, weights, is_leaf=lambda node: isinstance(node, Dense | Quantized | Param))
    can_gate = gpu_experts.can_fuse(spec.activation, dtype)
    return jax.eval_shape(partial(for_gpus, is_alone=True, can_gate=can_gate, hold=_in_words), weights)


def _in_words(part: Any) -> Any:
    return in_words(part) if isinstance(part, Quantized) else part


def _described(tree: Any, dtype: np.dtype[Any]) -> Any:
    def one(param: Param) -> jax.ShapeDtypeStruct:
        last = param.shape[-1] // (2 if param.packed else 1)
        return jax.ShapeDtypeStruct((*param.shape[:-1], last), param.dtype or dtype)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, Param))


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
    parser.add_argument("--gpus", default="L4,A100,H100", help=f"of {', '.join(CAPABILITIES)}")
    parser.add_argument("--models", help="with semicolons; without it, all of these: " + "; ".join(MODELS))
    parser.add_argument("--all", action="store_true", help="a line for each kernel")
    options = parser.parse_args()
    names, failed = options.models.split(";") if options.models else list(MODELS), False
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawning) as pool:
        for gpu in options.gpus.split(","):
            limit, found = _limit(CAPABILITIES[gpu]), _kernels(names, CAPABILITIES[gpu])
            print(f"{gpu}: {len(found)} kernels, which may share {limit:,} bytes", flush=True)
            needs = pool.map(partial(needs_of, capability=CAPABILITIES[gpu]), found, chunksize=4)
            for kernel, one in zip(found, needs, strict=True):
                fits = one.shared <= limit
                failed |= not fits
                if options.all or not fits or one.spilled > 128:
                    print(f"  {kernel.name} shares {one.shared:,}, {one.registers} registers", end="")
                    print(f", {one.spilled} bytes spilled: {found[kernel][0]}" + " TOO MUCH" * (not fits))
    sys.exit(failed)


def _limit(capability: float) -> int:
    with gpu_launch.made_for(capability):
        return gpu_launch.shared_bytes()


def _kernels(names: list[str], capability: float) -> dict[Kernel, list[str]]:
    """And in which steps they are."""
    found: dict[Kernel, list[str]] = {}
    for name in names:
        model = MODELS[name]
        if "fp8" in (model.quantized, model.kv_dtype) and capability < CAPABILITIES["L4"]:
            continue
        for shape in STEPS:
            for kernel in kernels_of_step(model, shape, capability):
                found.setdefault(kernel, []).append(f"{name}, {shape.num_tokens} tokens")
    return found


if __name__ == "__main__":
    main()
