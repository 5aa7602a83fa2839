"""A model's steps compiled for TPU slices, without a TPU: weights and pages are only described.

The compiler comes with the `libtpu` package, which there is for x86-64 Linux.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU machine to ask about itself

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.errors import ConfigError, HexError, one_line
from hex_llm.execution import programs
from hex_llm.execution.batch import StepShape, num_choices
from hex_llm.execution.slots import SlotLayout
from hex_llm.kernels import reference, tpu, tpu_experts
from hex_llm.models.params import Param, abstract_weights
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import PAGES, TP, make_mesh, sharding

if TYPE_CHECKING:
    from hex_llm.planning.plan import Option

DTYPE = jnp.bfloat16
KINDS = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "v5p": "TPU v5", "v7x": "TPU7x"}  # as JAX calls them


class Sizes(NamedTuple):
    """Of what is compiled: a decode of `batch` sequences, a prefill of `prefill` tokens, and KV pages."""

    batch: int
    context: int  # of each decoded sequence, for the floor
    prefill: int
    tokens: int  # that there are KV pages for
    block_size: int
    max_len: int


def described_params(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    def one(param: Param) -> jax.ShapeDtypeStruct:
        lies = sharding(mesh, param.shape, param.axes)  # type: ignore[arg-type]
        return jax.ShapeDtypeStruct(param.shape, DTYPE, sharding=lies)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, Param))


def held(context: programs.ProgramContext, sizes: Sizes) -> tuple[Any, list[Any], Any]:
    """Weights, pages and slots."""
    spec, mesh, layout = context.spec, context.mesh, context.layout
    num_blocks = -(-sizes.tokens // sizes.block_size) + 1
    width = spec.head_dim if spec.sinks else tpu.padded_head_dim(spec.head_dim)
    shape = (num_blocks, sizes.block_size, spec.num_kv_heads, 2, width)
    page = jax.ShapeDtypeStruct(shape, DTYPE, sharding=NamedSharding(mesh, PAGES))
    whole = NamedSharding(mesh, P())
    slots = jax.ShapeDtypeStruct((layout.num_slots, layout.width), jnp.int32, sharding=whole)
    return described_params(abstract_weights(spec), mesh), [page] * len(spec.layers), slots


def step_shapes(sizes: Sizes) -> dict[str, StepShape]:
    return {
        "decode": StepShape(sizes.batch, sizes.batch, 0),
        "prefill": StepShape(sizes.prefill, min(sizes.prefill, sizes.batch), 2),
    }


def context_of(
    spec: ModelSpec, mesh: Mesh | AbstractMesh, kind: str, sizes: Sizes
) -> programs.ProgramContext:
    """As execution/runner.py sets it on a TPU; kernels see the mesh as one of chips of this kind."""
    masks = [layer.mask for layer in spec.layers]
    num_kv_heads = spec.num_kv_heads // mesh.size
    fits = tpu.can_attend(num_kv_heads, spec.head_dim, sizes.block_size, masks, DTYPE)
    assert fits, "the reference would serve this model"
    attend = reference.paged_attention if spec.sinks else tpu.paged_attention
    seen: Any = abstract_mesh(mesh.size, kind)
    return programs.ProgramContext(
        spec,
        mesh,  # type: ignore[arg-type]
        SlotLayout(sizes.batch + 1, sizes.max_len, spec.vocab_size, -(-sizes.max_len // sizes.block_size)),
        num_choices(sizes.batch),
        programs.split_by_head(attend, seen),
        programs.split_by_width(tpu_experts.fused_moe, seen),
    )


def abstract_mesh(num_chips: int, kind: str) -> AbstractMesh:
    device = AbstractDevice(kind, num_cores=1, platform="tpu")
    return AbstractMesh((num_chips,), (TP,), (AxisType.Auto,), abstract_device=device)


def topology_mesh(name: str) -> Mesh:
    """A slice such as v5e:4x4 as the TPU compiler describes it; raises where there is none."""
    sides = tuple(int(n) for n in name.partition(":")[2].split("x"))
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception:
        bounds = (*sides, 1)[:3]  # as one host
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=name, chips_per_host_bounds=bounds
        ).devices
    assert len(devices) == math.prod(sides), (len(devices), name)
    return make_mesh(len(devices), devices)


def compiler_problem() -> str:
    """Why there is no compiler for TPUs here; empty: there is one."""
    if os.environ.get("TPU_LIBRARY_PATH") or find_spec("libtpu"):
        return ""
    return "No module named 'libtpu'"


def compiled_memory(option: Option) -> dict[str, Any]:
    """What the compiler says that a device needs, for the plan's steps, besides the plan's own figures."""
    if option.chip.platform != "tpu":
        raise ConfigError(f"--compile: {option.slice.name} is no TPU; choose one with --on")
    if problem := compiler_problem():
        raise ConfigError(
            f"--compile: there is no TPU compiler here ({problem}); on x86-64 Linux: pip install libtpu"
        )
    load, spec = option.load, option.footprint.plan.held
    sizes = Sizes(load.concurrency, load.context, 2048, option.kv_tokens, 32, load.context)
    found: dict[str, Any] = {}
    try:
        mesh = topology_mesh(f"{option.chip.name}:{option.slice.topology}")
        context = context_of(spec, mesh, KINDS.get(option.chip.name, option.chip.name), sizes)
        for name, shape in step_shapes(sizes).items():
            function, arguments, donated, lie = programs.described(shape, context, *held(context, sizes), {})
            program = jax.jit(function, donate_argnums=donated, out_shardings=lie).lower(*arguments).compile()
            memory: Any = program.memory_analysis()
            results = memory.output_size_in_bytes - memory.alias_size_in_bytes
            total = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
            found[name] = {"total_bytes": total, "temporary_bytes": memory.temp_size_in_bytes + results}
    except Exception as error:
        raise HexError(f"--compile: {one_line(' '.join(str(error).split())[:300])}") from error
    kept = option.footprint.weights + option.kv_tokens * option.footprint.per_token
    planned = kept + option.footprint.temporaries
    told = [f"{name}: {one['total_bytes'] / 1e9:.2f} GB" for name, one in found.items()]
    return {**found, "planned_bytes": planned, "told": f"{', '.join(told)}; planned {planned / 1e9:.2f} GB"}
