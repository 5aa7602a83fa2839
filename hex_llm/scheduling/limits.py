"""What a step may hold, as the flags say or, where they say nothing, as the platform allows; and how long
steps take."""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from hex_llm.config import HEX_LLM_PREFILL_PADDING, EngineConfig
from hex_llm.flag_fields import MAX_INT
from hex_llm.types import StepPlan

LARGE_MEMORY = 40 << 30  # of a device, free after the weights: for so many sequences as only large ones hold
# Of the host's memory, for all sequences that wait or run; and what one costs in both processes together.
QUEUE_SHARE = 0.1
BYTES_PER_TOKEN = 80
BYTES_PER_SEQUENCE = 20_000

Grid = tuple[tuple[float, int], ...]  # up to which number there are how many sizes from it to its double
UNIT = 8  # of sizes of steps
COARSE: Grid = ((math.inf, 2),)  # for CPUs, which compile slowly
# Padding is the dearest in middling steps; of large ones the rest fits into the next (Scheduler._fit).
STEPS: Grid = ((256, 4), (1024, 8), (math.inf, 4))


class Defaults(NamedTuple):
    max_decode_seqs: int
    max_prefill_seqs: int
    max_tokens: int
    target_step_ms: int
    grid: Grid = STEPS


DEFAULTS = {
    "cpu": Defaults(32, 8, max_tokens=256, target_step_ms=200, grid=COARSE),
    "gpu": Defaults(256, 32, max_tokens=4096, target_step_ms=100),
    "tpu": Defaults(256, 8, max_tokens=4096, target_step_ms=70),
}
# A long prompt's step is so long, and others wait for it; longer ones are full, since nobody decodes.
LARGE_STEPS: Grid = ((256, 4), (1024, 8), (2048, 4), (4096, 8), (math.inf, 2))
LARGE_GPU = Defaults(1024, 32, max_tokens=8192, target_step_ms=77, grid=LARGE_STEPS)


@dataclass(frozen=True)
class StepLimits:
    max_prefill_seqs: int
    max_decode_seqs: int
    max_tokens: int  # of all chunks and decodes together; if not chunked, one prompt may be longer, alone
    chunked: bool = False
    prefix_unit: int | None = None  # prefix-cache hits are multiples of it; None: no prefix cache
    max_sequences: int = MAX_INT  # waiting and running
    target_s: float = math.inf  # of a step in which someone decodes
    # Numbers of tokens that steps are padded to: of those with prompts, and of decodes alone.
    step_sizes: tuple[int, ...] = ()
    decode_sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: EngineConfig, max_len: int, platform: str, free_bytes: int | None) -> StepLimits:
        """`free_bytes` of each device, if they say so, after the weights."""
        is_large = platform == "gpu" and (free_bytes or 0) >= LARGE_MEMORY
        chosen = LARGE_GPU if is_large else DEFAULTS.get(platform, DEFAULTS["gpu"])
        chunked = config.enable_chunked_prefill is not False
        budget = config.max_num_batched_tokens
        max_seqs = config.max_decode_seqs or min(chosen.max_decode_seqs, budget or chosen.max_tokens)
        if budget is None and chunked:
            budget = max(chosen.max_tokens, 2 * max_seqs)
        elif budget is None:
            budget = (
                chosen.max_tokens if config.max_prefill_seqs is None else config.max_prefill_seqs * max_len
            )
        largest, unit = max(budget, max_seqs, 0 if chunked else max_len), config.prefill_len_padding
        return cls(
            config.max_prefill_seqs or chosen.max_prefill_seqs,
            max_seqs,
            budget,
            chunked,
            prefix_unit(config),
            max_sequences(config, max_len, max_seqs),
            (config.target_step_ms or chosen.target_step_ms) / 1000,
            sizes(largest, unit or UNIT, () if unit else chosen.grid),
            sizes(max_seqs, config.decode_seqs_padding or UNIT, chosen.grid),
        )


def max_sequences(config: EngineConfig, max_len: int, max_decode_seqs: int) -> int:
    """That may be waiting and running at one replica: enough for every burst that can be served in good
    time, and what fits into a share of the memory even if all of them are as long as can be."""
    if config.max_concurrent_requests is not None:
        return config.max_concurrent_requests
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    share = int(memory * QUEUE_SHARE) // config.replicas_per_host
    fit = share // (BYTES_PER_TOKEN * max_len + BYTES_PER_SEQUENCE)
    return max(2 * max_decode_seqs, min(max(1024, 16 * max_decode_seqs), fit))


def sizes(largest: int, unit: int, grid: Grid = ()) -> tuple[int, ...]:
    """Powers of two below the unit, then multiples of it, as few as the grid says: more pad less, but take
    longer to compile. The last holds `largest`, exactly if there is a grid."""
    found, n = [], 1
    while n < largest:
        found.append(n)
        per_doubling = next((num for limit, num in grid if n < limit), n)
        step = unit * max(1 << (n // (unit * per_doubling)).bit_length() >> 1, 1)
        n = min(2 * n, unit) if n < unit else n + step
    return (*found, largest if grid else n)


def prefix_unit(config: EngineConfig) -> int | None:
    """Who asks for the prefix cache by its flag gets Hex-LLM's, unless the unit is named too."""
    if config.enable_prefix_cache_hbm is False:
        return None
    unit = config.prefix_cache_unit or ("prefill_len_padding" if config.enable_prefix_cache_hbm else "block")
    if unit == "block":
        return config.block_size
    return math.lcm(config.block_size, config.prefill_len_padding or HEX_LLM_PREFILL_PADDING)


class StepTimes:
    """How long steps take: by their tokens as was measured before the first; and what the keys that these see
    add, as is learned from steps that were run. Decodes wait for keys to be read, chunks for products with
    them, so each have a rate of their own, and there is a part that every step has."""

    KEPT = 0.99  # of what was learned, from one step to the next
    UNITS = np.array([1, 1e5, 1e6])  # of what is learned from: steps, keys of decodes, keys of chunks
    DOUBT = 0.01 * np.eye(3)  # so that what was never seen costs nothing

    def __init__(self, measured: Mapping[int, float]) -> None:
        """Seconds by number of tokens."""
        self._sizes = sorted(measured)
        # A longer step is not shorter, whatever was measured.
        self._seconds = list(accumulate((measured[n] for n in self._sizes), max))
        # The sums of a least-squares fit, and what it gives.
        self._products, self._sums = np.zeros((3, 3)), np.zeros(3)
        self._step_s = self._decode_key_s = self._chunk_key_s = 0.0

    def tokens_within(self, seconds: float, num_decode_keys: int = 0) -> int:
        """The most tokens of a step whose decodes see so many keys."""
        seconds -= self._besides(num_decode_keys)
        i = bisect_right(self._seconds, seconds)
        if i == 0:
            return 0
        if i == len(self._sizes):
            return int(seconds / self._token_s)
        share = (seconds - self._seconds[i - 1]) / (self._seconds[i] - self._seconds[i - 1])
        return int(self._sizes[i - 1] + share * (self._sizes[i] - self._sizes[i - 1]))

    def weight(self, position: int) -> float:
        """How many tokens at the beginning of a prompt cost as much as one at `position`."""
        return 1 + position * self._chunk_key_s / self._token_s

    def prefill_seconds(self, num_tokens: int) -> float:
        return num_tokens * self._token_s

    def decodes_seconds(self, num_decodes: int, num_keys: int) -> float:
        """Of a step of so many decodes, or of one token, that see so many keys."""
        return self.seconds(max(num_decodes, 1)) + self._besides(num_keys)

    def expected(self, plan: StepPlan, num_tokens: int) -> float:
        """Seconds of a step, padded to so many tokens."""
        decode_keys, chunk_keys = _keys_seen(plan)
        return self.seconds(num_tokens) + self._besides(decode_keys) + chunk_keys * self._chunk_key_s

    def observe(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """A step took so long, padded to so many tokens."""
        seen = np.array([1, *_keys_seen(plan)]) / self.UNITS
        self._products = self.KEPT * self._products + np.outer(seen, seen)
        self._sums = self.KEPT * self._sums + seen * (seconds - self.seconds(num_tokens))
        fitted = np.linalg.solve(self._products + self.DOUBT, self._sums) / self.UNITS
        self._step_s, *rates = fitted.tolist()
        self._decode_key_s, self._chunk_key_s = (max(rate, 0.0) for rate in rates)

    def _besides(self, num_decode_keys: int) -> float:
        """What a step takes besides its tokens and the keys of its chunks."""
        return self._step_s + num_decode_keys * self._decode_key_s

    @property
    def _token_s(self) -> float:
        """Of one token among many."""
        return self._seconds[-1] / self._sizes[-1]

    def seconds(self, num_tokens: int) -> float:
        """Of a step of so many tokens that see few keys."""
        i = bisect_left(self._sizes, num_tokens)
        if i == len(self._sizes):
            return num_tokens * self._token_s
        if i == 0:
            return self._seconds[0]
        share = (num_tokens - self._sizes[i - 1]) / (self._sizes[i] - self._sizes[i - 1])
        return self._seconds[i - 1] + share * (self._seconds[i] - self._seconds[i - 1])


def _keys_seen(plan: StepPlan) -> tuple[int, int]:
    """By its decodes, and by the tokens of its chunks."""
    return sum(chunk.end for chunk in plan.decodes), sum(
        chunk.num_tokens * (chunk.position + chunk.end) // 2 for chunk in plan.prefills
    )
