"""How often ways of serving change the greedy tokens of the embedded default model in bfloat16, and why.

Run by `python -m tools.bf16_matrix` from the root. Rounding depends on the order of sums, and that on shapes,
so tokens whose scores are nearly equal may change places. The judge is our own plain run: each prompt alone,
no chunks, no prefix cache, with the log-probabilities of its two likeliest tokens. Every other way, that is
every batch size, chunk size and use of the cache, serves the same 32 prompts; a table tells for each how many
requests kept all their tokens, where the first others differ, and how far apart the judge's two likeliest
tokens were there: a fault of ours would show as a wide gap.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from hex_llm.config import EngineConfig
from hex_llm.engine.engine import Engine
from hex_llm.engine.loading import build_engine, open_files
from hex_llm.sampling_params import SamplingParams
from hex_llm.types import Request, TokenLogprobs, Update
from tools.gpu_common import write_model

NUM_PROMPTS, NUM_OUT, MAX_LEN = 32, 30, 96
BATCHES = (1, 7, 32)
CHUNKS = (None, 33, 64)  # tokens in a step; None: prompts are not cut


class Way(NamedTuple):
    """How the prompts are served."""

    batch: int  # so many at once
    chunk: int | None
    caching: bool  # every prompt twice: the second time it is found in the prefix cache

    def __str__(self) -> str:
        cached = "found in the cache" if self.caching else "no cache"
        cut = "whole prompts" if self.chunk is None else f"chunks of {self.chunk}"
        return f"{self.batch} at once, {cut}, {cached}"


class Run(NamedTuple):
    tokens: list[int]
    logprobs: list[TokenLogprobs]


PLAIN = Way(1, None, False)


class Engines:
    """One set of weights and programs for each chunk size; the rest is always new."""

    def __init__(self, **fixed: Any) -> None:
        self._fixed = fixed
        self._first: dict[int | None, Engine] = {}

    def engine(self, way: Way) -> Engine:
        config = EngineConfig(
            **self._fixed,
            skip_tokenizer_init=True,
            max_model_len=MAX_LEN,
            num_blocks=NUM_PROMPTS * MAX_LEN // 16,
            block_size=16,
            max_decode_seqs=NUM_PROMPTS,
            max_prefill_seqs=4,
            enable_chunked_prefill=way.chunk is not None,
            max_num_batched_tokens=way.chunk,
            enable_prefix_cache_hbm=way.caching,
            prefix_cache_unit="block",
        )
        if way.chunk not in self._first:
            self._first[way.chunk] = build_engine(config, open_files(config), None)
            self._first[way.chunk].warm_up()
        first = self._first[way.chunk]
        return Engine(config, first.spec, first.stepper.runner, first.stepper.scheduler.pool.num_blocks)


def make_prompts() -> list[list[int]]:
    """Lengths at the borders of blocks and next to them, and others; half begin like another one."""
    lengths = [border + i for border in (16, 32, 48, 64) for i in (-1, 0, 1)] + list(range(3, 63, 3))
    assert len(lengths) == NUM_PROMPTS
    rng = random.Random(1)
    common = [rng.randrange(1000, 40_000) for _ in range(MAX_LEN)]
    own = [[rng.randrange(1000, 40_000) for _ in range(length)] for length in lengths]
    return [common[: len(ids) - 1] + ids[-1:] if i % 2 else ids for i, ids in enumerate(own)]


def serve(engine: Engine, way: Way, prompts: list[list[int]], num_logprobs: int | None) -> list[Run]:
    """One run for each prompt, of its last time."""
    params = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True, logprobs=num_logprobs)
    for _ in range(1 + way.caching):
        runs = [Run([], []) for _ in prompts]
        num_cached = 0
        for start in range(0, len(prompts), way.batch):
            for i, ids in list(enumerate(prompts))[start : start + way.batch]:
                engine.add(Request(str(i), ids, params))
            while engine.has_work:
                for update in engine.step():
                    num_cached += _take(runs[int(update.request_id)], update)
    assert bool(num_cached) == way.caching
    return runs


def _take(run: Run, update: Update) -> int:
    """The prompt's tokens that were cached."""
    assert not update.error, update.error
    run.tokens.extend(update.token_ids)
    run.logprobs.extend(update.logprobs)
    return update.num_cached


def compared(way: Way, plain: list[Run], runs: list[Run]) -> str:
    """A row of the table. Only the first difference of a request counts: after it the texts are others."""
    places, gaps = [], []
    for one, other in zip(plain, runs, strict=True):
        assert len(one.tokens) == len(other.tokens) == NUM_OUT
        if one.tokens != other.tokens:
            at = next(i for i in range(NUM_OUT) if one.tokens[i] != other.tokens[i])
            first, second = one.logprobs[at].top_logprobs[:2]
            places.append(at)
            gaps.append(first - second)
    equal = f"{len(runs) - len(places)} of {len(runs)}"
    told = f"{', '.join(map(str, sorted(places)))} | {max(gaps):.4f}" if places else "– | –"
    return f"| {way} | {equal} | {told} |"


def tell(engines: Engines, chunks: Sequence[int | None]) -> None:
    prompts = make_prompts()
    plain = serve(engines.engine(PLAIN), PLAIN, prompts, 2)
    print("| way | requests with the plain run's tokens | first difference at token | widest gap there |")
    print("|---|---|---|---|", flush=True)
    for chunk, batch, caching in itertools.product(chunks, BATCHES, (False, True)):
        way = Way(batch, chunk, caching)
        print(compared(way, plain, serve(engines.engine(way), way, prompts, None)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="a small model with random weights, fewer ways")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.dtype}, {NUM_OUT} tokens each\n")
    if not options.tiny:
        tell(Engines(dtype=options.dtype), CHUNKS)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), tiny=True)
        tell(Engines(dtype=options.dtype, model=folder, load_format="dummy"), CHUNKS[:2])


if __name__ == "__main__":
    main()
