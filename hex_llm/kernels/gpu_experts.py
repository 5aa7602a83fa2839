"""Routed experts on NVIDIA GPUs: two grouped products by one Pallas-Triton kernel.

Pairs lie in the order of their experts. A program takes a block of rows of one expert and a block of columns;
which rows those are, a table tells (gpu_routing.py). The first product gathers its rows from the tokens, and
makes of gate and up what goes on; the second puts its rows where their pairs belong. It knows nothing of
meshes: it sees the width of one device. Quantized matrices (gpu_quantized.py) become floats in it, a block of
their words at a time. docs/kernels.md tells why the tilings are as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels.experts import ExpertOptions, combined
from hex_llm.kernels.gpu_launch import (
    DTYPES,
    dot,
    has_large_shared_memory,
    index_grid,
    launched,
    next_power,
    read_tile,
)
from hex_llm.kernels.gpu_quantized import (
    SLAB,
    TOGETHER,
    QuantizedWords,
    inputs_of,
    made_up,
    max_tile,
    read_scales,
    read_words,
    weights_of,
)
from hex_llm.kernels.gpu_routing import Blocks, blocks_of

MIN_ROWS, MAX_ROWS = 16, 128
DEPTH = 128  # of a step through the weights of few rows; of quantized ones it is a block of words


@dataclass(frozen=True)
class Tiling:
    """How a product is cut; all of it is chosen from shapes alone."""

    rows: int  # of a block, all of one expert
    columns: int  # of the result; of gate and up, so many of each
    depth: int  # of the factors, at a time; quantized ones have their own
    together: int  # blocks of rows that run side by side, so that they share the weights
    splits: int  # programs that share the depth of a tile; with one alone the kernel makes the gates itself
    warps: int
    stages: int


@dataclass(frozen=True)
class Product:
    """What one of the two does."""

    per_token: int
    is_first: bool  # from tokens into the order of experts; the second: from that into the order of pairs
    gates: ExpertOptions | None  # of the first: which the kernel makes
    scaled: bool  # by the scores
    tiling: Tiling


def can_fuse(activation: str, dtype: Any) -> bool:
    """Whether the kernel is for models like this. What it is not for, `experts.dense` does."""
    # Triton has no word for the other gelu.
    return jnp.dtype(dtype) in DTYPES and activation in ("silu", "gelu_tanh", "quick_gelu")


def fused_moe(
    x: Array,
    chosen: Array,
    scores: Array,
    gate_up: Array | QuantizedWords,
    down: Array | QuantizedWords,
    options: ExpertOptions,
    tilings: tuple[Tiling, Tiling] | None = None,
) -> Array:
    """See kernels.experts.RoutedExperts. float32 products are exact, and there a row's result does not depend
    on the others of the batch."""
    tilings = tilings or (up_tiling(chosen, gate_up), down_tiling(chosen, down))
    num_experts, _, width = _outputs(gate_up)
    num_tokens, per_token = chosen.shape
    most_rows = min(tiling.rows for tiling in tilings)
    blocks, scores = blocks_of(chosen, num_experts, most_rows), scores.reshape(-1)
    both = gate_up
    if not isinstance(both, QuantizedWords):
        both = both.reshape(num_experts, 2 * width, -1)
    bias = None if options.bias is None else options.bias.reshape(num_experts, 2 * width)
    first = Product(per_token, True, options._replace(bias=None), options.scale_input, tilings[0])
    if tilings[0].splits == 1:
        hidden = multiply(x, blocks, scores, both, (chosen.size, width), x.dtype, first, bias)
    else:
        first, out_shape = replace(first, gates=None), (tilings[0].splits, chosen.size, 2 * width)
        sums = jnp.sum(multiply(x, blocks, scores, both, out_shape, jnp.float32, first), axis=0)
        sums = sums if bias is None else sums + bias[blocks.placed(chosen.reshape(-1))]
        hidden = options.gated(sums[:, :width], sums[:, width:]).astype(x.dtype)
    second = Product(per_token, False, None, not options.scale_input, tilings[1])
    splits = tilings[1].splits
    summed = x.dtype if splits * per_token == 1 else jnp.float32
    expert_out = multiply(hidden, blocks, scores, down, (splits, chosen.size, len(x[0])), summed, second)
    parts = expert_out.reshape(splits, num_tokens, per_token, -1).swapaxes(0, 1)
    return combined(parts, num_tokens).astype(x.dtype)


def _outputs(matrix: Array | QuantizedWords) -> tuple[int, ...]:
    return matrix.outputs if isinstance(matrix, QuantizedWords) else matrix.shape[:-1]


def up_tiling(chosen: Array, gate_up: Array | QuantizedWords) -> Tiling:
    rows, (num_experts, _, width) = _rows(chosen, gate_up), _outputs(gate_up)
    blocks = min(chosen.size, num_experts) * pl.cdiv(2 * width, 64)
    if isinstance(gate_up, QuantizedWords):
        splits = max(min(1024 // blocks, 2), 1) if rows <= 16 else 1
        columns = 64 if splits == 1 else 128
        return Tiling(rows, columns, depth=DEPTH, together=8, splits=splits, warps=4, stages=4)
    if gate_up.dtype == jnp.float32:  # the same for all batches, so that rows do not depend on their number
        return Tiling(32, columns=32, depth=32, together=8, splits=1, warps=4, stages=2)
    if rows <= 16 and width <= 2048:  # many experts, and little work in each
        splits = max(min(512 // blocks, 2), 1)
        return Tiling(rows, columns=64, depth=DEPTH, together=8, splits=splits, warps=4, stages=3)
    if rows <= 16:  # bound by the weights: many reads ahead
        return Tiling(rows, columns=32, depth=128, together=8, splits=1, warps=4, stages=4)
    if rows <= 32:
        return Tiling(rows, columns=64, depth=128, together=8, splits=1, warps=4, stages=3)
    if rows <= 64:
        return Tiling(rows, columns=64, depth=64, together=8, splits=1, warps=4, stages=4)
    return Tiling(rows, columns=128, depth=64, together=16, splits=1, warps=8, stages=4)


def down_tiling(chosen: Array, down: Array | QuantizedWords) -> Tiling:
    rows, (num_experts, num_columns) = _rows(chosen, down), _outputs(down)
    blocks = min(chosen.size, num_experts) * pl.cdiv(num_columns, 64)
    num_inputs = down.num_inputs if isinstance(down, QuantizedWords) else down.shape[2]
    # So that all multiprocessors read, and each for a while.
    splits = max(min(1024 // blocks, 8, num_inputs // (3 * DEPTH)), 1) if rows <= 32 else 1
    if isinstance(down, QuantizedWords):
        return Tiling(rows, columns=128, depth=DEPTH, together=8, splits=splits, warps=4, stages=4)
    if down.dtype == jnp.float32:
        return Tiling(32, columns=32, depth=32, together=8, splits=1, warps=4, stages=2)
    if rows <= 32:
        return Tiling(rows, columns=64, depth=DEPTH, together=8, splits=splits, warps=4, stages=4)
    if rows <= 64:
        return Tiling(rows, columns=128, depth=64, together=8, splits=1, warps=4, stages=4)
    return Tiling(rows, columns=256, depth=64, together=16, splits=1, warps=8, stages=4)


def _rows(chosen: Array, weight: Array | QuantizedWords) -> int:
    """Half as many again as an expert has on average: of most experts one block, so that their weights are
    read once."""
    num_experts = _outputs(weight)[0]
    most = max_tile() if isinstance(weight, QuantizedWords) else MAX_ROWS
    return min(max(next_power(pl.cdiv(3 * chosen.size, 2 * num_experts)), MIN_ROWS), most)


def multiply(
    x: Array,
    blocks: Blocks,  # of at most as many rows as the tiling's
    scores: Array,
    weight: Array | QuantizedWords,
    out_shape: tuple[int, ...],
    out_dtype: Any,
    product: Product,
    bias: Array | None = None,
) -> Array:
    """The first: x [T, K], weight [E, 2 * N, K], bias [E, 2 * N] -> [P, N], in the order of experts; without
    gates, [splits, P, 2 * N]. The second: x [P, K] in that order, weight [E, N, K] -> [splits, P, N], in the
    order of pairs."""
    tiling, words = product.tiling, weight if isinstance(weight, QuantizedWords) else None
    num_blocks = len(blocks.experts)
    grid = (num_blocks * pl.cdiv(out_shape[-1], tiling.columns), tiling.splits)
    out = jax.ShapeDtypeStruct(out_shape, out_dtype)
    dots = _dots if words is None else partial(_dots_of_words, matrix=words)
    kernel = partial(_multiply_kernel, product=product, dots=dots)
    arrays = weight if words is None else (words.words, words.scales)
    stages = tiling.stages if tiling.rows < MAX_ROWS or has_large_shared_memory() else 3
    return launched(kernel, grid, out, tiling.warps, stages)(*blocks, scores, x, arrays, bias)


def _multiply_kernel(
    experts_ref: Any,  # see Blocks
    order_ref: Any,
    starts_ref: Any,
    ends_ref: Any,
    scores_ref: Any,  # [P]
    x_ref: Any,
    weight_ref: Any,
    bias_ref: Any,  # [E, 2 * N], or None
    out_ref: Any,
    *,
    product: Product,
    dots: Callable[..., list[Array]],
) -> None:
    tiling, num_columns = product.tiling, out_ref.shape[-1]
    block, column_block = _tile(len(experts_ref), pl.cdiv(num_columns, tiling.columns), tiling.together)
    split = pl.program_id(1)
    expert = experts_ref[block]
    start, end = (block, block + 1) if starts_ref is None else (starts_ref[block], ends_ref[block])

    @pl.when(start < end)
    def multiply_tile() -> None:
        place = start + lax.iota(jnp.int32, tiling.rows)
        valid = place < end
        # Of a place that is not stored to, an interpreted store writes back what was there: let it be none.
        none = len(scores_ref)
        if order_ref is None:
            pair = jnp.where(valid, place, none)
        else:
            pair = plgpu.load(order_ref.at[place], mask=valid, other=none)
        column = column_block * tiling.columns + lax.iota(jnp.int32, tiling.columns)
        # What is not there is read from somewhere else instead, and not stored.
        here = column if num_columns % tiling.columns == 0 else jnp.minimum(column, num_columns - 1)
        token = jnp.minimum(lax.div(pair, product.per_token), len(x_ref) - 1)
        source = token if product.is_first else jnp.where(valid, place, start)
        matrices = [here] if product.gates is None else [here, num_columns + here]
        sums = dots(x_ref, weight_ref, expert, source, matrices, split, tiling)
        if product.scaled:
            scale = plgpu.load(scores_ref.at[pair], mask=valid, other=0)
            sums = [one * scale[:, None] for one in sums]
        if bias_ref is not None:
            bias = [plgpu.load(bias_ref.at[expert, matrix]).astype(jnp.float32) for matrix in matrices]
            sums = [one + added[None, :] for one, added in zip(sums, bias, strict=True)]
        out = sums[0] if product.gates is None else product.gates.gated(sums[0], sums[1])
        at: tuple[Array, ...] = index_grid(place if product.is_first else pair, column[None, :])
        at = at if product.gates is not None else (split, *at)
        mask = valid[:, None] & (column < num_columns)[None, :]
        plgpu.store(out_ref.at[at], out.astype(out_ref.dtype), mask=mask)


def _dots(
    x_ref: Any,
    weight_ref: Any,
    expert: Array,
    rows: Array,
    matrices: list[Array],
    split: Array,
    tiling: Tiling,
) -> list[Array]:
    """x[rows] times weight[expert, matrix] for each matrix, over a split of the depth."""
    depth = x_ref.shape[1]

    def add(i: Array, sums: list[Array]) -> list[Array]:
        deep = i * tiling.depth + lax.iota(jnp.int32, tiling.depth)
        inside = None if depth % tiling.depth == 0 else deep < depth
        x = read_tile(x_ref, (), rows, deep, inside)
        return [
            one + dot(x, read_tile(weight_ref, (expert,), matrix, deep, inside).T)
            for one, matrix in zip(sums, matrices, strict=True)
        ]

    length = pl.cdiv(pl.cdiv(depth, tiling.depth), tiling.splits)
    first = split * length
    last = jnp.minimum(first + length, pl.cdiv(depth, tiling.depth))
    zeros = [jnp.zeros((tiling.rows, tiling.columns), jnp.float32) for _ in matrices]
    return lax.fori_loop(first, last, add, zeros)


def _dots_of_words(
    x_ref: Any,
    weight_refs: tuple[Any, Any],  # words and scales, of the outputs of all experts
    expert: Array,
    rows: Array,
    matrices: list[Array],
    split: Array,
    tiling: Tiling,
    matrix: QuantizedWords,
) -> list[Array]:
    """The same of quantized matrices, whose weights are scaled before they are multiplied."""
    words_ref, scales_ref = weight_refs
    per_word, num_blocks = matrix.codes_per_word, matrix.num_blocks
    num_outputs = math.prod(matrix.outputs[1:])
    outputs = [expert * num_outputs + one for one in matrices]
    together = 1 if tiling.splits > 1 else TOGETHER  # splits: of few rows
    length = pl.cdiv(num_blocks, tiling.splits)
    is_filled = num_blocks % tiling.splits == matrix.num_inputs % (per_word * SLAB) == 0

    def add(i: Array, sums: list[Array]) -> list[Array]:
        block = split * length + i
        # A block too many is the last one again, with zeros for its inputs.
        stored = block if num_blocks % tiling.splits == 0 else jnp.minimum(block, num_blocks - 1)
        words = [read_words(words_ref, output, stored, matrix) for output in outputs]
        scales = [read_scales(scales_ref, output, stored, matrix) for output in outputs]
        for first in range(0, per_word, together):
            slabs = range(first, first + together)
            deep = inputs_of(block, first, together, matrix)
            x = read_tile(x_ref, (), rows, deep, None if is_filled else deep < matrix.num_inputs)
            weights = [
                weights_of(one, slabs, matrix, scale, x.dtype)
                for one, scale in zip(words, scales, strict=True)
            ]
            sums = [one + dot(weight, x.T) for one, weight in zip(sums, weights, strict=True)]
        return sums

    zeros = [jnp.zeros((tiling.columns, tiling.rows), jnp.float32) for _ in matrices]
    # A number of turns that the compiler knows: reads are then begun ahead.
    out = lax.fori_loop(0, length, add, zeros)
    return [made_up(one.T, matrix) for one in out]


def _tile(num_blocks: int, num_columns: int, together: int) -> tuple[Array, Array]:
    """The block of rows and the block of columns of this program: `together` blocks of rows go through all
    columns before the next ones begin."""
    program = pl.program_id(0)
    group = lax.div(program, together * num_columns)
    size = jnp.minimum(num_blocks - group * together, together)
    within = lax.rem(program, together * num_columns)
    return group * together + lax.rem(within, size), lax.div(within, size)
