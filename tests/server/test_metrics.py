"""What is counted, by vLLM's names and ours, and the routes that tell it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hex_llm.config import ServerConfig
from hex_llm.frontend.requests import Timeline
from hex_llm.ipc.stats import EngineState, EngineStatus, Stats
from hex_llm.server.app import create_app
from hex_llm.server.metrics import Metrics
from tests.server.apps import asked
from tests.server.asking import COMPLETIONS, HELLO
from tests.server.fakes import FakeBackend, byte_tokenizer

VLLM = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "prompt_tokens_cached_total", "request_success_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket", "iteration_tokens_total_bucket", "lora_requests_info",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "estimated_flops_per_gpu_total",
}  # fmt: skip


def values(text: str) -> dict[str, float]:
    """By name, summed over labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == "fake"
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def told(metrics: Metrics) -> dict[str, float]:
    backend = FakeBackend(byte_tokenizer())
    reply = asked(create_app(backend, ServerConfig(), metrics), "GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    return values(reply.text)


def test_the_names_are_those_of_vllm() -> None:
    names = told(Metrics("fake"))
    assert {f"vllm:{name}" for name in VLLM} <= set(names)


def test_how_late_the_event_loop_is() -> None:
    metrics = Metrics("fake")

    async def run() -> None:
        watching = asyncio.create_task(metrics.watch_loop())
        await asyncio.sleep(0.05)
        time.sleep(0.3)  # what must not happen
        await asyncio.sleep(0.05)
        watching.cancel()

    asyncio.run(run())
    known = told(metrics)
    assert known["hex_llm:event_loop_lag_seconds_sum"] > 0.2
    assert known["hex_llm:event_loop_lag_seconds_count"] > 2


def test_what_the_engine_tells() -> None:
    engine_status = EngineStatus(num_steps=7)
    engine_status.stats = Stats(
        num_running=3,
        num_waiting=2,
        num_blocks=100,
        num_free_blocks=25,
        num_cached_blocks=12,
        num_prefix_queries=40,
        num_prefix_hits=10,
        num_preemptions=1,
        num_late_compiles=4,
        num_padding=50,
        num_flops=2.5e15,
    )
    metrics = Metrics("fake", engine_status)
    found = told(metrics)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 2
    assert found["vllm:kv_cache_usage_perc"] == 0.75
    assert found["vllm:prefix_cache_queries_total"] == 40
    assert found["vllm:prefix_cache_hits_total"] == 10
    assert found["vllm:num_preemptions_total"] == 1
    assert found["vllm:estimated_flops_per_gpu_total"] == 2.5e15
    assert found["hex_llm:kv_blocks_cached"] == 12
    assert found["hex_llm:late_compiles_total"] == 4
    assert found["hex_llm:padding_tokens_total"] == 50
    assert found["hex_llm:engine_steps_total"] == 7
    numbers = {"running": 3, "prefilling": 0, "waiting": 2, "kv_usage": 0.75, "prefix_hit_rate": 0.25}
    assert metrics.now() == {**numbers, "engines": [{"state": "loading", "host": 0, **numbers}]}


def test_engines_are_told_apart_and_summed() -> None:
    first, second = EngineStatus(state=EngineState.SERVING), EngineStatus(EngineState.RESTARTING, host=1)
    first.stats = Stats(num_running=3, num_blocks=100, num_free_blocks=50)
    second.stats = Stats(num_running=1, num_blocks=100, num_free_blocks=100)
    metrics = Metrics("fake", first, second)
    text = generate_latest(asyncio.run(metrics.collected())).decode()  # type: ignore[arg-type]
    assert 'vllm:num_requests_running{engine="0",model_name="fake"} 3.0' in text
    assert 'vllm:num_requests_running{engine="1",model_name="fake"} 1.0' in text
    assert 'hex_llm:engine_serves{engine="1",model_name="fake"} 0.0' in text
    assert 'hex_llm:engine_host{engine="1",model_name="fake"} 1.0' in text
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    now = metrics.now()
    assert (now["running"], now["kv_usage"]) == (4, 0.25)
    assert [one["state"] for one in now["engines"]] == ["serving", "restarting"]


def test_the_server_is_healthy_while_one_engine_goes_on() -> None:
    engines = [EngineStatus(state=EngineState.SERVING, num_pending=1, progressed=at) for at in (0.0, 0.0)]
    metrics = Metrics("fake", *engines)
    assert metrics.stalled_s > 5
    engines[1].progressed = time.monotonic()
    assert metrics.stalled_s < 5
    engines[1].state = EngineState.FAILED
    assert metrics.stalled_s > 5


def test_the_life_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, start = Metrics("fake"), time.monotonic() - 5
    life = Timeline(
        num_choices=2, max_tokens=9, arrived=start, sent=start + 0.25, queued_s=0.5, num_prompt=10
    )
    pauses = [life.add_tokens(index, 1, start + after) for index, after in ((0, 1.0), (1, 1.5), (0, 2.0))]
    assert pauses == [None, None, 1.0]
    life.first, life.num_cached = start + 1.0, 8
    metrics.got_first_token(life)
    life.ended = start + 2.5
    metrics.ended(life, ["stop", "length"])
    metrics.stepped(
        Stats(num_tokens=12, schedule_s=0.001, dispatch_s=0.002, wait_s=0.003, rest_s=0.004), 3, [1.0]
    )
    metrics.stepped(Stats(), 0, [])
    found = told(metrics)
    assert found["vllm:prompt_tokens_total"] == 10
    assert found["vllm:prompt_tokens_cached_total"] == 8
    assert found["vllm:generation_tokens_total"] == 3
    for name, total, count in (
        ("vllm:time_to_first_token_seconds", 1.0, 1),
        ("vllm:inter_token_latency_seconds", 1.0, 1),
        ("vllm:e2e_request_latency_seconds", 2.5, 1),
        ("vllm:request_queue_time_seconds", 0.5, 1),
        ("vllm:request_prefill_time_seconds", 0.25, 1),
        ("vllm:request_decode_time_seconds", 1.0, 1),
        ("vllm:request_inference_time_seconds", 1.25, 1),
        ("vllm:request_prompt_tokens", 10, 1),
        ("vllm:request_generation_tokens", 3, 1),
        ("vllm:request_params_n", 2, 1),
        ("vllm:request_params_max_tokens", 9, 1),
        ("vllm:iteration_tokens_total", 12 + 2, 1),
        ("hex_llm:phase_seconds", 0.5 + 0.25 + 1.0 + 0.010, 11),
    ):
        assert found[f"{name}_sum"] == pytest.approx(total), name
        assert found[f"{name}_count"] == count, name
    assert found["vllm:request_success_total"] == 2
    later = time.monotonic() + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert metrics.tokens_per_s() == pytest.approx(0.3)


def test_a_request_without_a_token_has_no_phases() -> None:
    metrics = Metrics("fake")
    metrics.ended(Timeline(ended=time.monotonic()), ["abort"])
    found = told(metrics)
    assert found["vllm:request_success_total"] == 1
    assert found["vllm:request_prefill_time_seconds_count"] == 0


def test_http_requests_are_counted_by_route_and_status() -> None:
    backend, metrics = FakeBackend(byte_tokenizer()), Metrics("fake")
    app = create_app(backend, ServerConfig(), metrics)
    asked(app, "POST", COMPLETIONS, json=HELLO[COMPLETIONS])
    asked(app, "POST", COMPLETIONS, json={})
    asked(app, "BREW", "/coffee/1")
    asked(app, "GET", "/coffee/2")
    text = asked(app, "GET", "/metrics").text
    assert f'hex_llm:http_requests_total{{method="POST",route="{COMPLETIONS}",status="200"}} 1.0' in text
    assert f'hex_llm:http_requests_total{{method="POST",route="{COMPLETIONS}",status="400"}} 1.0' in text
    assert 'hex_llm:http_requests_total{method="other",route="none",status="404"} 1.0' in text
    assert "coffee" not in text


def test_apps_do_not_share_their_numbers() -> None:
    first, second = Metrics("fake"), Metrics("fake")
    first.answered("GET", "/x", 200)
    assert told(first)["hex_llm:http_requests_total"] == 1
    assert "hex_llm:http_requests_total" not in told(second)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/load", {"server_load": 0}),
        (
            "/stats",
            {
                "running": 0,
                "prefilling": 0,
                "waiting": 0,
                "kv_usage": 0.0,
                "prefix_hit_rate": None,
                "tokens_per_s": 0.0,
                "engines": [
                    {
                        "state": "loading",
                        "host": 0,
                        "running": 0,
                        "prefilling": 0,
                        "waiting": 0,
                        "kv_usage": 0.0,
                        "prefix_hit_rate": None,
                    }
                ],
                "model": "fake",
                "max_model_len": 4096,
                "sampling_defaults": {},
            },
        ),
    ],
)
def test_small_numbers(backend: FakeBackend, path: str, expected: dict[str, Any]) -> None:
    reply = asked(create_app(backend, ServerConfig()), "GET", path).json()
    reply.pop("version", None)
    assert reply == expected
