"""Routing on NVIDIA GPUs: the experts that tokens choose, and pairs in their order, each by a Pallas kernel.
XLA sorts for both, and scores in more kernels; where tokens are few, starting them is most of the time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels import experts
from hex_llm.kernels.experts import Choice
from hex_llm.kernels.gpu_launch import launched, next_power

MAX_PAIRS = 4096  # each is compared with every other; of more, sorting takes less time
BLOCK = 64  # pairs that a program places, and others that it looks at together


def choose(logits: Array, correction: Array | None, choice: Choice) -> tuple[Array, Array]:
    """See experts.ChooseExperts."""
    shape = len(logits), choice.num
    out = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    kernel = partial(_choose_kernel, choice=choice)
    chosen, scores = launched(kernel, (len(logits),), out, warps=1, stages=1)(logits, correction)
    return chosen, scores


def _choose_kernel(
    logits_ref: Any, correction_ref: Any, chosen_ref: Any, scores_ref: Any, *, choice: Choice
) -> None:
    """A program is for one token; `correction_ref` may be None."""
    token, num_experts = pl.program_id(0), logits_ref.shape[1]
    lane = lax.iota(jnp.int32, next_power(num_experts))
    there = lane < num_experts
    # Lanes too many score nothing, and are never chosen.
    logits = plgpu.load(logits_ref.at[token, lane], mask=there, other=-jnp.inf).astype(jnp.float32)
    scores, ranks = choice.scored(logits), logits
    if correction_ref is not None:
        ranks = scores + plgpu.load(correction_ref.at[lane], mask=there, other=0)
        ranks = jnp.where(there, ranks, -jnp.inf)
    found = []
    for i in range(choice.num):
        is_largest = ranks == jnp.max(ranks)
        # Of numbers that are none, the last.
        index = jnp.minimum(jnp.min(jnp.where(is_largest, lane, num_experts)), num_experts - 1)
        found.append(jnp.sum(jnp.where(lane == index, scores, 0)))
        ranks = jnp.where(lane == index, -jnp.inf, ranks)
        chosen_ref[token, i] = index
    factor = choice.scale / (sum(found) + 1e-20) if choice.normalized else choice.scale
    for i, score in enumerate(found):
        scores_ref[token, i] = score * factor


def by_expert(chosen: Array, num_experts: int) -> tuple[Array, Array]:
    """See experts.by_expert."""
    if chosen.size > MAX_PAIRS:
        return experts.by_expert(chosen, num_experts)
    out = [jax.ShapeDtypeStruct((num,), jnp.int32) for num in (chosen.size, num_experts)]
    grid = (pl.cdiv(chosen.size + num_experts, BLOCK),)
    order, ends = launched(_place_kernel, grid, out, warps=4, stages=1)(chosen.reshape(-1))
    return order, ends


def _place_kernel(chosen_ref: Any, order_ref: Any, ends_ref: Any) -> None:
    """A pair's place is the number of those before it. An expert's pairs end where one more would be, behind
    all others: so experts are placed as pairs are."""
    num_pairs = len(chosen_ref)
    row = pl.program_id(0) * BLOCK + lax.iota(jnp.int32, BLOCK)
    is_pair = row < num_pairs
    own = plgpu.load(chosen_ref.at[jnp.minimum(row, num_pairs - 1)])
    expert = jnp.where(is_pair, own, row - num_pairs)

    def count(i: Array, before: Array) -> Array:
        other = i * BLOCK + lax.iota(jnp.int32, BLOCK)
        theirs = plgpu.load(chosen_ref.at[jnp.minimum(other, num_pairs - 1)])
        is_earlier = (theirs[None, :] == expert[:, None]) & (other[None, :] < row[:, None])
        is_before = (theirs[None, :] < expert[:, None]) | is_earlier
        is_before &= (other < num_pairs)[None, :]
        return before + is_before.astype(jnp.int32)

    before = lax.fori_loop(0, pl.cdiv(num_pairs, BLOCK), count, jnp.zeros((BLOCK, BLOCK), jnp.int32))
    place = jnp.sum(before, axis=1)
    # What is not stored would have another place here, where nothing is.
    plgpu.store(order_ref.at[jnp.where(is_pair, place, num_pairs)], row, mask=is_pair)
    is_expert = ~is_pair & (expert < len(ends_ref))
    plgpu.store(ends_ref.at[jnp.where(is_expert, expert, len(ends_ref))], place, mask=is_expert)
