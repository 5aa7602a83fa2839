"""Routing on NVIDIA GPUs: the experts that tokens choose, and pairs in their order, each by a Pallas kernel.
XLA sorts for both, and scores in more kernels; where tokens are few, starting them is most of the time.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels import experts
from hex_llm.kernels.experts import Choice
from hex_llm.kernels.gpu_launch import launched, next_power

MAX_PAIRS = 4096  # each is compared with every other; of more, sorting takes less time
PLACED, SEEN = 8, 1024  # pairs that a program places, and others that it looks at together, at most


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
    logits *= choice.logit_scale
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


class Blocks(NamedTuple):
    """Pairs in the order of their experts, cut into blocks of one expert each. Some blocks have no pairs.
    With experts alone, each pair is a block: the rest would be constants, which XLA makes by kernels."""

    experts: Array  # [B], of each block
    order: Array | None = None  # [P]: the pair at each place
    starts: Array | None = None  # [B]: the places of a block
    ends: Array | None = None  # [B]

    def placed(self, of_pairs: Array) -> Array:
        return of_pairs if self.order is None else of_pairs[self.order]


def blocks_of(chosen: Array, num_experts: int, rows: int) -> Blocks:
    """Of at most so many rows. chosen [T, k] -> Blocks; of a token all are different."""
    flat = chosen.reshape(-1)
    if len(chosen) == 1:  # nobody shares an expert
        return Blocks(flat)
    if len(flat) > MAX_PAIRS:
        return _sorted(chosen, num_experts, rows)
    num_placed = num_blocks = len(flat)
    if len(flat) > num_experts:
        num_placed, num_blocks = len(flat) + num_experts, len(flat) // rows + num_experts
    out = [jax.ShapeDtypeStruct((num,), jnp.int32) for num in (num_blocks, len(flat), num_blocks, num_blocks)]
    kernel = partial(_place_kernel, rows=rows, num_experts=num_experts)
    return Blocks(*launched(kernel, (pl.cdiv(num_placed, PLACED),), out, warps=4, stages=1)(flat))


def _sorted(chosen: Array, num_experts: int, rows: int) -> Blocks:
    order, ends = experts.by_expert(chosen, num_experts)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    num_blocks = pl.cdiv(ends - starts, rows)
    blocks_end = jnp.cumsum(num_blocks)
    block = jnp.arange(chosen.size // rows + num_experts, dtype=jnp.int32)
    expert = jnp.sum(blocks_end[None, :] <= block[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)  # of blocks too many, which begin behind its end
    start = starts[expert] + (block - (blocks_end - num_blocks)[expert]) * rows
    return Blocks(expert, order, start, jnp.minimum(start + rows, ends[expert]))


def _place_kernel(
    chosen_ref: Any,
    experts_ref: Any,
    order_ref: Any,
    starts_ref: Any,
    ends_ref: Any,
    *,
    rows: int,
    num_experts: int,
) -> None:
    """A pair's place is the number of those before it, and every `rows`-th of an expert begins a block.

    No program knows how many blocks others have. With no more pairs than experts, a block therefore has the
    number of its first place, and all other places are empty blocks. With more, an expert's blocks begin with
    number start // rows + expert. So none has two owners, and at most the last is left over before the next
    expert's begin: experts, which are placed as one more pair behind their others, then make it empty.
    """
    num_pairs = len(chosen_ref)
    num_seen = min(next_power(num_pairs), SEEN)
    row = pl.program_id(0) * PLACED + lax.iota(jnp.int32, PLACED)
    is_pair = row < num_pairs
    own = plgpu.load(chosen_ref.at[jnp.minimum(row, num_pairs - 1)])
    expert = jnp.where(is_pair, own, row - num_pairs)

    def count(i: Array, counts: list[Array]) -> list[Array]:
        other = (i * num_seen + lax.iota(jnp.int32, num_seen))[None, :]
        theirs = plgpu.load(chosen_ref.at[jnp.minimum(other, num_pairs - 1)])
        # Behind the last pair is an expert that nobody has.
        theirs = jnp.where(other < num_pairs, theirs, num_experts)
        is_same = theirs == expert[:, None]
        found = theirs < expert[:, None], is_same, is_same & (other < row[:, None])
        return [n + jnp.sum(one, axis=1, dtype=jnp.int32) for n, one in zip(counts, found, strict=True)]

    zeros = [jnp.zeros(PLACED, jnp.int32)] * 3
    start, num, rank = lax.fori_loop(0, pl.cdiv(num_pairs, num_seen), count, zeros)
    place, is_first = start + rank, lax.rem(rank, rows) == 0
    end = jnp.where(is_first, jnp.minimum(place + rows, start + num), place)
    if num_pairs <= num_experts:
        block, is_there = place, is_pair
    else:
        first = lax.div(start, rows) + expert
        block = jnp.where(is_pair, first + lax.div(rank, rows), lax.div(place, rows) + expert)
        is_left = (expert < num_experts) & (block >= first + lax.div(rank + rows - 1, rows))
        is_there = jnp.where(is_pair, is_first, is_left)
    # What is not stored would have another place here, where nothing is.
    plgpu.store(order_ref.at[jnp.where(is_pair, place, num_pairs)], row, mask=is_pair)
    block = jnp.where(is_there, block, len(ends_ref))
    for ref, values in ((experts_ref, expert), (starts_ref, place), (ends_ref, end)):
        plgpu.store(ref.at[block], values, mask=is_there)
