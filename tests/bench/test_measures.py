"""The definitions, on times made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hex_llm.bench.arguments import client_parser, parse_client
from hex_llm.bench.backends import Reply
from hex_llm.bench.load import arrival_times
from hex_llm.bench.results import measure, server_side
from hex_llm.bench.serve import comparisons


def reply(start: float, times: list[float], num_tokens: int, num_in: int = 10, **more: Any) -> Reply:
    """An answer whose pieces came at these times."""
    made = Reply(num_in, start_time=start, output_tokens=num_tokens, **more)
    for now in times:
        made.take("x", now)
    return made


REPLIES = [
    reply(100.0, [100.5, 100.6, 100.9], 3),
    reply(100.2, [101.2, 101.4], 5, queue_time=0.1),  # several tokens in a piece
    reply(101.0, [101.3], 1),
    Reply(10, start_time=100.0, error="HTTP 500"),
]


def measured(*argv: str, replies: list[Reply] = REPLIES, rate: float = math.inf) -> dict[str, Any]:
    metrics = "ttft,tpot,itl,e2el,client_queue_time,e2el_including_client_queue"
    flags = [f"--percentile-metrics={metrics}", "--metric-percentiles=50,99.9", "--save-detailed", *argv]
    return measure(replies, 2.0, parse_client(client_parser("serve", ""), flags), rate)


def test_counts_and_rates() -> None:
    result = measured()
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 9)
    assert result["request_throughput"] == 1.5
    assert result["output_throughput"] == 4.5
    assert result["total_token_throughput"] == 19.5
    assert result["output_lens"] == [3, 5, 1, 0]
    assert result["errors"] == ["", "", "", "HTTP 500"]
    assert result["request_goodput"] is None


def test_times() -> None:
    result = measured()
    assert result["mean_ttft_ms"] == pytest.approx((500 + 1000 + 300) / 3)
    assert result["median_ttft_ms"] == result["p50_ttft_ms"] == pytest.approx(500)
    # (0.9 - 0.5) / 2 and (1.2 - 1.0) / 4; the answer of one token has none
    assert result["mean_tpot_ms"] == pytest.approx((200 + 50) / 2)
    assert result["mean_itl_ms"] == pytest.approx((100 + 300 + 200) / 3)
    assert result["mean_e2el_ms"] == pytest.approx((900 + 1200 + 300) / 3)
    assert result["std_itl_ms"] == pytest.approx(81.65, abs=0.01)
    assert "p99.9_itl_ms" in result


def test_only_a_limited_run_has_a_queue() -> None:
    assert "mean_client_queue_time_ms" not in measured()
    limited = measured("--max-concurrency=1")
    assert limited["mean_client_queue_time_ms"] == pytest.approx(100 / 3)
    assert "mean_e2el_including_client_queue_ms" not in limited
    paced = measured("--max-concurrency=1", rate=3.0)
    assert paced["mean_e2el_including_client_queue_ms"] == pytest.approx((900 + 1300 + 300) / 3)


def test_goodput_counts_requests_that_keep_to_every_limit() -> None:
    assert measured("--goodput", "ttft:500")["request_goodput"] == 1.0
    assert measured("--goodput", "tpot:60", "ttft:2000")["request_goodput"] == 1.0
    assert measured("--goodput", "e2el:1")["request_goodput"] == 0.0


def test_peaks_are_of_seconds_since_the_first_request() -> None:
    result = measured()
    assert result["max_output_tokens_per_s"] == 3  # 100.5, 100.6, 100.9; then 101.2, 101.3, 101.4
    assert result["max_concurrent_requests"] == 2


def test_a_run_without_any_success_has_numbers() -> None:
    result = measured(replies=[Reply(1, error="x")])
    assert result["completed"] == result["mean_ttft_ms"] == result["max_concurrent_requests"] == 0


def arrivals(rate: float, *argv: str, num: int = 200) -> list[float]:
    args = parse_client(client_parser("serve", ""), argv)
    return arrival_times(num, rate, args)


def test_arrivals() -> None:
    assert arrivals(float("inf")) == [0.0] * 200
    poisson = arrivals(10.0)
    assert poisson[-1] == pytest.approx(20)
    assert poisson == sorted(poisson) == arrivals(10.0) != arrivals(10.0, "--seed=1")
    steady = arrivals(10.0, "--burstiness=inf")
    assert steady == pytest.approx([(i + 1) / 10 for i in range(200)])
    gaps = [b - a for a, b in zip(arrivals(10.0, "--burstiness=0.1"), steady, strict=True)]
    assert max(gaps) > 1  # in bursts


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_ends_faster_than_it_begins(strategy: str) -> None:
    ramp = [f"--ramp-up-strategy={strategy}", "--ramp-up-start-rps=1", "--ramp-up-end-rps=100"]
    times = arrivals(float("inf"), *ramp, "--burstiness=inf", num=50)
    assert times[0] == 1.0
    assert times[-1] - times[-2] == pytest.approx(0.01)


def test_comparisons_are_ratios_of_rounds() -> None:
    rounds = [
        ({"mean_ttft_ms": a, "request_goodput": None}, {"mean_ttft_ms": b}) for a, b in [(1, 2), (2, 3)]
    ]
    (one,) = comparisons(rounds)
    assert (one.metric, one.ratio, one.lowest, one.highest) == ("mean_ttft_ms", 1.75, 1.5, 2.0)


def test_what_the_server_says() -> None:
    before = {"hex_llm:padding_tokens_total": 10.0, "vllm:prefix_cache_hits_total": 5.0}
    after = {
        "hex_llm:padding_tokens_total": 40.0,
        "vllm:iteration_tokens_total_sum": 70.0,
        "vllm:prefix_cache_hits_total": 25.0,
        "vllm:prefix_cache_queries_total": 40.0,
        "vllm:request_queue_time_seconds_sum": 1.0,
        "vllm:request_queue_time_seconds_count": 4.0,
    }
    assert server_side(before, after) == {
        "padding_tokens": 30,
        "padding_share": 0.3,
        "prefix_cache_hit_rate": 0.5,
        "mean_queue_time_ms": 250,
    }
    assert server_side({}, {}) == {}
