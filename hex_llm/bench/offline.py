"""`hex-llm bench latency` and `throughput`: an `LLM` in this process, without a server.

What is no flag of theirs is one of the engine's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from hex_llm.bench.arguments import DATASET_FLAGS, SWITCH, Flag, Parser, count, positive
from hex_llm.bench.datasets import IN_TURNS, Sample, Source, make_samples
from hex_llm.errors import ConfigError, HexError
from hex_llm.flags import read_flags
from hex_llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hex_llm.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)
LATENCY_FLAGS: list[Flag] = [
    ("input-len", positive, 32, ""),
    ("output-len", positive, 128, ""),
    ("batch-size", positive, 8, ""),
    ("num-iters-warmup", count, 10, ""),
    ("num-iters", positive, 30, ""),
]
COMMON_FLAGS: list[Flag] = [
    ("n", positive, 1, "answers to each prompt"),
    ("output-json", str, None, "a file for the results"),
    ("disable-detokenize", SWITCH, False, "tokens are not turned into text"),
]


def _load(argv: Sequence[str], parser: Parser, **defaults: Any) -> tuple[argparse.Namespace, LLM]:
    """The arguments, and the engine that they ask for."""
    parser.add_flags("results", COMMON_FLAGS)
    args, rest = parser.parse(argv)
    if getattr(args, "dataset_name", "") in IN_TURNS:
        raise ConfigError(f"--dataset-name {args.dataset_name}: only a server can be asked in turns")
    if args.disable_detokenize:
        defaults["skip_tokenizer_init"] = True
    flags = defaults | read_flags(rest).values
    # Imported late, so that neither --help nor a wrong flag waits for jax.
    from hex_llm.llm import LLM

    return args, LLM(**flags)


def _generate(llm: LLM, samples: Sequence[Sample], n: int) -> float:
    """Seconds for all of them, whose prompts are token ids."""
    params = [
        SamplingParams(n=n, temperature=1.0, ignore_eos=True, max_tokens=one.output_len) for one in samples
    ]
    ids = [one.prompt for one in samples if isinstance(one.prompt, list)]
    start = time.perf_counter()
    llm.generate(sampling_params=params, prompt_token_ids=ids, use_tqdm=False)
    return time.perf_counter() - start


def _write(path: str | None, content: dict[str, Any]) -> None:
    if path:
        try:
            Path(path).write_text(json.dumps(content, indent=4))
        except OSError as error:
            raise HexError(f"--output-json {path}: {error.strerror}") from error


def latency(argv: Sequence[str]) -> None:
    parser = Parser("latency", "Measures how long one batch takes; further flags are the engine's.")
    parser.add_flags("batch", LATENCY_FLAGS)
    # The same prompts come again and again: their prefixes must not be found.
    args, llm = _load(argv, parser, enable_prefix_cache_hbm=False)
    vocab_size = min(llm.engine.limits.vocab_size, 10_000)
    ids = np.random.default_rng(0).integers(0, vocab_size, (args.batch_size, args.input_len))
    batch = [Sample(prompt, args.input_len, args.output_len) for prompt in ids.tolist()]
    for _ in tqdm(range(args.num_iters_warmup), desc="Warmup iterations"):
        _generate(llm, batch, args.n)
    latencies = [_generate(llm, batch, args.n) for _ in tqdm(range(args.num_iters), desc="Bench iterations")]
    mean = float(np.mean(latencies))
    percentiles = {p: float(np.percentile(latencies, p)) for p in PERCENTILES}
    print(f"Avg latency: {mean} seconds")
    for p, value in percentiles.items():
        print(f"{p}% percentile latency: {value} seconds")
    times = {"avg_latency": mean, "latencies": latencies, "percentiles": percentiles}
    _write(args.output_json, {"model_id": llm.config.model, **times})


def throughput(argv: Sequence[str]) -> None:
    parser = Parser("throughput", "Measures tokens a second of many prompts; further flags are the engine's.")
    parser.add_flags("dataset", DATASET_FLAGS)
    parser.add_flags("warmup", [("num-warmups", count, 0, "prompts before the measurement")])
    args, llm = _load(argv, parser)
    source = Source(args, llm.tokenizer, True, llm.engine.limits.vocab_size)
    samples = [replace(sample, prompt=source.token_ids(sample.prompt)) for sample in make_samples(source)]
    if args.num_warmups:
        _generate(llm, samples[: args.num_warmups], args.n)
    elapsed = _generate(llm, samples, args.n)
    num_in = sum(sample.prompt_len for sample in samples)
    num_out = sum(sample.output_len for sample in samples) * args.n
    requests_per_s, tokens_per_s = len(samples) / elapsed, (num_in + num_out) / elapsed
    print(
        f"Throughput: {requests_per_s:.2f} requests/s, {tokens_per_s:.2f} total tokens/s, "
        f"{num_out / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_in}\nTotal num output tokens:  {num_out}")
    counts = {"elapsed_time": elapsed, "num_requests": len(samples), "total_num_tokens": num_in + num_out}
    rates = {"requests_per_second": requests_per_s, "tokens_per_second": tokens_per_s}
    _write(args.output_json, {"model_id": llm.config.model, **counts, **rates})
