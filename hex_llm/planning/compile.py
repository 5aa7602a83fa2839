"""A model's steps compiled for TPU slices, without a TPU: weights and pages are only described.

The compiler comes with the `libtpu` package, which there is for x86-64 Linux.
"""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU machine to ask about itself

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.errors import ConfigError, HexError, one_line
from hex_llm.execution import programs
from hex_llm.execution.batch import StepShape, num_choices
from hex_llm.execution.kernel_choice import (
    Devices,
    Kernels,
    choose_kernels,
    page_shapes,
)
from hex_llm.execution.slots import SlotLayout
from hex_llm.execution.weight_layouts import for_tpus
from hex_llm.kernels.attention import LARGEST
from hex_llm.models.linear import Dense
from hex_llm.models.params import Param, Weights
from hex_llm.models.quantized import Quantized, quantize
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import PAGES, abstract_mesh, make_mesh, sharding

if TYPE_CHECKING:
    from hex_llm.planning.plan import Option

DTYPE = jnp.bfloat16
# What libtpu would complain of, or wait for: no TPU is used, whoever else uses one.
NO_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
COMPILERS_NAMES = {"v7x": "tpu7x"}


class Sizes(NamedTuple):
    """Of what is compiled: a decode of `batch` sequences, a prefill of `prefill` tokens, and KV pages."""

    batch: int
    context: int  # of each decoded sequence, for the floor
    prefill: int
    tokens: int  # that there are KV pages for
    block_size: int
    max_len: int
    kv_dtype: np.dtype[Any] = np.dtype(DTYPE)


def described_params(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    def one(param: Param) -> jax.ShapeDtypeStruct:
        lies = sharding(mesh, param.shape, param.axes)  # type: ignore[arg-type]
        last = param.shape[-1] // 2 if param.packed else param.shape[-1]
        return jax.ShapeDtypeStruct((*param.shape[:-1], last), param.dtype or DTYPE, sharding=lies)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, Param))


def described_weights(weights: Weights, mesh: Any, kind: str) -> Any:
    """As chips of this kind hold them when they are laid out."""

    def results(function: Any, part: Any, lie: Any) -> Any:
        def described(lies: Any, made: Any) -> Any:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies), made)

        return jax.tree.map(described, lie, jax.eval_shape(function, part))

    def one(part: Any) -> Any:
        held = described_params(part, mesh)
        if isinstance(part, Dense) and (to := part.array.rounded_to) is not None:
            held = results(partial(quantize, to=to), held, held.array.sharding)
        return held

    loaded = jax.tree.map(one, weights, is_leaf=lambda node: isinstance(node, Dense | Quantized | Param))
    return for_tpus(loaded, results, abstract_mesh(mesh.size, kind))


def tpu_devices(num_chips: int, sizes: Sizes) -> Devices:
    return Devices("tpu", num_chips, sizes.block_size, np.dtype(DTYPE), sizes.kv_dtype)


def tpu_kernels(spec: ModelSpec, num_chips: int, sizes: Sizes) -> Kernels:
    return choose_kernels(spec, tpu_devices(num_chips, sizes))


def held(context: programs.ProgramContext, sizes: Sizes) -> tuple[list[Any], Any]:
    """Pages and slots."""
    spec, mesh, layout = context.spec, context.mesh, context.layout
    num_blocks = -(-sizes.tokens // sizes.block_size) + 1
    lie, empty = NamedSharding(mesh, PAGES), tpu_kernels(spec, mesh.size, sizes).empty_pages
    shapes = page_shapes(spec, tpu_devices(mesh.size, sizes), num_blocks)
    made = [jax.eval_shape(partial(empty, shape, sizes.kv_dtype)) for shape in shapes]
    pages = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lie), made)
    slots = (layout.num_slots, layout.width)
    remembered = jax.ShapeDtypeStruct(slots, jnp.int32, sharding=NamedSharding(mesh, P()))
    return pages, remembered


def step_shapes(sizes: Sizes) -> dict[str, StepShape]:
    prefill = StepShape(sizes.prefill, min(sizes.prefill, sizes.batch), 2)
    return {"decode": StepShape(sizes.batch, sizes.batch, 0), "prefill": prefill}


def context_of(spec: ModelSpec, mesh: Any, kind: str, sizes: Sizes) -> programs.ProgramContext:
    """As execution/runner.py sets it on a TPU; kernels see the mesh as one of chips of this kind."""
    seen: Any = abstract_mesh(mesh.size, kind)
    kernels = tpu_kernels(spec, mesh.size, sizes)
    width = -(-sizes.max_len // sizes.block_size)
    layout = SlotLayout(sizes.batch + 1, sizes.max_len, spec.vocab_size, width)
    attention_kernels = programs.split_by_head(kernels.attention, seen)
    expert_kernels = programs.split_by_width(kernels.experts, seen)
    return programs.ProgramContext(
        spec, mesh, layout, num_choices(sizes.batch), attention_kernels, expert_kernels
    )


def topology_devices(name: str) -> list[jax.Device]:
    """Of a slice such as v5e:4x4 as the TPU compiler describes it; raises where there is none."""
    for variable, value in NO_TPU.items():
        os.environ.setdefault(variable, value)
    return topologies.get_topology_desc(name, "tpu").devices


def topology_mesh(name: str) -> Mesh:
    devices = topology_devices(name)
    return make_mesh(len(devices), devices)


def compiler_problem() -> str:
    """Why there is no compiler for TPUs here; empty: there is one."""
    is_here = os.environ.get("TPU_LIBRARY_PATH") or find_spec("libtpu")
    return "" if is_here else "No module named 'libtpu'; on x86-64 Linux: pip install libtpu"


def compiled_memory(option: Option) -> dict[str, Any]:
    """Bytes of a device while it runs the plan's largest programs, as the compiler counts them, beside the
    plan's own figure."""
    found, name = option.footprint, option.slice.chip.name
    config = found.paddings.config
    if option.slice.chip.platform != "tpu":
        raise ConfigError(f"--compile: {option.slice.name} is no TPU; choose one with --on")
    kv_dtype = Devices.of(config, "tpu", 1, np.dtype(DTYPE)).kv_dtype
    is_known = config.dtype in ("auto", "bfloat16") and kv_dtype in (DTYPE, *LARGEST)
    if not is_known or config.enable_lora:
        raise ConfigError("--compile: only for bfloat16 and pages of it or of 8 bits, and without adapters")
    if problem := compiler_problem():
        raise ConfigError(f"--compile: there is no TPU compiler here: {problem}")
    shapes, most = found.paddings.all_shapes(), found.paddings.limits.max_decode_seqs
    kv_tokens, size, context = option.figures.kv_tokens, config.block_size, option.load.context
    sizes = Sizes(most, context, shapes[-1].num_tokens, kv_tokens, size, context, kv_dtype)
    keys: dict[str, programs.Key] = {
        "decode": max(shape for shape in shapes if not shape.max_chunks),
        "prefill": shapes[-1],
        "choice": programs.Choose(found.paddings.max_choices),
    }
    slots_bytes = 4 * found.slots.num_slots * found.slots.width
    told, held_bytes = {}, 0
    try:
        mesh = topology_mesh(f"{COMPILERS_NAMES.get(name, name)}:{option.slice.topology}")
        kind = mesh.devices.flat[0].device_kind
        setting = context_of(found.plan.held, mesh, kind, sizes)
        parts = (
            described_weights(found.plan.weights.weights, mesh, kind),
            *held(setting, sizes),
        )
        for what, key in keys.items():
            function, arguments, donated, lie = programs.described(key, setting, *parts, {})
            program = jax.jit(function, donate_argnums=donated, out_shardings=lie).lower(*arguments).compile()
            memory: Any = program.memory_analysis()
            given = memory.argument_size_in_bytes
            held_bytes = held_bytes or given  # a decode's: weights, pages and slots
            more = given - slots_bytes if what == "choice" else 0  # the logits
            results = memory.output_size_in_bytes - memory.alias_size_in_bytes
            told[f"{what}_bytes"] = held_bytes + more + memory.temp_size_in_bytes + results
    except Exception as error:
        raise HexError(f"--compile: {one_line(' '.join(str(error).split())[:300])}") from error
    planned = found.weights + (kv_tokens + size) * found.per_token + found.temporaries
    return {**told, "planned_bytes": planned, "planned_over_compiled": planned / max(told.values())}
