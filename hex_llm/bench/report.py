"""The block of results, line by line as `vllm bench serve` prints it, and the JSON file with its keys."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from hex_llm.bench.measures import DETAILS, Result, percentile_name
from hex_llm.errors import HexError

WIDTH = 50
TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
SERVER_SIDE = {  # ours: vLLM's block ends before
    "padding_share": ("Padding of steps (%):", 100),
    "late_compiles": ("Late compiles:", 1),
    "prefix_cache_hit_rate": ("Prefix cache hits (%):", 100),
    "preemptions": ("Preemptions:", 1),
    "mean_queue_time_ms": ("Mean queue time (ms):", 1),
}


def _line(title: str, value: float | int) -> str:
    return f"{title:<40} " + (f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}")


def _totals(result: Result, args: argparse.Namespace, rate: float) -> Iterator[str]:
    yield _line("Successful requests:", result["completed"])
    yield _line("Failed requests:", result["failed"])
    if args.max_concurrency:
        yield _line("Maximum request concurrency:", args.max_concurrency)
    if not math.isinf(rate):
        yield _line("Request rate configured (RPS):", rate)
    yield _line("Benchmark duration (s):", result["duration"])
    yield _line("Total input tokens:", result["total_input_tokens"])
    yield _line("Total generated tokens:", result["total_output_tokens"])
    yield _line("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        yield _line("Request goodput (req/s):", result["request_goodput"])
    yield _line("Output token throughput (tok/s):", result["output_throughput"])
    yield _line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _line("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    yield _line("Total token throughput (tok/s):", result["total_token_throughput"])


def _metric(result: Result, metric: str, args: argparse.Namespace) -> Iterator[str]:
    name, title = TITLES[metric]
    yield f"{title:-^{WIDTH}}"
    yield _line(f"Mean {name} (ms):", result[f"mean_{metric}_ms"])
    yield _line(f"Median {name} (ms):", result[f"median_{metric}_ms"])
    for percentile in args.metric_percentiles:
        key = percentile_name(percentile)
        yield _line(f"{key.upper()} {name} (ms):", result[f"{key}_{metric}_ms"])


def _server(facts: dict[str, float]) -> Iterator[str]:
    shown = {title: facts[name] * factor for name, (title, factor) in SERVER_SIDE.items() if name in facts}
    if shown:
        yield f"{'Server':-^{WIDTH}}"
    for title, value in shown.items():
        yield _line(title, value)


def block(result: Result, args: argparse.Namespace, rate: float) -> str:
    metrics = [metric for metric in TITLES if f"mean_{metric}_ms" in result]
    lines = [
        f"{' Serving Benchmark Result ':=^{WIDTH}}",
        *_totals(result, args, rate),
        *(line for metric in metrics for line in _metric(result, metric, args)),
        *_server(result["server"]),
        "=" * WIDTH,
    ]
    return "\n".join(lines)


def described(result: Result, args: argparse.Namespace, rate: float, model: str) -> dict[str, Any]:
    """What a file holds: the run's settings, then its numbers."""
    ramp = {
        name: getattr(args, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
    }
    left_out = () if args.save_detailed else DETAILS
    return {
        "date": _now(),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": None if args.skip_tokenizer_init else args.tokenizer or model,
        "num_prompts": args.num_prompts,
        **dict(args.metadata),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **(ramp if args.ramp_up_strategy else {}),
        **{name: value for name, value in result.items() if name not in left_out},
    }


def save(
    content: dict[str, Any], args: argparse.Namespace, rate: float, model: str, *, is_first: bool
) -> None:
    """As the flags say. What is appended, and what follows another run in one file, has its own line."""
    if not (args.save_result or args.append_result):
        return
    path = Path(args.result_dir or ".") / (args.result_filename or _file_name(args, rate, model))
    append = args.append_result or bool(args.result_filename and not is_first)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(("\n" if append and file.tell() else "") + json.dumps(content))
    except OSError as error:
        raise HexError(f"{path}: cannot be written: {error.strerror}") from error


def _file_name(args: argparse.Namespace, rate: float, model: str) -> str:
    pace = f"{rate}qps"
    if args.ramp_up_strategy:
        pace = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps}qps-{args.ramp_up_end_rps}qps"
    limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    return f"{args.label or args.backend}-{pace}{limit}-{model.split('/')[-1]}-{_now()}.json"


def _now() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")
