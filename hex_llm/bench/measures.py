"""Numbers of a run, by vLLM's definitions and under the names of its JSON.

TTFT: from sending to the first piece. TPOT: (latency - TTFT) / (output tokens - 1), of answers with two
tokens at least. ITL: between two pieces. E2EL: from sending to the last piece.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hex_llm.bench.backends import Reply

Result = dict[str, Any]
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")


def measure(
    replies: Sequence[Reply],
    duration: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float] | None = None,
    is_limited: bool = False,
    is_paced: bool = False,
) -> Result:
    """`goodput` has the most milliseconds of a good request; only a run that is limited in concurrency has a
    queue in the client, and only in a paced one is the time in it part of a request's."""
    succeeded = [reply for reply in replies if reply.success]
    num_in, num_out = (sum(r.prompt_len for r in succeeded), sum(r.output_tokens for r in succeeded))
    max_tokens, max_requests = _peaks(succeeded)
    times = _times(succeeded)
    result: Result = {
        "duration": duration,
        "completed": len(succeeded),
        "failed": len(replies) - len(succeeded),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(succeeded) / duration,
        "request_goodput": _num_within(times, goodput) / duration if goodput else None,
        "output_throughput": num_out / duration,
        "total_token_throughput": (num_in + num_out) / duration,
        "input_lens": [reply.prompt_len for reply in replies],
        "output_lens": [reply.output_tokens if reply.success else 0 for reply in replies],
        "ttfts": [reply.ttft for reply in replies],
        "itls": [reply.itl for reply in replies],
        "latencies": [reply.latency for reply in replies],
        "start_times": [reply.start_time for reply in replies],
        "queue_times": [reply.queue_time for reply in replies],
        "generated_texts": [reply.text for reply in replies],
        "errors": [reply.error for reply in replies],
        "max_output_tokens_per_s": max_tokens,
        "max_concurrent_requests": max_requests,
        "rtfx": 0.0,  # of speech, in vLLM
    }
    times["tpot"] = [_tpot(reply) for reply in succeeded if reply.output_tokens > 1]
    if not is_limited:
        del times["client_queue_time"]
    if not (is_limited and is_paced):
        del times["e2el_including_client_queue"]
    for name in metrics:
        if name in times:
            result |= _summary(name, times[name], percentiles)
    return result


def _times(succeeded: Sequence[Reply]) -> dict[str, list[float]]:
    """Seconds, by metric; of each request but for `itl`, which is of each piece."""
    return {
        "ttft": [reply.ttft for reply in succeeded],
        "tpot": [_tpot(reply) for reply in succeeded],
        "itl": [gap for reply in succeeded for gap in reply.itl],
        "e2el": [reply.latency for reply in succeeded],
        "client_queue_time": [reply.queue_time for reply in succeeded],
        "e2el_including_client_queue": [reply.latency + reply.queue_time for reply in succeeded],
    }


def _tpot(reply: Reply) -> float:
    return (reply.latency - reply.ttft) / (reply.output_tokens - 1) if reply.output_tokens > 1 else 0.0


def _num_within(times: Mapping[str, list[float]], goodput: Mapping[str, float]) -> int:
    """Requests that keep to every limit."""
    limits = [most_ms / 1000 for most_ms in goodput.values()]
    return sum(
        all(value <= limit for value, limit in zip(values, limits, strict=True))
        for values in zip(*(times[name] for name in goodput), strict=True)
    )


def percentile_name(percentile: float) -> str:
    return f"p{percentile:g}"


def _summary(metric: str, seconds: list[float], percentiles: Sequence[float]) -> Result:
    values = np.array(seconds or [0.0]) * 1000
    summary = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    summary |= {percentile_name(p): np.percentile(values, p) for p in percentiles}
    return {f"{name}_{metric}_ms": float(value) for name, value in summary.items()}


def _peaks(succeeded: Sequence[Reply]) -> tuple[float, int]:
    """Most pieces in one second, and most requests open in one, counted from the first request on."""
    if not succeeded:
        return 0.0, 0
    first = min(reply.start_time for reply in succeeded)
    num_seconds = math.ceil(max(reply.start_time + reply.latency for reply in succeeded) - first) + 1
    pieces, requests = np.zeros(num_seconds), np.zeros(num_seconds, int)
    for reply in succeeded:
        start = reply.start_time - first
        arrivals = start + np.cumsum([reply.ttft, *reply.itl])
        pieces += np.bincount(arrivals.astype(int), minlength=num_seconds)[:num_seconds]
        requests[int(start) : int(start + reply.latency) + 1] += 1
    return float(pieces.max()), int(requests.max())
