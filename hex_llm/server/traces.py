"""OpenTelemetry: a tree of spans for each request that generates, sent over OTLP, with vLLM's attributes.

POST /v1/chat/completions      the HTTP request; a `traceparent` header makes it part of the client's trace
└── llm_request                one for each prompt
    ├── queue
    ├── prefill
    └── decode
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from hex_llm.errors import ConfigError
from hex_llm.frontend.requests import Timeline

INSTALL = 'pip install "hex-llm[otel]"'


class Tracer:
    def __init__(self, endpoint: str, model_name: str) -> None:
        """ConfigError: the SDK is not installed."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc").startswith("http"):
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            else:
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # type: ignore[assignment]
                    OTLPSpanExporter,
                )
        except ImportError as error:
            raise ConfigError(f"--otlp_traces_endpoint needs OpenTelemetry's SDK: {INSTALL}") from error
        given = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "hex_llm"}
        self.provider = TracerProvider(resource=Resource.create(given))
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self.model_name = model_name
        self._tracer: Any = self.provider.get_tracer("hex_llm")

    def request_ended(self, name: str, headers: Mapping[str, str], fields: Mapping[str, Any], since: float,
                      timelines: list[Timeline]) -> None:  # fmt: skip
        """`since` and the timelines are times of time.monotonic; `fields` are those of the log."""
        from opentelemetry import trace
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        now, epoch = time.monotonic(), time.time_ns() - time.monotonic_ns()

        def span(name: str, start: float, end: float, parent: Any, kind: SpanKind, **attributes: Any) -> Any:
            given = {key: value for key, value in attributes.items() if value is not None}
            start_ns, end_ns = (int(at * 1e9) + epoch for at in (start, max(start, end)))
            made = self._tracer.start_span(name, parent, kind, given, start_time=start_ns)
            made.end(end_ns)
            return trace.set_span_in_context(made)

        status = {"http.response.status_code": fields["status"], "gen_ai.request.id": fields["id"]}
        root = span(name, since, now, extract(headers), SpanKind.SERVER, **status)
        for one in timelines:
            told = self._attributes(one, fields["id"])
            own = span("llm_request", one.arrived, one.ended or now, root, SpanKind.INTERNAL, **told)
            if one.first:
                ends = (("queue", one.sent, one.begun), ("prefill", one.begun, one.first))
                for phase, start, end in (*ends, ("decode", one.first, one.latest)):
                    span(phase, start, end, own, SpanKind.INTERNAL)

    def _attributes(self, one: Timeline, request_id: str) -> dict[str, Any]:
        told = {
            "gen_ai.response.model": self.model_name,
            "gen_ai.request.id": request_id,
            "gen_ai.request.n": one.num_choices,
            "gen_ai.request.max_tokens": one.max_tokens,
            "gen_ai.usage.num_sequences": one.num_choices,
            "gen_ai.usage.prompt_tokens": one.num_prompt,
            "gen_ai.usage.completion_tokens": one.num_generated,
            "gen_ai.latency.e2e": (one.ended or time.monotonic()) - one.arrived,
        }
        if not one.first:
            return told
        return told | {
            "gen_ai.latency.time_in_queue": one.queued_s,
            "gen_ai.latency.time_to_first_token": one.first - one.arrived,
            "gen_ai.latency.time_in_model_prefill": one.first - one.begun,
            "gen_ai.latency.time_in_model_decode": one.latest - one.first,
            "gen_ai.latency.time_in_model_inference": one.latest - one.begun,
        }
