"""Spans of calls, with the SDK's in-memory exporter; without OpenTelemetry nothing is imported."""

from __future__ import annotations

import builtins
import dataclasses
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from moepass.runtime.serving.http import app, tracing
from moepass.runtime.serving.http.tracing import MOST_REQUEST_SPANS, configured_tracer
from moepass.runtime.serving.requests.answer import AnswerTimes
from tests.helpers.serving.served import CHAT_TEMPLATE, Served, served

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
DECISION = {"model": "tiny", "input": "a text", "questions": [{"type": "predicate", "instructions": "Is it so?"}]}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(checkpoint: Path, exporter: InMemorySpanExporter) -> Iterator[Served]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "configured_tracer", lambda environment: provider.get_tracer("moepass"))
        with served(checkpoint, chat_template=CHAT_TEMPLATE) as running:
            answer_unchanged = running.backend.answer

            async def answer(request: Any, **options: Any) -> Any:
                return dataclasses.replace(await answer_unchanged(request, **options), times=AnswerTimes(0.25, 1.5))

            patch.setattr(running.backend, "answer", answer)
            yield running


@pytest.fixture
def spans(traced: Served, exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def span_of(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    """Wait for the only span of that name; it ends shortly after the client has its response."""
    for _ in range(1000):
        finished = [span for span in exporter.get_finished_spans() if span.name == name]
        if finished:
            (span,) = finished
            return span
        time.sleep(0.005)
    raise AssertionError(f"there is no span {name}")


def test_a_call_is_a_span_with_queue_and_step_times(traced: Served, spans: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    tokens = traced.client.post("/v1/decisions", json=DECISION, headers=headers).json()["usage"]["input_tokens"]
    call, queue, step = (span_of(spans, name) for name in ("decisions tiny", "queue", "step"))
    assert call.parent is not None
    assert (call.context.trace_id, call.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    assert (call.kind, call.status.status_code) == (SpanKind.SERVER, StatusCode.UNSET)
    attributes = dict(call.attributes or {})
    assert attributes.pop("moepass.flops") == (step.attributes or {})["moepass.flops"]
    assert attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/decisions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "decisions",
        "gen_ai.provider.name": "moepass",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": "mine",
        "gen_ai.usage.input_tokens": tokens,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "moepass.requests": 1,
    }
    for child, seconds in ((queue, 0.25), (step, 1.5)):
        assert child.parent is not None
        assert child.parent.span_id == call.context.span_id
        assert child.start_time is not None
        assert child.end_time is not None
        assert (child.end_time - child.start_time) / 1e9 == pytest.approx(seconds, abs=1e-6)
    assert queue.end_time == step.start_time
    assert not any("a text" in str(value) for span in (call, queue, step) for value in (span.attributes or {}).values())


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}, "text_completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, "chat"),
        ("/v1/embeddings", {"input": "a"}, "embeddings"),
    ],
)
def test_operations_have_the_names_of_the_conventions(
    traced: Served, spans: InMemorySpanExporter, path: str, body: Any, operation: str
) -> None:
    traced.post(path, body)
    call = span_of(spans, f"{operation} tiny")
    assert call.parent is None  # the client sent no traceparent


def test_an_invalid_traceparent_is_ignored(traced: Served, spans: InMemorySpanExporter) -> None:
    traced.client.post("/v1/decisions", json=DECISION, headers={"traceparent": "00-zz-\xff".encode("latin-1")})
    assert span_of(spans, "decisions tiny").parent is None


def test_the_request_spans_of_a_call_are_limited(traced: Served, spans: InMemorySpanExporter) -> None:
    traced.post("/v1/completions", {"prompt": ["a"] * (MOST_REQUEST_SPANS + 4), "max_tokens": 1})
    call = span_of(spans, "text_completion tiny")
    assert (call.attributes or {})["moepass.requests"] == MOST_REQUEST_SPANS + 4
    assert len(spans.get_finished_spans()) == 1 + 2 * MOST_REQUEST_SPANS


def test_failures_set_an_error_status_and_refusals_do_not(traced: Served, spans: InMemorySpanExporter) -> None:
    traced.refused("/v1/decisions", {})
    refused = span_of(spans, "decisions tiny")
    assert refused.status.status_code == StatusCode.UNSET
    assert (refused.attributes or {})["http.response.status_code"] == 400
    spans.clear()
    traced.backend.error = RuntimeError("secret")
    try:
        traced.refused("/v1/decisions", DECISION, 500)
    finally:
        traced.backend.error = None
    failed = span_of(spans, "decisions tiny")
    assert failed.status.status_code == StatusCode.ERROR
    assert (failed.attributes or {})["error.type"] == "500"
    assert "secret" not in failed.to_json()


def test_get_requests_have_no_span(traced: Served, spans: InMemorySpanExporter) -> None:
    for path in ("/metrics", "/health", "/v1/state", "/"):
        assert httpx.get(traced.url + path).status_code == 200
    assert spans.get_finished_spans() == ()


def test_environment_variables_turn_tracing_on(caplog: pytest.LogCaptureFixture) -> None:
    for environment in ({}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SERVICE_NAME": "x"}):
        assert configured_tracer(environment) is None
    assert configured_tracer({"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}) is None
    assert caplog.records == []
    tracer: Any = configured_tracer({"OTEL_TRACES_EXPORTER": "console"})
    assert tracer.resource.attributes["service.name"] == "moepass"
    tracer.span_processor.shutdown()


@pytest.mark.parametrize("name", ["unheard-of", "otlp, unheard-of"])
def test_a_missing_exporter_logs_one_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert configured_tracer({"OTEL_TRACES_EXPORTER": name}) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "OTEL_TRACES_EXPORTER turns tracing on" in record.getMessage()
    assert "moepass[otel]" in record.getMessage()


def test_a_missing_sdk_logs_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing(name: str, *given: Any, **named: Any) -> Any:
        if name.startswith("opentelemetry.sdk"):
            raise ImportError(f"No module named {name!r}")
        return imported(name, *given, **named)

    imported = builtins.__import__
    monkeypatch.setattr(tracing, "_exporter", lambda name, environment: object())
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk.trace")
    monkeypatch.setattr(builtins, "__import__", missing)
    assert configured_tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None
    assert "No module named 'opentelemetry.sdk" in caplog.records[0].getMessage()
    assert len(caplog.records) == 1


def test_nothing_is_imported_unless_tracing_is_on() -> None:
    program = (
        "import sys; from moepass.runtime.serving.http.tracing import configured_tracer; "
        "before = {name for name in sys.modules if name.startswith('opentelemetry')}; "
        "assert configured_tracer({}) is None; "
        "after = {name for name in sys.modules if name.startswith('opentelemetry')}; "
        "assert after == before and not any(name.startswith('opentelemetry.sdk') for name in after), after"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
