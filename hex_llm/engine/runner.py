"""The compiled step: packed metadata in, chosen token ids out. Owns the weights and the KV pages."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from hex_llm.engine.batch import Ints, Paddings, StepShape, pack, unpack
from hex_llm.kernels import reference
from hex_llm.kernels.attention import PagedAttention
from hex_llm.models import decoder
from hex_llm.models.params import Weights
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import PAGES, TP
from hex_llm.types import StepPlan
from hex_llm.weights.source import private_folder

Pages = list[jax.Array]
Step = Callable[[Weights, Pages, Ints], tuple[jax.Array, Pages]]


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
        # Accelerators round the factors of a float32 product to fewer bits unless told not to.
        self.precision = "highest" if dtype == np.float32 else "default"
        self._plain_step = partial(_step, spec=spec, attend=split_by_head(reference.paged_attention, mesh))
        self._step = jax.jit(self._plain_step, static_argnames=("shape",), donate_argnames=("pages",))
        self._compiled: dict[StepShape, Step] = {}

    def run(self, plan: StepPlan) -> list[int]:
        """One step; the token chosen for each row of the plan, in order."""
        shape = self.paddings.shape(plan)
        step = self._compiled.get(shape) or self._prepare(shape)
        ids, self.pages = step(self.weights, self.pages, pack(plan, shape, self.block_size))
        chosen = np.asarray(ids).tolist()
        prefilled = chosen[shape.num_decodes :][: len(plan.prefills)]
        return chosen[: len(plan.decodes)] + prefilled

    def warm_up(self, progress: bool = False) -> None:
        """Compiles every shape that a step can have."""
        shapes = self.paddings.all_shapes()
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            list(tqdm(compilers.map(self._prepare, shapes), "Compiling", len(shapes), disable=not progress))

    def _prepare(self, shape: StepShape) -> Step:
        self._compiled[shape] = step = self._compile(shape) if self.enable_jit else self._op_by_op(shape)
        return step

    def _compile(self, shape: StepShape) -> Step:
        packed = jax.ShapeDtypeStruct((shape.packed_size,), jnp.int32)
        with jax.default_matmul_precision(self.precision):
            return self._step.lower(self.weights, self.pages, packed, shape=shape).compile()

    def _op_by_op(self, shape: StepShape) -> Step:
        def step(weights: Weights, pages: Pages, packed: Ints) -> tuple[jax.Array, Pages]:
            with jax.disable_jit(), jax.default_matmul_precision(self.precision):
                return self._plain_step(weights, pages, jnp.asarray(packed), shape=shape)

        return step


def _step(
    weights: Weights,
    pages: Pages,
    packed: jax.Array,
    *,
    shape: StepShape,
    spec: ModelSpec,
    attend: PagedAttention,
) -> tuple[jax.Array, Pages]:
    inputs = unpack(packed, shape)
    hidden, pages = decoder.forward(
        spec, weights, inputs.token_ids, inputs.spans, pages, inputs.batch, attend
    )
    scores = decoder.logits(spec, weights, hidden[inputs.last_tokens])
    return jnp.argmax(scores, axis=-1).astype(jnp.int32), pages


def keep_compiled(cache_dir: Path) -> None:
    """Keeps what took long to compile for the next start, unless the user has set a place for it."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(private_folder(cache_dir / "compiled")))


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
