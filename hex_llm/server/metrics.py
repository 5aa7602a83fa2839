"""What can be counted of a running server: GET /metrics, /stats and /load.

vLLM's names are vLLM's (`vllm:`), so that its dashboards and autoscalers work; our own begin with `hex_llm:`.
What the engine knows is read when it is asked for; only times and tokens of requests are counted as they
come. Every app has a registry of its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from itertools import accumulate
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request

from hex_llm import __version__
from hex_llm.admission import Limits
from hex_llm.frontend.requests import Observer, Timeline
from hex_llm.ipc.stats import EngineState, EngineStatus, Stats, total
from hex_llm.server.common.backend import Backend
from hex_llm.server.shared_numbers import Summed, ask_numbers, tell_numbers

SOON = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
        640, 2560)  # fmt: skip
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
           7.5, 10, 20, 40, 80)  # fmt: skip
LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
PHASE = tuple(m * 10.0**e for e in range(-5, 3) for m in (1, 2, 5))
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LAG = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2,
       0.3, 0.5, 1, 2, 5, 10)  # fmt: skip
LAG_S = 0.01  # between two looks at the event loop
RECENT_S = 10  # what the rate of tokens is taken over
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {  # what each tells, and its buckets
    "vllm:time_to_first_token_seconds": ("Time to first token in seconds.", SOON),
    "vllm:request_time_per_output_token_seconds": (
        "Time per output token of a request, in seconds.",
        BETWEEN,
    ),
    "vllm:e2e_request_latency_seconds": ("End to end request latency in seconds.", LONG),
    "vllm:request_queue_time_seconds": ("Time spent in the waiting phase.", LONG),
    "vllm:request_prefill_time_seconds": ("Time spent in the prefill phase.", LONG),
    "vllm:request_decode_time_seconds": ("Time spent in the decode phase.", LONG),
    "vllm:request_inference_time_seconds": ("Time spent in the running phase.", LONG),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", TOKENS),
    "vllm:request_generation_tokens": ("Generated tokens of a request.", TOKENS),
    "vllm:request_params_max_tokens": ("max_tokens of a request.", TOKENS),
    "vllm:request_num_preemptions": ("Preemptions of a request.", (0, 1, 2, 3, 5, 10)),
    "vllm:request_params_n": ("n of a request.", (1, 2, 5, 10, 20)),
    "vllm:iteration_tokens_total": ("Tokens per engine step.", STEP_TOKENS),
    "hex_llm:event_loop_lag_seconds": ("How much later than due the event loop came to something.", LAG),
}

# The requests that the present HTTP request has made, for its line in the log; tasks inherit it.
CURRENT: ContextVar[list[Timeline] | None] = ContextVar("CURRENT", default=None)


class Metrics(Observer):
    def __init__(self, model_name: str, *engines: EngineStatus) -> None:
        self.model_name = model_name
        self.engines = engines or (EngineStatus(),)
        self.draining = False  # the server is shutting down
        self.num_open = 0  # HTTP requests that are being worked at
        self.other_fronts: list[Path] = []  # the sockets at which they tell their numbers
        self.registry = CollectorRegistry()
        self.engine_numbers = _EngineNumbers(model_name, self.engines)
        gauges = (
            ("hex_llm:open_http_requests", "HTTP requests that are being worked at.", lambda: self.num_open),
            ("hex_llm:tokens_per_second", "Tokens generated, of late.", self.tokens_per_s),
        )
        for name, about, value in gauges:
            Gauge(name, about, registry=self.registry).set_function(value)
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_S + 1)  # second, tokens

        of_model = ("model_name",)
        self._histograms = {
            name: Histogram(name, about, of_model, buckets=buckets, registry=self.registry).labels(model_name)
            for name, (about, buckets) in HISTOGRAMS.items()
        }
        self._pauses = _Pauses(model_name)
        self.registry.register(self._pauses)
        self._prompt_tokens = self._count("vllm:prompt_tokens", "Prefill tokens processed.")
        self._cached_tokens = self._count("vllm:prompt_tokens_cached", "Prompt tokens found in the cache.")
        self._output_tokens = self._count("vllm:generation_tokens", "Generation tokens processed.")
        self._refused = self._count("vllm:admission_rejections", "Requests turned away.")
        of_end = ("model_name", "finished_reason")
        self._ends = Counter("vllm:request_success", "Finished requests.", of_end, registry=self.registry)
        for reason in ("stop", "length", "abort", "error"):
            self._ends.labels(model_name, reason)
        self._phases = self._phase_times()
        of_http = ("method", "route", "status")
        self._http = Counter("hex_llm:http_requests", "HTTP requests.", of_http, registry=self.registry)

    # ---- what happens

    def began(self, timeline: Timeline) -> None:
        if (mine := CURRENT.get()) is not None:
            mine.append(timeline)

    def got_first_token(self, timeline: Timeline) -> None:
        self._observe("vllm:time_to_first_token_seconds", timeline.first - timeline.arrived)
        self._prompt_tokens.inc(timeline.num_prompt)
        self._cached_tokens.inc(timeline.num_cached)

    def stepped(self, stats: Stats, num_tokens: int, pauses: list[float]) -> None:
        self._phases["schedule"].observe(stats.schedule_s)
        self._phases["dispatch"].observe(stats.dispatch_s)
        self._phases["wait"].observe(stats.wait_s)
        self._phases["rest"].observe(stats.rest_s)
        if stats.num_tokens:  # vLLM counts a prompt's first output beside the prompt
            num_first = max(num_tokens - len(pauses), 0)
            self._observe("vllm:iteration_tokens_total", stats.num_tokens + num_first)
        self._pauses.add(pauses)
        self._output_tokens.inc(num_tokens)
        second = int(time.monotonic())
        if self._recent and self._recent[-1][0] == second:
            num_tokens += self._recent.pop()[1]
        self._recent.append((second, num_tokens))

    def ended(self, timeline: Timeline, reasons: list[str]) -> None:
        for reason in reasons:
            self._ends.labels(self.model_name, reason).inc()
        self._observe("vllm:request_prompt_tokens", timeline.num_prompt)
        self._observe("vllm:request_generation_tokens", timeline.num_generated)
        self._observe("vllm:request_num_preemptions", timeline.num_preempted)
        self._observe("vllm:request_params_n", timeline.num_choices)
        if timeline.max_tokens is not None:
            self._observe("vllm:request_params_max_tokens", timeline.max_tokens)
        self._observe("vllm:e2e_request_latency_seconds", timeline.ended - timeline.arrived)
        if not timeline.first:
            return
        prefill, decode = timeline.first - timeline.begun, timeline.latest - timeline.first
        for phase, seconds in (("queue", timeline.queued_s), ("prefill", prefill), ("decode", decode)):
            self._observe(f"vllm:request_{phase}_time_seconds", seconds)
            self._phases[phase].observe(seconds)
        self._observe("vllm:request_inference_time_seconds", prefill + decode)
        if timeline.num_generated > 1:
            per_token = decode * timeline.num_choices / (timeline.num_generated - 1)
            self._observe("vllm:request_time_per_output_token_seconds", per_token)

    def answered(self, method: str, route: str, status: int) -> None:
        self._http.labels(method, route, status).inc()
        self._refused.inc(status == 429)

    async def share(self, folder: Path, front: int, num_fronts: int) -> None:
        """Tells these numbers to the other front ends, and theirs with these, until it is cancelled."""
        self.other_fronts = [folder / str(i) for i in range(num_fronts) if i != front]
        await tell_numbers(self.registry, folder / str(front))

    async def watch_loop(self) -> None:
        """Notes how late the event loop is, until it is cancelled."""
        while True:
            due = time.monotonic() + LAG_S
            await asyncio.sleep(LAG_S)
            self._observe("hex_llm:event_loop_lag_seconds", max(time.monotonic() - due, 0))

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    # ---- what is told

    def tokens_per_s(self) -> float:
        """Of the last full seconds."""
        now = time.monotonic()
        counts = (
            count for second, count in self._recent if now - RECENT_S <= second + 1 and second < int(now)
        )
        return sum(counts) / RECENT_S

    async def collected(self) -> Collector:
        """What all front ends count together, and what they know of the engines."""
        others = await asyncio.gather(*map(ask_numbers, self.other_fronts))
        return Summed(self.registry.collect(), *others, self.engine_numbers.collect())

    async def sum_of(self, name: str, own: float) -> float:
        """Over all front ends."""
        others = await asyncio.gather(*map(ask_numbers, self.other_fronts))
        families = (one for families in others for one in families if one.name == name)
        return own + sum(sample.value for family in families for sample in family.samples)

    @property
    def stalled_s(self) -> float:
        """Of the engine that goes on best: the server is healthy while one serves."""
        serving = [one.stalled_s for one in self.engines if one.state is EngineState.SERVING]
        return min(serving, default=0.0)

    def now(self) -> dict[str, Any]:
        """The state of the engines in a few numbers."""
        each = [
            {"state": one.state.name.lower(), "host": one.host, **_numbers(one.stats)} for one in self.engines
        ]
        return {**_numbers(total(self.engines)), "engines": each}

    def orca(self, form: str) -> str:
        """The load in ORCA's words, in the form that a request asks for; empty: in none that there is."""
        stats = total(self.engines)
        load = {"kv_cache_usage_perc": _usage(stats), "num_requests_waiting": stats.num_waiting}
        if form.upper() == "JSON":
            return f"JSON {json.dumps({'named_metrics': load})}"
        pairs = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
        return f"TEXT {pairs}" if form.upper() == "TEXT" else ""

    def _phase_times(self) -> dict[str, Histogram]:
        times = Histogram(
            "hex_llm:phase_seconds",
            "Time of a request in queue, prefill and decode; of a step in schedule, dispatch, wait and rest.",
            ("model_name", "phase"),
            buckets=PHASE,
            registry=self.registry,
        )
        phases = ("queue", "prefill", "decode", "schedule", "dispatch", "wait", "rest")
        return {phase: times.labels(self.model_name, phase) for phase in phases}

    def _count(self, name: str, about: str) -> Counter:
        return Counter(name, about, ("model_name",), registry=self.registry).labels(self.model_name)


class _Pauses(Collector):
    """The histogram of the times between tokens: prometheus_client's own takes a lock for each number."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts = [0] * (len(BETWEEN) + 1)
        self._sum = 0.0

    def add(self, pauses: list[float]) -> None:
        self._sum += sum(pauses)
        for pause in pauses:
            self._counts[bisect_left(BETWEEN, pause)] += 1

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, BETWEEN), "+Inf"]
        name, about = "vllm:inter_token_latency_seconds", "Inter-token latency in seconds."
        family = HistogramMetricFamily(name, about, labels=["model_name"])
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric([self._model_name], buckets, self._sum)
        yield family


class _EngineNumbers(Collector):
    """What each engine told last."""

    def __init__(self, model_name: str, engines: Sequence[EngineStatus]) -> None:
        self.model_name = model_name
        self.engines = engines

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for number, engine in enumerate(self.engines):
            for family in self._collect(str(number), engine):
                if (known := families.setdefault(family.name, family)) is not family:
                    known.samples += family.samples
        yield from families.values()

    def _collect(self, number: str, engine_status: EngineStatus) -> Iterator[Metric]:
        s = engine_status.stats
        gauges = (
            ("hex_llm:engine_serves", "1: it does.", engine_status.state is EngineState.SERVING),
            ("hex_llm:engine_host", "Which of the hosts it is on.", engine_status.host),
            ("hex_llm:prefilling", "Of the sequences, those at workers for prefill.", s.num_prefilling),
            ("vllm:num_requests_running", "Sequences in execution.", s.num_running),
            ("vllm:num_requests_waiting", "Sequences waiting to be processed.", s.num_waiting),
            ("vllm:kv_cache_usage_perc", "KV-cache usage; 1 is all of it.", _usage(s)),
            ("hex_llm:kv_blocks", "Blocks of the KV cache.", s.num_blocks),
            ("hex_llm:kv_blocks_free", "Blocks that nobody holds.", s.num_free_blocks),
            ("hex_llm:kv_blocks_cached", "Blocks that hold a known prefix.", s.num_cached_blocks),
            ("hex_llm:stalled_seconds", "How long there has been work and no step.", engine_status.stalled_s),
        )
        counters = (
            ("vllm:prefix_cache_queries", "Tokens looked for in the prefix cache.", s.num_prefix_queries),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", s.num_prefix_hits),
            ("vllm:num_preemptions", "Preemptions.", s.num_preemptions),
            ("vllm:estimated_flops_per_gpu", "Floating point operations of a device.", s.num_flops),
            ("hex_llm:padding_tokens", "Tokens that steps wasted on padding.", s.num_padding),
            ("hex_llm:late_compiles", "Programs compiled after the warm-up.", s.num_late_compiles),
            ("hex_llm:engine_steps", "Steps of the engine.", engine_status.num_steps),
        )
        for kind, numbers in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, about, value in numbers:
                family = kind(name, about, labels=["model_name", "engine"])
                family.add_metric([self.model_name, number], value)
                yield family
        reasons = ["model_name", "engine", "reason"]
        waiting = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", "Why they wait.", labels=reasons)
        waiting.add_metric([self.model_name, number, "capacity"], s.num_waiting)
        yield waiting
        yield self._cache_config(number, s, engine_status.limits)
        labels = ["model_name", "engine", "max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        adapters = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use.", labels=labels)
        most = str(engine_status.limits.max_adapters if engine_status.limits else 0)
        names = (",".join(one) for one in (s.running_adapters, s.waiting_adapters))
        adapters.add_metric([self.model_name, number, most, *names], time.time())
        yield adapters

    def _cache_config(self, number: str, stats: Stats, limits: Limits | None) -> Metric:
        told = {"model_name": self.model_name, "engine": number, "num_gpu_blocks": str(stats.num_blocks)}
        if limits is not None:
            num_tokens = stats.num_blocks * limits.block_size
            told["block_size"], told["kv_cache_size_tokens"] = str(limits.block_size), str(num_tokens)
            told["kv_cache_max_concurrency"] = f"{num_tokens / limits.longest:.2f}"
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=list(told))
        info.add_metric(list(told.values()), 1)
        return info


def _numbers(stats: Stats) -> dict[str, Any]:
    queries = stats.num_prefix_queries
    return {
        "running": stats.num_running,
        "prefilling": stats.num_prefilling,
        "waiting": stats.num_waiting,
        "kv_usage": _usage(stats),
        "prefix_hit_rate": stats.num_prefix_hits / queries if queries else None,
    }


def _usage(stats: Stats) -> float:
    return 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0


def routes(backend: Backend, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", response_class=Response)
    async def prometheus(request: Request) -> Response:
        """The numbers of this server, for Prometheus."""
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(await metrics.collected()), headers={"content-type": kind})

    @router.get("/load")
    async def load() -> dict[str, int]:
        """The requests that are being worked at."""
        return {"server_load": int(await metrics.sum_of("hex_llm:open_http_requests", metrics.num_open))}

    @router.get("/stats")
    async def stats() -> dict[str, Any]:
        """The state of the engines in a few numbers."""
        about = {
            "model": backend.model_name,
            "max_model_len": backend.max_len,
            "sampling_defaults": dict(backend.sampling_defaults),
            "version": __version__,
        }
        tokens_per_s = await metrics.sum_of("hex_llm:tokens_per_second", metrics.tokens_per_s())
        return {**metrics.now(), "tokens_per_s": tokens_per_s, **about}

    return router
