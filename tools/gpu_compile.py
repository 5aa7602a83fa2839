"""Compiles the steps of known models for GPUs by XLA's own compiler, without a GPU: of each model two layers,
or all of Llama 3.1 405B in fp8 for eight GPUs, and what each would hold. Weights and pages are described.

    python -m tools.gpu_compile [--gpus L4,A100,...] [--models "llama-8b;..."] [--sharded 8] [--layers 2]

It needs the CUDA packages of JAX (`jax[cuda12]` or `jax[cuda13]`), some gigabytes, on x86-64 Linux.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs; the compiler comes with the topology

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from hex_llm.execution import programs
from hex_llm.execution.batch import StepShape, num_choices
from hex_llm.execution.kernel_choice import Devices, choose_kernels, page_shapes
from hex_llm.execution.runner import GRAPHS, NO_GRAPHS, UNTRIED_PRODUCTS
from hex_llm.execution.slots import SlotLayout
from hex_llm.execution.weight_plan import FORMS, plan_weights
from hex_llm.kernels import gpu_launch
from hex_llm.models.families import model_spec
from hex_llm.models.linear import Dense
from hex_llm.models.params import Param, Weights
from hex_llm.models.quantized import Float8
from hex_llm.parallel.shardings import PAGES, make_mesh, sharding
from tools.gpu_lowering import for_a_gpu
from tools.gpu_models import GPUS, MODELS, STEPS, can_have, step_of
from tools.tpu_models import LLAMA_70B

CONFIG = {
    **LLAMA_70B,
    "num_hidden_layers": 126,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
}
BLOCK, CONTEXT, ROWS = 32, 8192, 64
SHARDED_STEPS = {"decode": StepShape(ROWS, ROWS, 0), "prefill": StepShape(2048, ROWS, 2)}
DTYPE = np.dtype(jnp.bfloat16)


def described(weights: Weights, mesh: Mesh) -> Any:
    """As GPUs hold them when they are laid out."""

    def array(param: Param, num_axes: int | None = None, dtype: Any = None) -> jax.ShapeDtypeStruct:
        lies = NamedSharding(mesh, P(*sharding(mesh, param.shape, param.axes).spec[:num_axes]))
        return jax.ShapeDtypeStruct(param.shape[:num_axes], dtype or param.dtype or DTYPE, sharding=lies)

    def one(part: Any) -> Any:
        if isinstance(part, Param):
            return array(part)
        if part.array.rounded_to is None:
            return Dense(array(part.array), part.num_outputs)
        return Float8(
            array(part.array, dtype=jnp.float8_e4m3fn), array(part.array, part.num_outputs, jnp.float32)
        )

    return jax.tree.map(one, weights, is_leaf=lambda node: isinstance(node, Dense | Param))


def local_bytes(tree: Any) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compile_sharded(gpu: str, num: int, num_layers: int | None) -> None:
    mesh = make_mesh(num, topology_of(gpu, num))
    spec = model_spec(CONFIG, max_model_len=CONTEXT)
    spec = replace(spec, layers=spec.layers[:num_layers]).split_over(mesh.size)
    devices = Devices("gpu", mesh.size, BLOCK, DTYPE, DTYPE)
    kernels = choose_kernels(spec, devices)
    plan = plan_weights(spec, None, mesh.size, kernels.can_multiply, FORMS["fp8"])
    weights = described(plan.weights, mesh)
    layout = SlotLayout(ROWS + 1, CONTEXT, spec.vocab_size, CONTEXT // BLOCK)
    lie, whole = NamedSharding(mesh, PAGES), NamedSharding(mesh, P())
    shapes = page_shapes(spec, devices, ROWS * CONTEXT // BLOCK + 1)
    pages = [jax.ShapeDtypeStruct(shape, DTYPE, sharding=lie) for shape in shapes]
    slots = jax.ShapeDtypeStruct((layout.num_slots, layout.width), jnp.int32, sharding=whole)
    both = programs.split_by_head(kernels.attention, mesh), kernels.experts
    context = programs.ProgramContext(spec, mesh, layout, num_choices(ROWS), *both)
    print(f"{len(spec.layers)} layers on {mesh.size} × {gpu}, of each:", flush=True)
    print(f"weights {local_bytes(weights) / 1e9:.2f} GB, pages {local_bytes(pages) / 1e9:.2f} GB", flush=True)
    for name, key in SHARDED_STEPS.items():
        began = time.perf_counter()
        with gpu_launch.made_for(GPUS[gpu].capability):
            function, arguments, donated, out = programs.described(key, context, weights, pages, slots, {})
            lowered = jax.jit(function, donate_argnums=donated, out_shardings=out).lower(*arguments)
        compiled = lowered.compile(compiler_options=NO_GRAPHS | UNTRIED_PRODUCTS)
        memory: Any = compiled.memory_analysis()
        print(
            f"{name} of {key.num_tokens} tokens: arguments {memory.argument_size_in_bytes / 1e9:.2f} GB, "
            f"temporaries {memory.temp_size_in_bytes / 1e9:.2f} GB, {time.perf_counter() - began:.0f} s",
            flush=True,
        )


def topology_of(gpu: str, num: int) -> Any:
    target = GPUS[gpu].described(gpu)
    return topologies.get_topology_desc("", "cuda", target_config=target, topology=f"1x1x{num}").devices


def compile_steps(gpu: str, names: list[str], folder: Path | None) -> int:
    """Says of each step what came of it; how many fail."""
    lies, failed = SingleDeviceSharding(topology_of(gpu, 1)[0]), 0
    for name in names:
        for shape in STEPS if can_have(MODELS[name], GPUS[gpu]) else []:
            began, about = time.perf_counter(), f"{gpu}, {name}, {shape.num_tokens} tokens"
            try:
                compiled = compiled_step(gpu, name, shape, lies)
                told = f"temporaries {compiled.memory_analysis().temp_size_in_bytes / 1e6:.0f} MB"
                if folder is not None:
                    (folder / f"{about}.hlo").write_text(compiled.as_text())
            except Exception as error:  # whatever it is, the others are of interest too
                told, failed = f"FAILED: {str(error)[:300]}", failed + 1
            print(
                f"{about}, {shape.max_chunks} chunks: {told}, {time.perf_counter() - began:.0f} s", flush=True
            )
    return failed


def compiled_step(gpu: str, name: str, shape: StepShape, lies: Any) -> Any:
    with gpu_launch.made_for(GPUS[gpu].capability), for_a_gpu():
        function, *arguments = step_of(MODELS[name], shape)
        placed = partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies))
        lowered = jax.jit(function, donate_argnums=(1, 2)).lower(*placed(arguments))
    graphs = NO_GRAPHS if shape.max_chunks else GRAPHS
    return lowered.compile(compiler_options=graphs | UNTRIED_PRODUCTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", default="L4,A100,H200", help=f"of {', '.join(GPUS)}")
    parser.add_argument("--models", help="with semicolons; without it, all of these: " + "; ".join(MODELS))
    parser.add_argument("--keep", type=Path, help="a folder for the programs as XLA left them")
    parser.add_argument("--sharded", type=int, help="instead, the 405B over so many GPUs")
    parser.add_argument("--layers", type=int, help="of that only so many, for a quick try")
    options = parser.parse_args()
    names, failed = options.models.split(";") if options.models else list(MODELS), 0
    for gpu in options.gpus.split(","):
        if options.sharded:
            compile_sharded(gpu, options.sharded, options.layers)
        else:
            failed += compile_steps(gpu, names, options.keep)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
