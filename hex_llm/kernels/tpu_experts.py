"""Routed experts on TPUs: for many tokens, two products of the grouped kernel that comes with JAX.

Few tokens are bound by the reading of the weights, and together choose nearly all experts: there, all experts
see all tokens. It knows nothing of meshes: it sees the width of one device.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.megablox import gmm

from hex_llm.kernels import tpu_quantized_experts
from hex_llm.kernels.experts import ExpertOptions, by_expert, dense
from hex_llm.kernels.tpu_quantized_experts import ExpertColumns
from hex_llm.kernels.tpu_sinks import LANES

FEW_TOKENS = 256  # a v5e multiplies about as many rows in the time that it reads a weight
MIN_ROWS, MAX_ROWS = 128, 256  # of a tile, which is computed anew for each expert that has a part of it
MAX_SIDE = 1024  # of a tile of the weights: with all that is read ahead, half of the vector memory


def fused_moe(
    x: Array, chosen: Array, scores: Array, gate_up: Any, down: Any, options: ExpertOptions
) -> Array:
    """See kernels.experts.RoutedExperts."""
    if isinstance(gate_up, ExpertColumns):
        return tpu_quantized_experts.fused_moe(x, chosen, scores, gate_up, down, options)
    if len(x) <= FEW_TOKENS:
        return dense(x, chosen, scores, gate_up, down, options)
    num_experts, _, width, num_inputs = gate_up.shape
    order, ends = by_expert(chosen, num_experts)
    rows = MAX_ROWS if chosen.size >= MAX_ROWS * num_experts else MIN_ROWS
    # Tiles are whole: what fills up the last one goes to the last expert.
    pairs = jnp.pad(order, (0, -len(order) % rows))
    sizes = jnp.diff(ends.at[-1].set(len(pairs)), prepend=0)

    def product(x: Array, weight: Array) -> Array:
        tiling = (rows, _side(weight.shape[2]), _side(weight.shape[1]))
        # Last in memory is the axis that leaves fewer lanes empty: turned likewise, no weight is copied.
        turned = _empty_lanes(weight.shape[2]) > _empty_lanes(weight.shape[1])
        weight = weight.swapaxes(1, 2) if turned else weight
        out: Array = gmm(x, weight, sizes, x.dtype, tiling, transpose_rhs=not turned)
        return out

    inputs = x[pairs // chosen.shape[1]]
    if options.scale_input:
        inputs *= scores.reshape(-1)[pairs, None].astype(x.dtype)
    both = product(inputs, gate_up.reshape(num_experts, -1, num_inputs))
    if options.bias is not None:
        both += options.bias.reshape(num_experts, -1)[chosen.reshape(-1)[pairs]]
    expert_out = product(options.gated(both[:, :width], both[:, width:]), down)
    places = jnp.argsort(order).reshape(chosen.shape)
    # Choice by choice: rows of several choices would first be brought into another layout.
    out = jnp.zeros(x.shape, jnp.float32)
    for i in range(chosen.shape[1]):
        scale = 1 if options.scale_input else scores[:, i, None]
        out += expert_out[places[:, i]].astype(jnp.float32) * scale
    return out.astype(x.dtype)


def _empty_lanes(size: int) -> float:
    """Of an axis that lies along them, for each that it fills."""
    return -size % LANES / size


def _side(size: int) -> int:
    """Of a tile: the most that divides and is whole lanes; where nothing does, the kernel hides the rest."""
    sides = range(min(MAX_SIDE, size) // LANES * LANES, 0, -LANES)
    return next((side for side in sides if size % side == 0), min(size, MAX_SIDE // 2))
