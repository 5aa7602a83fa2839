"""When requests arrive: at once, at random moments, evenly, or ever faster."""

from __future__ import annotations

import argparse
import math

import numpy as np


def arrival_times(num_requests: int, rate: float, args: argparse.Namespace) -> list[float]:
    """Seconds from the start, of each request; the same as vLLM's for the same seed.

    Without a ramp the times are stretched to what so many requests take at this rate, so that two seeds make
    the same throughput.
    """
    rates = _ramp(num_requests, args) if args.ramp_up_strategy else np.full(num_requests, rate)
    if math.isinf(rates[0]):
        return [0.0] * num_requests
    if math.isinf(args.burstiness):
        gaps = 1 / rates
    else:
        gaps = np.random.RandomState(args.seed % 2**32).gamma(args.burstiness, 1 / (rates * args.burstiness))
    times = gaps.cumsum()
    if not args.ramp_up_strategy:
        times *= num_requests / rate / times[-1]
    return [float(time) for time in times]


def _ramp(num_requests: int, args: argparse.Namespace) -> np.ndarray:
    """The rate at each request."""
    progress = np.arange(num_requests) / max(num_requests - 1, 1)
    start, end = args.ramp_up_start_rps, args.ramp_up_end_rps
    if args.ramp_up_strategy == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress
