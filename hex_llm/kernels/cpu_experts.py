"""Routed experts on one CPU, by its own product (cpu.py): one expert after the other, a block of its
rows at a time, so that the weights of experts that nobody chose are not read."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import cdiv

from hex_llm.kernels.cpu import Panels
from hex_llm.kernels.experts import ExpertOptions, by_expert, combined

FEW_ROWS, MANY_ROWS = 8, 32  # of a block


def fused_moe(
    x: Array,
    chosen: Array,
    scores: Array,
    gate_up: tuple[Panels, ...],
    down: tuple[Panels, ...],
    options: ExpertOptions,
) -> Array:
    """See kernels.experts.RoutedExperts; each expert's matrices are in panels of their own."""
    num_tokens, per_token = chosen.shape
    num_pairs = chosen.size
    # No expert has more rows than there are tokens.
    num_rows = min(num_tokens, FEW_ROWS if num_pairs <= FEW_ROWS * len(gate_up) else MANY_ROWS)
    order, ends = by_expert(chosen, len(gate_up))
    pairs = jnp.pad(order, (0, num_rows))
    scale = scores.reshape(-1, 1)

    def gated(expert: int, inputs: Array) -> Array:
        bias = None if options.bias is None else options.bias[expert].T
        if options.limit is None:
            return gate_up[expert].gated(inputs, options.activation, bias)
        both = gate_up[expert].matmul(inputs)  # [T, F, 2]
        both = both if bias is None else both + bias
        return options.gated(both[..., 0], both[..., 1])

    def run_expert(expert: int, start: Array, i: Array, expert_out: Array) -> Array:
        first = start + i * num_rows
        block = lax.dynamic_slice_in_dim(pairs, first, num_rows)
        # A single token is the same in every block: without a barrier XLA would run all experts beforehand.
        inputs, _ = lax.optimization_barrier((x[block // per_token], i))
        if options.scale_input:
            inputs = inputs * scale[block]
        outputs = down[expert].matmul(gated(expert, inputs))
        return lax.dynamic_update_slice_in_dim(expert_out, outputs, first, 0)

    # A block may reach into the rows of the next expert, which then writes them anew, and past the last.
    expert_out = jnp.zeros((num_pairs + num_rows, x.shape[1]), x.dtype)
    start = jnp.int32(0)
    for expert in range(len(gate_up)):
        num_blocks = cdiv(ends[expert] - start, num_rows)
        expert_out = lax.fori_loop(0, num_blocks, partial(run_expert, expert, start), expert_out)
        start = ends[expert]
    expert_out = expert_out[jnp.argsort(order)]
    return combined(expert_out if options.scale_input else expert_out * scale, num_tokens)
