"""The TPU's kernel for pages of 8 bits (tpu_pages.py).

Queries come in *tiles*, each of some consecutive tokens, or of one that decodes; a tile attends to each run
(tpu.py) that has tokens in it, by *stretches* of keys. Stretches are read some ahead, whoever they are for:
one state says what is read next and another what is attended to next, and both go the same way. Numbers
become bfloat16 in vector memory; scales are multiplied with scores and weights.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.attention import BYTE, HIDDEN, Options
from hex_llm.kernels.tpu_sinks import LANES

HALF = LANES // 2  # where the scales of values begin in a row of them
BUFFERS = 4  # stretches that are read at a time; a power of 2
HIGH_BYTE = -(1 << 24)  # of 32 bits
# By what numbers are too large as they are made: of int8 the highest byte of a word is taken for one.
EXCESS = {np.dtype(np.int8): 2.0**24, np.dtype(jnp.float8_e4m3fn): 1.0}


class Sizes(NamedTuple):
    """What the kernel is made for besides its arrays."""

    tokens: int  # of a tile
    queries: int  # of a token, for each KV head; some may be nobody's
    table_width: int
    per_block: int  # pages
    options: Options  # without sinks
    has_sinks: bool
    dtype: np.dtype[Any]  # of pages


class State(IntEnum):
    """What is remembered from block to block."""

    NEXT_TILE = 0  # of what is read next
    NEXT_RUN = 1
    NEXT_STRETCH = 2
    NUM_READ = 3  # stretches
    RUN = 4  # that attends next
    NUM_DONE = 5  # stretches


class Refs(NamedTuple):
    ends: Any
    lengths: Any
    tables: Any  # as one row
    num: Any
    first_peaks: Any  # [K, rows of a tile, 128]: the scores of sinks
    q: Any  # [K, rows of a block, H]
    words: Any  # [pages, J, K, U, 128]
    scales: Any  # [pages, K, 128]
    out: Any
    read_words: Any  # [BUFFERS, pages, J, K, U, 128]
    read_scales: Any
    semaphores: Any
    state: Any
    peaks: Any
    sums: Any
    acc: Any

    @property
    def page_size(self) -> int:
        return int(self.words.shape[3])

    @property
    def num_pages(self) -> int:
        """Of a stretch."""
        return int(self.read_words.shape[1])

    @property
    def num_keys(self) -> int:
        return self.num_pages * self.page_size


def attend_block(*refs: Any, sizes: Sizes) -> None:
    r = Refs(*refs)
    rows = r.acc.shape[1]
    tiles = r.q.shape[1] // rows

    @pl.when(pl.program_id(0) == 0)
    def begin() -> None:
        for name in State:
            r.state[name] = 0
        r.state[State.NEXT_STRETCH] = _stretches(r, sizes, 0, 0)[0]
        lax.fori_loop(0, BUFFERS, lambda *_: _read_ahead(r, sizes), None)

    def attend_tile(i: Any, _: None) -> None:
        tile, place = pl.program_id(0) * tiles + i, pl.ds(i * rows, rows)
        end = (tile + 1) * sizes.tokens
        r.peaks[...] = r.first_peaks[...]
        r.sums[...] = jnp.full(r.sums.shape, 1.0 if sizes.has_sinks else 0.0)
        r.acc[...] = jnp.zeros(r.acc.shape)
        run = lax.while_loop(
            lambda run: (run < r.num[0]) & (r.ends[run] < end),
            partial(_attend_run, r, sizes, tile, place),
            r.state[State.RUN],
        )
        r.state[State.RUN] = run - (r.ends[run] > end).astype(jnp.int32)  # it goes on in the next tile
        for head in range(r.acc.shape[0]):
            total = jnp.maximum(r.sums[head][:, :1], 1e-30)
            r.out[head, place] = (r.acc[head] / total).astype(r.out.dtype)

    lax.fori_loop(0, tiles, attend_tile, None)


def _stretches(r: Refs, sizes: Sizes, tile: Any, run: Any) -> tuple[Any, Any]:
    """Those of a run that the tile's tokens see: the first, and the one behind the last."""
    last = jnp.minimum(r.ends[run + 1], (tile + 1) * sizes.tokens) - 1
    begin: Any = 0
    window = sizes.options.mask.window
    if window is not None:
        first = jnp.maximum(r.ends[run], tile * sizes.tokens)
        begin = jnp.maximum(_key(r, run, first) - window + 1, 0) >> _bits(r.num_keys)
    return begin, (_key(r, run, last) >> _bits(r.num_keys)) + 1


def _key(r: Refs, run: Any, token: Any) -> Any:
    """A token's own, of those that its run sees."""
    return r.lengths[run] - r.ends[run + 1] + token


def _bits(size: int) -> int:
    """Of numbers below a power of 2; to shift by them is to divide by it."""
    return size.bit_length() - 1


def _read_ahead(r: Refs, sizes: Sizes) -> None:
    """Begins to read the next stretch, if there is one."""
    tile, run, stretch, num_read = (r.state[name] for name in list(State)[:4])
    is_one, run = run < r.num[0], jnp.minimum(run, r.num[0] - 1)
    _read(r, sizes, run, stretch, num_read & (BUFFERS - 1), is_one)
    is_last = stretch + 1 >= _stretches(r, sizes, tile, run)[1]
    end, run_end = (tile + 1) * sizes.tokens, r.ends[run + 1]
    next_tile = jnp.where(is_last & (run_end >= end), tile + 1, tile)
    next_run = jnp.where(is_one & ~(is_last & (run_end <= end)), run, run + 1)
    begin = _stretches(r, sizes, next_tile, jnp.minimum(next_run, r.num[0] - 1))[0]
    r.state[State.NEXT_TILE], r.state[State.NEXT_RUN] = next_tile, next_run
    r.state[State.NEXT_STRETCH] = jnp.where(is_last, begin, stretch + 1)
    r.state[State.NUM_READ] = num_read + 1


def _read(r: Refs, sizes: Sizes, run: Any, stretch: Any, buffer: Any, is_one: Any) -> None:
    first, per_block = stretch * r.num_pages, sizes.per_block
    num = jnp.where(is_one, _num_pages(r, run, stretch), 0)
    blocks, place = run * sizes.table_width + (first >> _bits(per_block)), first & (per_block - 1)
    for i in range(r.num_pages):  # no loop, so that copies begin beside the arithmetic around them
        page = r.tables[blocks + i // per_block] * per_block + place + i % per_block

        @pl.when(i < num)
        def begin(page: Any = page, i: int = i) -> None:
            for held, read in ((r.words, r.read_words), (r.scales, r.read_scales)):
                pltpu.make_async_copy(held.at[page], read.at[buffer, i], r.semaphores.at[buffer]).start()


def _wait(r: Refs, run: Any, stretch: Any, buffer: Any) -> None:
    num = _num_pages(r, run, stretch)
    for i in range(_bits(r.num_pages) + 1):

        @pl.when(num & (1 << i) != 0)
        def wait(i: int = i) -> None:
            some = pl.ds(0, 1 << i)
            for held, read in ((r.words, r.read_words), (r.scales, r.read_scales)):
                pltpu.make_async_copy(held.at[some], read.at[buffer, some], r.semaphores.at[buffer]).wait()


def _num_pages(r: Refs, run: Any, stretch: Any) -> Any:
    """Those of a stretch that the run has."""
    left = r.lengths[run] - stretch * r.num_keys
    return jnp.minimum(left + r.page_size - 1 >> _bits(r.page_size), r.num_pages)


def _attend_run(r: Refs, sizes: Sizes, tile: Any, place: Any, run: Any) -> Any:
    """The tile's tokens that are of this run; the next run."""

    def attend_stretch(stretch: Any, _: None) -> None:
        num_done = r.state[State.NUM_DONE]
        buffer = num_done & (BUFFERS - 1)
        _wait(r, run, stretch, buffer)
        visible = _visible(r, sizes, tile, run, stretch)
        scales = _scales(r.read_scales.at[buffer], r.page_size)
        for head in range(r.acc.shape[0]):
            _attend_head(r, sizes, head, place, buffer, visible, *(x[head : head + 1] for x in scales))
        r.state[State.NUM_DONE] = num_done + 1
        _read_ahead(r, sizes)  # into the same buffer

    lax.fori_loop(*_stretches(r, sizes, tile, run), attend_stretch, None)
    return run + 1


def _visible(r: Refs, sizes: Sizes, tile: Any, run: Any, stretch: Any) -> Array:
    """[rows, keys]"""
    shape, window = (r.acc.shape[1], r.num_keys), sizes.options.mask.window
    token = tile * sizes.tokens + lax.broadcasted_iota(jnp.int32, shape, 0) // sizes.queries
    key = stretch * r.num_keys + lax.broadcasted_iota(jnp.int32, shape, 1)
    own = _key(r, run, token)
    seen = key <= own
    if window is not None:
        seen &= own - key < window
    return seen if sizes.tokens == 1 else seen & (token >= r.ends[run]) & (token < r.ends[run + 1])


def _scales(held: Any, page_size: int) -> tuple[Array, Array]:
    """Those of keys, and of values, [K, keys], out of a row of lanes for each page."""
    (num_pages, num_heads, *_), per_row = held.shape, LANES // page_size
    shape = num_heads, LANES
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)

    def side_by_side(first_lane: int) -> Array:
        rows = []
        for begin in range(0, num_pages, per_row):
            row = jnp.zeros(shape)
            for i in range(per_row):
                moved = pltpu.roll(held[begin + i].reshape(shape), (i * page_size - first_lane) % LANES, 1)
                row = jnp.where(lane >> _bits(page_size) == i, moved, row)
            rows.append(row)
        return jnp.concatenate(rows, axis=1)

    return side_by_side(0), side_by_side(HALF)


def _attend_head(
    r: Refs,
    sizes: Sizes,
    head: int,
    place: Any,
    buffer: Any,
    visible: Array,
    of_keys: Array,
    of_values: Array,
) -> None:
    _, scale, softcap, _ = sizes.options
    excess, parts = EXCESS[sizes.dtype], range(r.words.shape[1])
    read = [_widened(r.read_words[buffer, :, part, head], sizes.dtype) for part in parts]
    lanes = [slice(part * LANES, (part + 1) * LANES) for part in parts]
    q, product = r.q[head, place].astype(jnp.bfloat16), partial(_product, over=1)
    scores = sum(product(q[:, lanes[part]], read[part][0]) for part in parts) * (of_keys * (scale / excess))
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    scores = jnp.where(visible, scores, HIDDEN)
    peak = r.peaks[head]
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1, keepdims=True))
    weights, shrink = jnp.exp(scores - new_peak[:, :1]), jnp.exp(peak - new_peak)
    r.peaks[head] = new_peak
    r.sums[head] = r.sums[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    # The scale of a value that is not seen may be no number.
    weights = jnp.where(visible, weights * (of_values * (1 / excess)), 0).astype(jnp.bfloat16)
    for part in parts:
        added = _product(weights, read[part][1], over=0)
        r.acc[head, :, lanes[part]] = r.acc[head, :, lanes[part]] * shrink + added


def _product(left: Array, right: Array, over: int) -> Array:
    """[M, x] with [x, N] or, over=1, with [N, x]."""
    return lax.dot_general(left, right, (((1,), (over,)), ((), ())), preferred_element_type=jnp.float32)


def _widened(words: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Numbers of keys and of values, bfloat16 [P * U, 128], EXCESS times as large, of words [P, U, 128]. A
    word of 32 bits has those of two keys."""
    pairs = pltpu.bitcast(words.reshape(-1, LANES), jnp.int32)

    def number(highest: Array) -> Array:
        """float32 whose lower 16 bits are 0, as bits, of a highest byte."""
        if dtype == jnp.int8:
            return lax.bitcast_convert_type(highest.astype(jnp.float32), jnp.int32)
        # Exponents have another bias. What has none, below 2**-6 of up to 448, becomes 0 on TPUs.
        bits = (highest >> 4) & ~(0x78 << 3 * BYTE)
        return lax.bitcast_convert_type(lax.bitcast_convert_type(bits, jnp.float32) * 2.0**120, jnp.int32)

    def both(first: Array, second: Array) -> Array:
        return pltpu.bitcast(lax.shift_right_logical(number(first), 16) | number(second), jnp.bfloat16)

    of_keys = both(pairs << 24, (pairs << 8) & HIGH_BYTE)
    return of_keys, both((pairs << 16) & HIGH_BYTE, pairs & HIGH_BYTE)
