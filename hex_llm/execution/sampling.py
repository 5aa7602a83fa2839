"""The choice of each row's next token, traced inside the compiled step: logits [R, V] in, tokens out.

It knows rows of numbers only: not requests, nor where a sequence's history, mask and bias are kept, nor the
host. Letters of shapes: R rows, V tokens of the vocabulary, L history, W words of 32 tokens, K biased tokens.

The order of work is that of transformers' `generate`: bias, repetition penalty, OpenAI's two penalties (which
it lacks), mask; then, in rows with a temperature: temperature, top_k, top_p, min_p, typical_p, each on what
the one before left. Tokens that tie at a border stay or go together.

A row's token depends on nothing but the row. Work that no row wants is skipped, work that another row wants
leaves a row's bits as they are, and the sums that decide are sums of integers: exact in any order, so that
neither the number of rows nor a vocabulary spread over devices can tip them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hex_llm.sampling_params import MAX_LOGPROBS

MASKED, BIASED = 1, 2  # bits of SamplingRows.constrained
PARTS_BITS = 29  # a row's chances sum to 2**29 .. 2**30 parts
ENTROPY_BITS = 26  # an entropy is at most log(V) < 16
BLOCK = 128  # tokens summed together before the one drawn is looked for
NEAREST = 256  # tokens in which a border is looked for first, on CPUs
MAX_LOGIT = np.finfo(np.float32).max
MIN_TEMPERATURE = np.finfo(np.float32).tiny  # what is less may count as 0 on the device
INFINITY = 0x7F800000  # the bits of float32 infinity


class SamplingRows(NamedTuple):
    """One value for each row, [R]. A row of zeros is padding: it asks for nothing."""

    temperature: jax.Array  # f32; 0: greedy
    top_p: jax.Array
    min_p: jax.Array
    typical_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    top_k: jax.Array  # i32; <= 0: off
    seed: jax.Array  # i32 [R, 2]: the 64 bits of the request's seed
    num_prompt: jax.Array  # i32: tokens of the history that are the prompt
    num_tokens: jax.Array  # i32: tokens of the history in all, so the position of the token to be chosen
    num_logprobs: jax.Array  # i32: -1: none wanted; else how many likeliest beside the chosen one
    constrained: jax.Array  # i32: MASKED | BIASED


class Features(IntFlag):
    """What the rows of a batch ask for besides the likeliest token. On GPUs the host waits at every branch to
    see which way it goes; what it knows beforehand is therefore left out of programs, not branched around."""

    RANDOM = 1  # by temperature and min_p
    CUT = 2  # by top_k or top_p
    TYPICAL = 4
    ADJUSTED = 8  # bias, penalties or a mask
    LOGPROBS = 16


# The ways to choose a token of adjusted logits, each of which can do what those before it can.
VARIANTS = (
    Features(0),
    Features.RANDOM,
    Features.RANDOM | Features.CUT,
    Features.RANDOM | Features.CUT | Features.TYPICAL,
)


class RowState(Protocol):
    """What is remembered of each row's sequence. Called only inside the branches that want it."""

    def history(self) -> jax.Array:
        """[R, L] i32 token ids; only the first num_tokens mean anything."""

    def allowed(self) -> jax.Array:
        """[R, W] i32: bit i of word w: token 32 * w + i may be chosen."""

    def bias(self) -> tuple[jax.Array, jax.Array]:
        """Token ids [R, K] i32 (-1: nothing), none twice in a row, and what is added to their logits."""


class Chosen(NamedTuple):
    """Logprobs are the model's own, before penalties and temperature; all zeros when no row wants any."""

    token_ids: jax.Array  # [R] i32; -1: the row's logits hold NaN or +inf, or no token is allowed
    logprob: jax.Array  # [R] f32 of the chosen token
    rank: jax.Array  # [R] i32 of the chosen token; 1: likeliest
    top_ids: jax.Array  # [R, MAX_LOGPROBS] i32, likeliest first
    top_logprobs: jax.Array  # [R, MAX_LOGPROBS] f32


class Cutoff(NamedTuple):
    """What a row keeps: its nearest tokens, just as many as their values take to reach the target."""

    distance: jax.Array  # [R, V] f32
    values: jax.Array  # [R, V] i32
    target: jax.Array  # [R] i32


def choose(logits: jax.Array, rows: SamplingRows, slots: RowState, num_shards: int = 1) -> Chosen:
    """logits [R, V] f32 -> the next token of each row, whatever it wants. A greedy batch costs one argmax.

    num_shards: over how many devices V is divided; it decides what they exchange, not what is chosen.
    """

    def sampled() -> jax.Array:
        adjust = partial(adjusted, rows=rows, slots=slots, branches=True)
        changed = lax.cond(jnp.any(_adjusts(rows)), adjust, lambda x: x, logits)
        return tokens(changed, rows, None, num_shards)

    token_ids = lax.cond(jnp.any(_random(rows) | _adjusts(rows)), sampled, lambda: _likeliest(logits))
    logprobs = lax.cond(
        jnp.any((rows.num_logprobs >= 0) & (rows.num_tokens > 0)),
        lambda: logprobs_of(logits, token_ids),
        lambda: no_logprobs(len(logits)),
    )
    return Chosen(token_ids, *logprobs)


def wanted_features(rows: SamplingRows) -> Features:
    """By any of the rows, which lie on the host here."""
    random = _random(rows)
    wanted_by = {
        Features.RANDOM: random,
        Features.CUT: random & ((rows.top_k > 0) | (rows.top_p < 1)),
        Features.TYPICAL: random & (rows.typical_p < 1),
        Features.ADJUSTED: _adjusts(rows),
        Features.LOGPROBS: rows.num_logprobs >= 0,
    }
    return Features(sum(feature for feature, rows in wanted_by.items() if np.any(rows)))


def variant_of(features: Features) -> Features:
    """The first of VARIANTS that can do them."""
    return next(variant for variant in VARIANTS if features & VARIANTS[-1] & ~variant == 0)


def logprobs_of(logits: jax.Array, token_ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """logits [N, V], token_ids [N] -> logprob [N], rank [N], top_ids and top_logprobs [N, MAX_LOGPROBS].

    Where the vocabulary is smaller than MAX_LOGPROBS, the rest is token 0 with -inf.
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(logits - best), axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(logits, jnp.maximum(token_ids, 0)[:, None], axis=-1)
    rank = 1 + _count(logits > chosen)
    top, top_ids = _largest(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    lacking = ((0, 0), (0, MAX_LOGPROBS - top.shape[-1]))
    top_logprobs = jnp.pad(top - best - total, lacking, constant_values=-jnp.inf)
    return (chosen - best - total)[:, 0], rank, jnp.pad(top_ids, lacking), top_logprobs


def _largest(logits: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """[N, num] each: the largest logits, falling, and their tokens; of equal ones the first token first."""
    return lax.platform_dependent(
        logits, tpu=partial(largest_by_passes, num=num), default=lambda x: tuple(lax.top_k(x, num))
    )


def largest_by_passes(logits: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """One pass over the vocabulary for each: where it is split, top_k makes the TPU's compiler abort (libtpu
    0.0.48.1)."""
    keys = _flip_negatives(lax.bitcast_convert_type(logits, jnp.int32))
    token_ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)

    def take(left: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        largest = lax.argmax(left, 1, jnp.int32)
        # Less than any float's key, so that none is taken twice, not even where only -inf is left.
        return jnp.where(token_ids == largest[:, None], jnp.int32(-(2**31)), left), largest

    _, largest_ids = lax.scan(take, keys, length=num)
    return jnp.take_along_axis(logits, largest_ids.T, axis=-1), largest_ids.T


def no_logprobs(num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    none, top = jnp.zeros(num_rows), jnp.zeros((num_rows, MAX_LOGPROBS))
    return none, none.astype(jnp.int32), top.astype(jnp.int32), top


def adjusted(logits: jax.Array, rows: SamplingRows, slots: RowState, branches: bool) -> jax.Array:
    """The logits that greedy and random rows alike choose by: bias, penalties and mask applied. A row with
    NaN or infinity, which a mask could hide, becomes NaN."""

    def when(rows: jax.Array, change: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
        return lax.cond(jnp.any(rows), change, lambda x: x, logits) if branches else change(logits)

    usable = _count(~(logits < jnp.inf)) == 0  # NaN compares false
    logits = jnp.where(usable[:, None], logits, jnp.nan)
    logits = when(_has(rows, BIASED), lambda x: _biased(x, rows, slots), logits)
    logits = when(_repeats(rows), lambda x: _repetition_penalized(x, rows, slots), logits)
    logits = when(_counts(rows), lambda x: _count_penalized(x, rows, slots), logits)
    return when(_has(rows, MASKED), lambda x: _masked(x, rows, slots), logits)


def tokens(logits: jax.Array, rows: SamplingRows, variant: Features | None, num_shards: int = 1) -> jax.Array:
    """Adjusted logits [R, V] -> [R] i32, -1 where there is none; None of VARIANTS: whichever is wanted.
    num_shards: as in `choose`."""
    if variant == Features(0):
        return _likeliest(logits)
    random, likeliest = _random(rows), _likeliest(logits)

    def drawn() -> jax.Array:
        return jnp.where(random, _drawn(weights(logits, rows, variant), rows, num_shards), likeliest)

    token_ids = lax.cond(jnp.any(random), drawn, lambda: likeliest) if variant is None else drawn()
    return jnp.where(likeliest >= 0, token_ids, -1)


def weights(logits: jax.Array, rows: SamplingRows, variant: Features | None) -> jax.Array:
    """Adjusted logits -> i32 [R, V]: how many parts of its row's sum are a token's chance to be drawn.

    Rows that are not random get numbers without meaning.
    """
    random = _random(rows)
    best = jnp.max(logits, axis=-1, keepdims=True)
    scaled = (logits - best) / jnp.where(random, rows.temperature, 1)[:, None]  # at most 0: nothing overflows
    chance = jnp.exp(scaled)  # the likeliest's is 1

    def top_k() -> Cutoff:
        return Cutoff(-logits, jnp.ones(logits.shape, jnp.int32), rows.top_k)

    def top_p() -> Cutoff:
        parts, _ = _parts(chance)
        return Cutoff(-logits, parts, _share(rows.top_p, parts))

    def typical_p() -> Cutoff:
        parts, scale = _parts(chance)
        return Cutoff(_unlikeness(scaled, chance, parts, scale), parts, _share(rows.typical_p, parts))

    branches = variant is None
    if variant is None or Features.CUT in variant:
        fewer = random & (rows.top_k > 0) & (rows.top_k < logits.shape[-1])
        chance = _cut(chance, fewer, top_k, branches)
        chance = _cut(chance, random & (rows.top_p < 1), top_p, branches)
    chance = jnp.where(chance >= rows.min_p[:, None], chance, 0)
    if variant is None or Features.TYPICAL in variant:
        chance = _cut(chance, random & (rows.typical_p < 1), typical_p, branches)
    return _parts(chance)[0]


def _random(rows: SamplingRows) -> jax.Array:
    return rows.temperature >= MIN_TEMPERATURE


def _has(rows: SamplingRows, bit: int) -> jax.Array:
    return rows.constrained & bit != 0


def _repeats(rows: SamplingRows) -> jax.Array:
    return (rows.repetition_penalty > 0) & (rows.repetition_penalty != 1)


def _counts(rows: SamplingRows) -> jax.Array:
    return (rows.presence_penalty != 0) | (rows.frequency_penalty != 0)


def _adjusts(rows: SamplingRows) -> jax.Array:
    return (rows.constrained != 0) | _repeats(rows) | _counts(rows)


def _likeliest(logits: jax.Array) -> jax.Array:
    """[R] i32; -1 where its logit is not finite. NaN and infinity win an argmax, so neither goes unseen."""
    token_ids = lax.argmax(logits, logits.ndim - 1, jnp.int32)
    largest = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(largest), token_ids, -1)


def _biased(logits: jax.Array, rows: SamplingRows, slots: RowState) -> jax.Array:
    token_ids, values = slots.bias()
    return _add(logits, _has(rows, BIASED)[:, None] & (token_ids >= 0), token_ids, values)


def _repetition_penalized(logits: jax.Array, rows: SamplingRows, slots: RowState) -> jax.Array:
    penalty = jnp.where(_repeats(rows), rows.repetition_penalty, 1)[:, None]
    penalized = jnp.where(logits < 0, logits * penalty, logits / penalty)
    penalized = jnp.minimum(penalized, MAX_LOGIT)  # a penalty near 0 must not make infinity
    seen = _num_seen(logits, slots, jnp.zeros_like(rows.num_tokens), rows.num_tokens) > 0
    return jnp.where(seen & _repeats(rows)[:, None], penalized, logits)


def _count_penalized(logits: jax.Array, rows: SamplingRows, slots: RowState) -> jax.Array:
    counts = _num_seen(logits, slots, rows.num_prompt, rows.num_tokens).astype(logits.dtype)
    logits = logits - rows.frequency_penalty[:, None] * counts
    return logits - rows.presence_penalty[:, None] * (counts > 0)


def _masked(logits: jax.Array, rows: SamplingRows, slots: RowState) -> jax.Array:
    bits = slots.allowed()[:, :, None] >> jnp.arange(32) & 1  # [R, W, 32]
    allowed = bits.reshape(len(logits), -1)[:, : logits.shape[-1]] != 0
    return jnp.where(allowed | ~_has(rows, MASKED)[:, None], logits, -jnp.inf)


def _num_seen(logits: jax.Array, slots: RowState, first: jax.Array, end: jax.Array) -> jax.Array:
    """[R, V] i32: how often each token stands at positions first .. end - 1 of its row's history."""
    history = slots.history()
    positions = jnp.arange(history.shape[-1])
    within = (positions >= first[:, None]) & (positions < end[:, None]) & (history >= 0)
    return _add(jnp.zeros(logits.shape, jnp.int32), within, history, jnp.ones_like(history))


def _add(to: jax.Array, wanted: jax.Array, token_ids: jax.Array, values: jax.Array) -> jax.Array:
    """to [R, V] with values [R, N] added at token_ids [R, N] where wanted."""
    nowhere = to.shape[-1]
    at = jnp.where(wanted, token_ids, nowhere)
    return to.at[jnp.arange(len(to))[:, None], at].add(values, mode="drop")


def _cut(chance: jax.Array, wanted: jax.Array, border: Callable[[], Cutoff], branches: bool) -> jax.Array:
    """The chances, in rows that want it, of the tokens inside the border only."""

    def keep() -> jax.Array:
        distance, values, target = border()
        threshold = _threshold(Cutoff(distance, values, jnp.where(wanted, target, 0)))
        return jnp.where((distance <= threshold[:, None]) | ~wanted[:, None], chance, 0)

    return lax.cond(jnp.any(wanted), keep, lambda: chance) if branches else keep()


def _parts(chance: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Chances as whole numbers [R, V], and what they were multiplied with [R, 1].

    The scale is a power of two: this one sum of floats decides by its magnitude only.
    """
    total = jnp.sum(chance, axis=-1, keepdims=True)
    magnitude = lax.bitcast_convert_type(lax.bitcast_convert_type(total, jnp.int32) & INFINITY, jnp.float32)
    scale = 2.0**PARTS_BITS / magnitude
    return jnp.round(chance * scale).astype(jnp.int32), scale


def _share(share: jax.Array, parts: jax.Array) -> jax.Array:
    """How many parts are that share [R] of a row: at least one, so that something always stays."""
    return jnp.maximum(jnp.ceil(share * jnp.sum(parts, axis=-1)), 1).astype(jnp.int32)


def _unlikeness(scaled: jax.Array, chance: jax.Array, parts: jax.Array, scale: jax.Array) -> jax.Array:
    """[R, V]: how far each token's information is from the row's entropy; infinite where chance is 0."""
    total = jnp.sum(parts, axis=-1, keepdims=True) / scale
    information = jnp.log(total) - scaled
    terms = jnp.where(chance > 0, chance / total * information, 0)
    entropy = jnp.sum(jnp.round(terms * 2.0**ENTROPY_BITS).astype(jnp.int32), axis=-1, keepdims=True)
    return jnp.where(chance > 0, jnp.abs(information - entropy * 2.0**-ENTROPY_BITS), jnp.inf)


def _threshold(border: Cutoff) -> jax.Array:
    """[R]: the smallest distance within which a row's values sum to its target; infinite if none does.

    Both ways give the same: 32 passes over the vocabulary suit accelerators, a partial sort suits CPUs.
    """
    return lax.platform_dependent(border, cpu=threshold_of_nearest, default=threshold_by_bisection)


def threshold_of_nearest(border: Cutoff) -> jax.Array:
    near, at = lax.top_k(-border.distance, min(NEAREST, border.distance.shape[-1]))
    ends = jnp.cumsum(jnp.take_along_axis(border.values, at, axis=-1), axis=-1)
    return lax.cond(
        jnp.all(ends[:, -1] >= border.target),
        lambda: -jnp.take_along_axis(near, _first(ends, border.target), axis=-1)[:, 0],
        lambda: threshold_by_bisection(border),
    )


def threshold_by_bisection(border: Cutoff) -> jax.Array:
    """Halves the range of the floats' bit patterns: no sort, and exact in as many steps as there are bits."""
    distance, values, target = border
    keys = _flip_negatives(lax.bitcast_convert_type(distance, jnp.int32))

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their mean: the sum could overflow
        reached = jnp.sum(jnp.where(keys <= middle[:, None], values, 0), axis=-1) >= target
        return jnp.where(reached, low, middle), jnp.where(reached, middle, high)

    bounds = jnp.full_like(target, -INFINITY - 1), jnp.full_like(target, INFINITY)
    _, high = lax.fori_loop(0, 32, halve, bounds)
    return lax.bitcast_convert_type(_flip_negatives(high), jnp.float32)


def _flip_negatives(bits: jax.Array) -> jax.Array:
    """Between a float's bits and an integer that orders as the float does: its own inverse; -0 becomes 0."""
    return jnp.where(bits < 0, jnp.int32(-(2**31)) - bits, bits)


def _drawn(parts: jax.Array, rows: SamplingRows, num_shards: int) -> jax.Array:
    """[R] i32: the token in which a random one of the row's parts lies; never one without parts."""
    # Every shard is filled up to whole blocks: for one that lies on two devices, they exchange parts of rows.
    shards = parts.reshape(len(parts), num_shards, -1)
    lacking = -shards.shape[-1] % BLOCK
    filled = jnp.pad(shards, ((0, 0), (0, 0), (0, lacking)))
    blocks = filled.reshape(len(parts), -1, BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = random_part(rows, ends[:, -1]) + 1
    block = _first(ends, target)  # [R, 1]
    target -= jnp.take_along_axis(ends - sums, block, axis=-1)[:, 0]
    inside = jnp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    place = (block * BLOCK + _first(jnp.cumsum(inside, axis=-1), target))[:, 0]
    return place - place // filled.shape[-1] * lacking  # without what the shards before it were filled with


def _first(ends: jax.Array, target: jax.Array) -> jax.Array:
    """[R, 1] i32: where running sums [R, N] first reach the target [R]."""
    return _count(ends < target[:, None])[:, None]


def _count(marks: jax.Array) -> jax.Array:
    """[R] i32. Floats count exactly to 2**24, and XLA compiles their sums much faster for CPUs."""
    return jnp.sum(marks, axis=-1, dtype=jnp.float32).astype(jnp.int32)


def random_part(rows: SamplingRows, total: jax.Array) -> jax.Array:
    """[R] i32, at least 0 and below `total`, from each row's seed and position alone."""

    def bits_of(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, position))[0]

    bits = jax.vmap(bits_of)(lax.bitcast_convert_type(rows.seed, jnp.uint32), rows.num_tokens)
    # bits * total / 2**32 by halves of 16 bits, as no integer is wider than 32; at most 2 too small.
    high, low = bits >> 16, bits & 0xFFFF
    parts = total.astype(jnp.uint32)
    part = high * (parts >> 16) + (high * (parts & 0xFFFF) >> 16) + (low * (parts >> 16) >> 16)
    return part.astype(jnp.int32)
