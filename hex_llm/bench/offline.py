"""`hex-llm bench latency` and `throughput`: an `LLM` in this process, without a server.

What is no flag of theirs is one of the engine's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from hex_llm.bench.arguments import Parser, add_dataset_flags, count, positive, with_dashes
from hex_llm.bench.backends import Prompt
from hex_llm.bench.datasets import make_samples
from hex_llm.bench.samples import Sample, Source
from hex_llm.bench.tokenizers import LocalTokenizer
from hex_llm.errors import ConfigError, HexError
from hex_llm.flags import read_flags
from hex_llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hex_llm.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


def _parse(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """And the flags of the engine."""
    args, rest = parser.parse_known_args(with_dashes(argv))
    without_text = {"skip_tokenizer_init": True} if args.disable_detokenize else {}
    return args, without_text | read_flags(rest).values


def _load(**flags: Any) -> LLM:
    # Imported late, so that neither --help nor a wrong flag waits for jax.
    from hex_llm.llm import LLM

    return LLM(**flags)


def _token_ids(llm: LLM, prompt: Prompt) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    assert llm.tokenizer is not None  # texts come only from datasets that have asked for one
    return llm.tokenizer.encode(prompt)


def _generate(llm: LLM, samples: Sequence[Sample], n: int) -> float:
    """Seconds for all of them."""
    params = [
        SamplingParams(n=n, temperature=1.0, ignore_eos=True, max_tokens=one.output_len) for one in samples
    ]
    ids = [_token_ids(llm, one.prompt) for one in samples]
    start = time.perf_counter()
    llm.generate(sampling_params=params, prompt_token_ids=ids, use_tqdm=False)
    return time.perf_counter() - start


def _write(path: str | None, content: dict[str, Any]) -> None:
    if path:
        try:
            Path(path).write_text(json.dumps(content, indent=4))
        except OSError as error:
            raise HexError(f"--output-json {path}: {error.strerror}") from error


def _add_common(parser: Parser) -> None:
    parser.add_argument("--n", type=positive, default=1, help="answers to each prompt")
    parser.add_argument("--output-json", help="a file for the results")
    parser.add_argument("--disable-detokenize", action="store_true", help="tokens are not turned into text")


def latency(argv: Sequence[str]) -> None:
    parser = Parser("latency", "Measures how long one batch takes; further flags are the engine's.")
    parser.add_argument("--input-len", type=positive, default=32)
    parser.add_argument("--output-len", type=positive, default=128)
    parser.add_argument("--batch-size", type=positive, default=8)
    parser.add_argument("--num-iters-warmup", type=count, default=10)
    parser.add_argument("--num-iters", type=positive, default=30)
    _add_common(parser)
    args, flags = _parse(parser, argv)
    # The same prompts come again and again: their prefixes must not be found.
    llm = _load(**{"enable_prefix_cache_hbm": False, **flags})
    vocab_size = min(llm.engine.limits.vocab_size, 10_000)
    ids = np.random.default_rng(0).integers(0, vocab_size, (args.batch_size, args.input_len))
    batch = [Sample(prompt, args.input_len, args.output_len) for prompt in ids.tolist()]

    def run(title: str, num: int) -> list[float]:
        steps = tqdm(range(num), desc=title)
        return [_generate(llm, batch, args.n) for _ in steps]

    run("Warmup iterations", args.num_iters_warmup)
    latencies = run("Bench iterations", args.num_iters)
    mean = float(np.mean(latencies))
    percentiles = {p: float(np.percentile(latencies, p)) for p in PERCENTILES}
    print(f"Avg latency: {mean} seconds")
    for p, value in percentiles.items():
        print(f"{p}% percentile latency: {value} seconds")
    named = {"model_id": llm.config.model, "avg_latency": mean}
    _write(args.output_json, {**named, "latencies": latencies, "percentiles": percentiles})


def throughput(argv: Sequence[str]) -> None:
    parser = Parser("throughput", "Measures tokens a second of many prompts; further flags are the engine's.")
    add_dataset_flags(parser)
    parser.add_argument("--num-warmups", type=count, default=0, help="prompts before the measurement")
    _add_common(parser)
    args, flags = _parse(parser, argv)
    if args.dataset_name in ("multi-turn", "mixture"):
        raise ConfigError(f"--dataset-name {args.dataset_name}: only a server can be asked in turns")
    llm = _load(**flags)
    tokenizer = None if llm.tokenizer is None else LocalTokenizer(llm.tokenizer)
    samples = make_samples(Source(args, tokenizer, takes_ids=True, vocab_size=llm.engine.limits.vocab_size))
    if args.num_warmups:
        _generate(llm, samples[: args.num_warmups], args.n)
    elapsed = _generate(llm, samples, args.n)
    num_in = sum(sample.prompt_len for sample in samples)
    num_out = sum(sample.output_len for sample in samples) * args.n
    total = num_in + num_out
    print(
        f"Throughput: {len(samples) / elapsed:.2f} requests/s, {total / elapsed:.2f} total tokens/s, "
        f"{num_out / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_in}\nTotal num output tokens:  {num_out}")
    rates = {"requests_per_second": len(samples) / elapsed, "tokens_per_second": total / elapsed}
    counts = {"num_requests": len(samples), "total_num_tokens": total}
    _write(args.output_json, {"model_id": llm.config.model, "elapsed_time": elapsed, **counts, **rates})
