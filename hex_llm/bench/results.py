"""The numbers of a run by vLLM's definitions, in the block and under the keys of `vllm bench serve`.

TTFT: from sending to the first piece. TPOT: (latency - TTFT) / (output tokens - 1), of answers with two
tokens at least. ITL: between two pieces. E2EL: from sending to the last piece.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from hex_llm.bench.backends import Reply
from hex_llm.errors import ConfigError, HexError

Result = dict[str, Any]
WIDTH = 50
TOTALS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "max_concurrency": "Maximum request concurrency:",
    "request_rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}


def _tpot(reply: Reply) -> list[float]:
    num_later = reply.output_tokens - 1
    return [(reply.latency - reply.ttft) / num_later] if num_later > 0 else []


# By its name among the keys: its short and its long title, and the seconds of a request, which may have none.
METRICS: dict[str, tuple[str, str, Callable[[Reply], Sequence[float]]]] = {
    "ttft": ("TTFT", "Time to First Token", lambda reply: [reply.ttft]),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)", _tpot),
    "itl": ("ITL", "Inter-token Latency", lambda reply: reply.itl),
    "e2el": ("E2EL", "End-to-end Latency", lambda reply: [reply.latency]),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing", lambda reply: [reply.queue_time]),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency",
                                    lambda reply: [reply.latency + reply.queue_time]),
}  # fmt: skip
PADDING, PREFIX, QUEUE = "padding_tokens_total", "prefix_cache", "request_queue_time_seconds"
# Ours: vLLM's block ends before. The title there, if any; a counter of /metrics, and those it is a share of.
SERVER_SIDE = {
    "engine_steps": ("", "engine_steps_total"),
    "padding_tokens": ("", PADDING),
    "padding_share": ("Padding of steps (%):", PADDING, PADDING, "iteration_tokens_total_sum"),
    "late_compiles": ("Late compiles:", "late_compiles_total"),
    "prefix_cache_hit_rate": ("Prefix cache hits (%):", f"{PREFIX}_hits_total", f"{PREFIX}_queries_total"),
    "preemptions": ("Preemptions:", "num_preemptions_total"),
    "mean_queue_time_ms": ("Mean queue time (ms):", f"{QUEUE}_sum", f"{QUEUE}_count"),
}
PLOTTED = {"ttft": "Time to first token (ms)", "tpot": "Time per output token (ms)"}
PER_REQUEST = {"latencies": "latency", "queue_times": "queue_time"}
DETAILS = {  # what --save-detailed adds to them
    "input_lens": "prompt_len", "output_lens": "output_tokens", "start_times": "start_time", "ttfts": "ttft",
    "itls": "itl", "generated_texts": "text", "errors": "error",
}  # fmt: skip


def measure(
    replies: Sequence[Reply], duration: float, args: argparse.Namespace, rate: float, model: str = ""
) -> Result:
    """What a file holds: the run's settings, then its numbers."""
    ramp = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps") if args.ramp_up_strategy else ()
    result: Result = {
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
        **{name: getattr(args, name) for name in ramp},
        **_totals(replies, duration, dict(args.goodput)),
    }
    lists = PER_REQUEST | (DETAILS if args.save_detailed else {})
    result |= {key: [getattr(reply, name) for reply in replies] for key, name in lists.items()}
    for name in args.percentile_metrics:
        # Only a limited run has a queue in the client; only in a paced one is it part of a request's time.
        has_queue = args.max_concurrency and (name == "client_queue_time" or not math.isinf(rate))
        if "queue" not in name or has_queue:
            seconds = [value for reply in replies if reply.success for value in METRICS[name][2](reply)]
            result |= _summary(name, seconds, args.metric_percentiles)
    return result


def _totals(replies: Sequence[Reply], duration: float, goodput: Mapping[str, float]) -> Result:
    """`goodput` has the most milliseconds of a good request."""
    succeeded = [reply for reply in replies if reply.success]
    num_in, num_out = (sum(r.prompt_len for r in succeeded), sum(r.output_tokens for r in succeeded))
    is_good = [
        all(value * 1000 <= most for name, most in goodput.items() for value in METRICS[name][2](reply))
        for reply in succeeded
    ]
    max_tokens, max_requests = _peaks(succeeded)
    return {
        "duration": duration,
        "completed": len(succeeded),
        "failed": len(replies) - len(succeeded),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(succeeded) / duration,
        "request_goodput": sum(is_good) / duration if goodput else None,
        "output_throughput": num_out / duration,
        "total_token_throughput": (num_in + num_out) / duration,
        "max_output_tokens_per_s": max_tokens,
        "max_concurrent_requests": max_requests,
        "rtfx": 0.0,  # of speech, in vLLM
    }


def _summary(metric: str, seconds: list[float], percentiles: Sequence[float]) -> Result:
    values = np.array(seconds or [0.0]) * 1000
    summary = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    summary |= {f"p{percentile:g}": np.percentile(values, percentile) for percentile in percentiles}
    return {f"{name}_{metric}_ms": float(value) for name, value in summary.items()}


def _peaks(succeeded: Sequence[Reply]) -> tuple[float, int]:
    """Most pieces in one second, and most requests open in one, counted from the first request on."""
    first = min((reply.start_time for reply in succeeded), default=0)
    pieces, requests = Counter[int](), Counter[int]()
    for reply in succeeded:
        start = reply.start_time - first
        pieces.update(int(time) for time in accumulate(reply.itl, initial=start + reply.ttft))
        requests.update(range(int(start), int(start + reply.latency) + 1))
    return float(max(pieces.values(), default=0)), max(requests.values(), default=0)


def server_side(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What the server has counted between two looks at its counters, as far as it counts these things."""
    growth = {name.partition(":")[2]: value - before.get(name, 0) for name, value in after.items()}
    facts: dict[str, float] = {}
    for name, (_, part, *wholes) in SERVER_SIDE.items():
        whole = sum(growth.get(counter, 0) for counter in wholes)
        if part in growth and not wholes:
            facts[name] = int(growth[part])
        elif part in growth and whole:
            facts[name] = growth[part] / whole * (1000 if name.endswith("_ms") else 1)
    return facts


def block(result: Result, percentiles: Sequence[float]) -> str:
    # vLLM writes this count as a fraction.
    totals = {**result, "max_concurrent_requests": float(result["max_concurrent_requests"])}
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_line(title, totals[key]) for key, title in TOTALS.items() if totals[key] not in (None, "inf")]
    for metric, (name, title, _) in METRICS.items():
        if f"mean_{metric}_ms" in result:
            lines.append(f"{title:-^{WIDTH}}")
            for number in ("mean", "median", *(f"p{percentile:g}" for percentile in percentiles)):
                lines.append(_line(f"{number.capitalize()} {name} (ms):", result[f"{number}_{metric}_ms"]))
    if facts := result["server"]:
        lines.append(f"{'Server':-^{WIDTH}}")
    for name, (title, *_) in SERVER_SIDE.items():
        if title and name in facts:
            lines.append(_line(title, facts[name] * (100 if "(%)" in title else 1)))
    return "\n".join([*lines, "=" * WIDTH])


def _line(title: str, value: float | int) -> str:
    return f"{title:<40} " + (f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}")


def save(content: Result, args: argparse.Namespace, rate: float, model: str, *, is_first: bool) -> None:
    """As the flags say. What is appended, and what follows another run in one file, has its own line."""
    if not (args.save_result or args.append_result):
        return
    pace = f"{rate}qps"
    if args.ramp_up_strategy:
        pace = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps}qps-{args.ramp_up_end_rps}qps"
    limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    name = f"{args.label or args.backend}-{pace}{limit}-{model.split('/')[-1]}-{_now()}.json"
    path = Path(args.result_dir) / (args.result_filename or name)
    append = args.append_result or bool(args.result_filename and not is_first)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(("\n" if append and file.tell() else "") + json.dumps(content))
    except OSError as error:
        raise HexError(f"{path}: cannot be written: {error.strerror}") from error


def _now() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")


# ---- --plot; needs matplotlib, which is an extra


def check_plot_available() -> None:
    """Raises ConfigError: to be called before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ConfigError('--plot: needs matplotlib; pip install "hex-llm[bench]"')


def _rate(run: Result) -> float:
    """All at once has no rate of its own: the one that the server has kept up with stands for it."""
    return float(run["request_throughput" if run["request_rate"] == "inf" else "request_rate"])


def plot(path: str, percentiles: Sequence[float], systems: Mapping[str, Sequence[Result]]) -> None:
    """Over the request rate, one colour for each system: its median, and dashed the highest percentile."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (metric, title) in zip(figure.subplots(1, 2), PLOTTED.items(), strict=True):
        for i, (name, runs) in enumerate(systems.items()):
            rates = [_rate(run) for run in runs]
            for number, style in (("median", "-"), (f"p{max(percentiles):g}", "--")):
                ys = [run[f"{number}_{metric}_ms"] for run in runs]
                axes.plot(rates, ys, style, marker="o", color=f"C{i}", label=f"{name}, {number}")
        axes.set(title=title, xlabel="Requests per second", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise HexError(f"--plot {path}: {error}") from error
