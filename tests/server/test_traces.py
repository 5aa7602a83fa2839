"""Spans as a collector receives them, over HTTP, and what they say."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from hex_llm.config import ServerConfig
from hex_llm.errors import ConfigError
from hex_llm.frontend.requests import Timeline
from hex_llm.server import traces
from hex_llm.server.gate import Gate

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(BaseHTTPRequestHandler):
    received: list[bytes]

    def do_POST(self) -> None:
        self.received.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[bytes]]]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    received: list[bytes] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Collector,), {"received": received}))
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    server.shutdown()


def spans_of(received: list[bytes]) -> dict[str, Any]:
    found = {}
    for body in received:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            assert any(one.value.string_value == "hex_llm" for one in resource.resource.attributes)
            found |= {span.name: span for scope in resource.scope_spans for span in scope.spans}
    return found


def test_one_tree_a_request(collector: tuple[str, list[bytes]]) -> None:
    endpoint, received = collector
    tracer = traces.Tracer(endpoint, "fake")
    timeline = Timeline(max_tokens=9, arrived=100.0, sent=100.1, queued_s=0.2, first=100.8, last={0: 102.8},
                        ended=102.9, num_prompt=5, num_generated=7)  # fmt: skip
    told = {"status": 200, "id": "r-1"}
    tracer.request_ended("POST /v1/completions", {"traceparent": PARENT}, told, 99.9, [timeline])
    tracer.provider.shutdown()
    spans = spans_of(received)
    assert set(spans) == {"POST /v1/completions", "llm_request", "queue", "prefill", "decode"}
    root, request = spans["POST /v1/completions"], spans["llm_request"]
    assert root.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert request.parent_span_id == root.span_id
    assert all(spans[name].parent_span_id == request.span_id for name in ("queue", "prefill", "decode"))
    seconds = {n: (s.end_time_unix_nano - s.start_time_unix_nano) / 1e9 for n, s in spans.items()}
    assert seconds["queue"] == pytest.approx(0.2)
    assert seconds["prefill"] == pytest.approx(0.5)
    assert seconds["decode"] == pytest.approx(2.0)
    values = {a.key: a.value for a in request.attributes}
    assert values["gen_ai.usage.prompt_tokens"].int_value == 5
    assert values["gen_ai.usage.completion_tokens"].int_value == 7
    assert values["gen_ai.response.model"].string_value == "fake"
    assert values["gen_ai.latency.time_to_first_token"].double_value == pytest.approx(0.8)
    assert values["gen_ai.latency.e2e"].double_value == pytest.approx(2.9)


def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r'--otlp_traces_endpoint needs .*: pip install "hex-llm\[otel\]"'):
        traces.Tracer("http://localhost:4317", "fake")


def test_the_gate_tells_it(collector: tuple[str, list[bytes]]) -> None:
    """A real server, whose engine is none: its timelines are made as an engine's client would."""
    from hex_llm.server.app import create_app
    from hex_llm.server.metrics import CURRENT
    from tests.server.apps import asked
    from tests.server.fakes import FakeBackend, byte_tokenizer

    class Noting(FakeBackend):
        def generate(self, *given: Any, **options: Any) -> Any:
            timelines = CURRENT.get()
            assert timelines is not None
            timelines.append(Timeline(num_prompt=3))
            return super().generate(*given, **options)

    endpoint, received = collector
    app = create_app(Noting(byte_tokenizer()), ServerConfig(otlp_traces_endpoint=endpoint))
    assert asked(app, "POST", "/v1/completions", json={"prompt": "abc"}).status_code == 200
    assert asked(app, "GET", "/v1/models").status_code == 200
    gate = next(one for one in app.user_middleware if one.cls is Gate)
    assert gate is not None
    stack: Any = app.middleware_stack
    while not isinstance(stack, Gate):
        stack = stack.app
    assert stack.tracer is not None
    stack.tracer.provider.shutdown()
    spans = spans_of(received)
    assert set(spans) == {"POST /v1/completions", "llm_request"}
