"""Compiles the steps of Llama 3.1 405B in fp8 for eight GPUs of the kind that this machine has one of, and
says what each would hold. Weights and pages are only described.

    python -m tools.gpu_compile [--layers 2] [--gpus 8]
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.execution import programs
from hex_llm.execution.batch import StepShape, num_choices
from hex_llm.execution.kernel_choice import Devices, choose_kernels, page_shapes
from hex_llm.execution.runner import NO_GRAPHS, UNTRIED_PRODUCTS
from hex_llm.execution.slots import SlotLayout
from hex_llm.execution.weight_plan import FORMS, plan_weights
from hex_llm.models.families import model_spec
from hex_llm.models.linear import Dense
from hex_llm.models.params import Param, Weights
from hex_llm.models.quantized import Float8
from hex_llm.parallel.shardings import PAGES, make_mesh, sharding
from tools.tpu_models import LLAMA_70B

CONFIG = {
    **LLAMA_70B,
    "num_hidden_layers": 126,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
}
BLOCK, CONTEXT, ROWS = 32, 8192, 64
STEPS = {"decode": StepShape(ROWS, ROWS, 0), "prefill": StepShape(2048, ROWS, 2)}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, help="only so many, for a quick try")
    parser.add_argument("--gpus", type=int, default=8)
    options = parser.parse_args()
    found = topologies.get_topology_desc("", "cuda", topology=f"1x1x{options.gpus}")
    mesh = make_mesh(options.gpus, found.devices)
    spec = model_spec(CONFIG, max_model_len=CONTEXT)
    spec = replace(spec, layers=spec.layers[: options.layers]).split_over(mesh.size)
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
    print(f"{len(spec.layers)} layers on {mesh.size} × {found.devices[0].device_kind}, of each:", flush=True)
    print(f"weights {local_bytes(weights) / 1e9:.2f} GB, pages {local_bytes(pages) / 1e9:.2f} GB", flush=True)
    for name, key in STEPS.items():
        began = time.perf_counter()
        function, arguments, donated, out = programs.described(key, context, weights, pages, slots, {})
        lowered = jax.jit(function, donate_argnums=donated, out_shardings=out).lower(*arguments)
        compiled = lowered.compile(compiler_options=NO_GRAPHS | UNTRIED_PRODUCTS)
        memory: Any = compiled.memory_analysis()
        print(
            f"{name} of {key.num_tokens} tokens: arguments {memory.argument_size_in_bytes / 1e9:.2f} GB, "
            f"temporaries {memory.temp_size_in_bytes / 1e9:.2f} GB, {time.perf_counter() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
