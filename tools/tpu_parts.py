"""Kernels alone for tools/tpu_compile.py, each chip on its own: what its models have not in their steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.execution.batch import StepShape, batch_of, parts_of
from hex_llm.execution.programs import ProgramSpec
from hex_llm.kernels import tpu
from hex_llm.kernels.attention import Mask, Options
from hex_llm.parallel.shardings import TP

SHAPE, WIDTH = StepShape(272, 18, 2), 64
NUM_BLOCKS, BLOCK_SIZE = 512, 32


class Heads(NamedTuple):
    """As one device has them."""

    num_kv: int
    group: int
    dim: int


ATTENTION = {
    "Llama-3.2-1B": Heads(8, 4, 64),
    "SmolLM2-135M": Heads(3, 3, 64),
    "Phi-3-mini": Heads(32, 1, 96),
    "Gemma-7B over 4": Heads(4, 1, 256),
    "Qwen2.5-7B over 4": Heads(1, 7, 128),
    "Qwen2.5-14B": Heads(8, 5, 128),
}


def parts(mesh: Mesh | AbstractMesh, chip: str) -> dict[str, ProgramSpec]:
    device = AbstractDevice(chip, num_cores=1, platform="tpu")
    seen = AbstractMesh((mesh.size,), (TP,), (AxisType.Auto,), abstract_device=device)
    whole = NamedSharding(mesh, P())

    def described(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def attention(heads: Heads) -> ProgramSpec:
        def attend(
            q: Any, k: Any, v: Any, pages: Any, tables: Any, packed: Any
        ) -> tuple[jax.Array, jax.Array]:
            batch = batch_of(parts_of(packed, SHAPE), tables, SHAPE)
            return tpu.paged_attention(q, k, v, pages, batch, Options(Mask(), 0.1, None))

        on_each = jax.shard_map(attend, mesh=seen, in_specs=P(), out_specs=P(), check_vma=False)
        rows, num, width = SHAPE.num_tokens, heads.num_kv, heads.dim
        pages = described(NUM_BLOCKS, BLOCK_SIZE, num, 2, tpu.padded_head_dim(width))
        kv = described(rows, num, width)
        ints = [described(*size, dtype=jnp.int32) for size in ((SHAPE.num_rows, WIDTH), (SHAPE.packed_size,))]
        arguments = (described(rows, num, heads.group, width), kv, kv, pages, *ints)
        return ProgramSpec(on_each, arguments, (3,), whole)

    return {f"attention of {name}, {tuple(heads)}": attention(heads) for name, heads in ATTENTION.items()}
