"""The compiled step: packed metadata in, chosen token ids out. Owns the weights and the KV pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.engine.batch import Paddings, StepShape, pack, unpack
from hex_llm.kernels import reference
from hex_llm.kernels.attention import PagedAttention
from hex_llm.models import decoder
from hex_llm.models.params import Weights
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import PAGES, TP
from hex_llm.types import StepPlan

Pages = list[jax.Array]


class Runner:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        mesh: Mesh,
        paddings: Paddings,
        num_blocks: int,
        dtype: np.dtype[Any],
        enable_jit: bool = True,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.mesh = mesh
        self.paddings = paddings
        self.block_size = paddings.config.block_size
        self.pages = allocate_pages(spec, mesh, num_blocks, self.block_size, dtype)
        self.enable_jit = enable_jit
        step = partial(_step, spec=spec, attend=split_by_head(reference.paged_attention, mesh))
        self._step: Callable[..., tuple[jax.Array, Pages]] = jax.jit(
            step, static_argnames=("shape",), donate_argnames=("pages",)
        )

    def run(self, plan: StepPlan) -> list[int]:
        """One step; the token chosen for each row of the plan, in order."""
        shape = self.paddings.shape(plan)
        packed = pack(plan, shape, self.block_size)
        ids = np.asarray(self._run(packed, shape))
        num_prefills = len(plan.prefills)
        rows = [*ids[: len(plan.decodes)], *ids[shape.num_decodes : shape.num_decodes + num_prefills]]
        return [int(token_id) for token_id in rows]

    def warm_up(self, shape: StepShape) -> None:
        """Compiles a shape by running a step of padding only."""
        jax.block_until_ready(self._run(np.zeros(shape.packed_size, np.int32), shape))

    def _run(self, packed: np.ndarray[tuple[int], np.dtype[np.int32]], shape: StepShape) -> jax.Array:
        with jax.disable_jit(not self.enable_jit):
            ids, self.pages = self._step(self.weights, self.pages, packed, shape=shape)
        return ids


def _step(
    weights: Weights,
    pages: Pages,
    packed: jax.Array,
    *,
    shape: StepShape,
    spec: ModelSpec,
    attend: PagedAttention,
) -> tuple[jax.Array, Pages]:
    inputs = unpack(jnp.asarray(packed), shape)
    hidden, pages = decoder.forward(
        spec, weights, inputs.token_ids, inputs.spans, pages, inputs.batch, attend
    )
    scores = decoder.logits(spec, weights, hidden[inputs.last_tokens])
    return jnp.argmax(scores, axis=-1).astype(jnp.int32), pages


def allocate_pages(
    spec: ModelSpec, mesh: Mesh, num_blocks: int, block_size: int, dtype: np.dtype[Any]
) -> Pages:
    shape = (num_blocks, block_size, spec.num_kv_heads, 2, spec.head_dim)
    zeros = jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=NamedSharding(mesh, PAGES))
    return [zeros() for _ in spec.layers]


def split_by_head(attend: PagedAttention, mesh: Mesh) -> PagedAttention:
    """Each device attends with its own KV heads; nothing is exchanged."""
    if mesh.size == 1:
        return attend
    q, kv, whole = P(None, TP, None, None), P(None, TP, None), P()

    def split(*arrays: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        local = jax.shard_map(
            partial(attend, **options),
            mesh=mesh,
            in_specs=(q, kv, kv, PAGES, whole),
            out_specs=(q, PAGES),
            check_vma=False,
        )
        out: tuple[jax.Array, jax.Array] = local(*arrays)
        return out

    return split
