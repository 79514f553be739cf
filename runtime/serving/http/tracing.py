"""OpenTelemetry traces, if its SDK is installed (extra `otel`): a span for each call, with its queue and compute time.

    decisions demo                 the call of a client; its parent is the client's `traceparent`
        queue                      until a rank started the request
        step                       from then until its answer

Attributes follow the conventions for generative AI (gen_ai.*, in development) where they fit. No attribute contains a
text. OpenTelemetry is imported only if the environment enables tracing or the process has set it up.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moepass.models.version import __version__
from moepass.runtime.serving.routes.service import AnsweredRequest, Call

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger("moepass")

# Any of these variables turns tracing on
# (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables).
_ENABLING_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER")
_EXPORTERS = "opentelemetry_traces_exporter"
# The conventions have a gen_ai.operation.name for these paths. Other operations are named after their route.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/embed": "embeddings",
}
# A call may send thousands of requests to the ranks. Only the first of them get spans.
MOST_REQUEST_SPANS = 16


def configured_tracer(environment: Mapping[str, str]) -> Tracer | None:
    """Return the tracer that the process, or else the variables in `environment`, configure; None if tracing is off.

    A tracer made from `environment` sends its remaining spans when the process ends.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if "opentelemetry.sdk.trace" in sys.modules:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        provider = trace.get_tracer_provider()
        if isinstance(provider, TracerProvider):
            return provider.get_tracer("moepass", __version__)
    enabling = [name for name in _ENABLING_VARIABLES if environment.get(name)]
    names = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    if not enabling or names == "none":
        return None
    try:
        exporters = [_exporter(name.strip(), environment) for name in names.split(",")]
        return _provider(exporters, environment).get_tracer("moepass", __version__)
    except (ImportError, LookupError) as error:
        logger.warning(
            "%s turns tracing on, but requests are not traced: %s; pip install 'moepass[otel]' installs what is needed",
            enabling[0],
            error,
        )
        return None


def _exporter(name: str, environment: Mapping[str, str]) -> Any:
    """Return the exporter called `name` in the specification. Raise LookupError if it is not installed."""
    if name == "otlp":
        protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL"
        )
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    entry_points = list(metadata.entry_points(group=_EXPORTERS, name=name))
    if not entry_points:
        raise LookupError(f"no exporter {name!r} is installed")
    return entry_points[0].load()()


def _provider(exporters: list[Any], environment: Mapping[str, str]) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    is_named = environment.get("OTEL_SERVICE_NAME") or "service.name" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if is_named else {"service.name": "moepass"}))
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class TracingMiddleware:
    """Middleware that records a span for each POST request, until its response is sent."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application within a span if the request is a POST."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        span = self._start_span(scope)

        async def send_traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    _fail(span, str(message["status"]))
            await send(message)

        try:
            await self.app(scope, receive, send_traced)
        except BaseException as error:
            _fail(span, type(error).__name__)
            raise
        finally:
            call = scope.get("moepass", {}).get("call")
            if isinstance(call, Call):
                self._describe_call(span, call, scope["path"])
            span.end()

    def _start_span(self, scope: Scope) -> Span:
        from opentelemetry import propagate, trace

        # FastAPI's instrumentation may have started a span already. Then this span is its child.
        is_inside = trace.get_current_span().get_span_context().is_valid
        return self._tracer.start_span(
            f"POST {scope['path']}",
            None if is_inside else propagate.extract(dict(Headers(scope=scope))),
            trace.SpanKind.INTERNAL if is_inside else trace.SpanKind.SERVER,
            {"http.request.method": "POST", "url.path": scope["path"]},
        )

    def _describe_call(self, span: Span, call: Call, path: str) -> None:
        operation = _OPERATIONS.get(path) or path.rpartition("/")[2]
        span.update_name(f"{operation} {call.model}")
        span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "moepass",
                "gen_ai.request.model": call.model,
                "gen_ai.response.id": call.id,
                "gen_ai.usage.input_tokens": call.tokens,
                "gen_ai.usage.cache_read.input_tokens": call.cached_tokens,
                "moepass.requests": len(call.answered),
                "moepass.flops": sum(answered.usage.flops for answered in call.answered),
            }
        )
        for answered in call.answered[:MOST_REQUEST_SPANS]:
            self._add_request_spans(span, answered)

    def _add_request_spans(self, parent: Span, answered: AnsweredRequest) -> None:
        from opentelemetry import trace

        times, usage = answered.times, answered.usage
        if times is None:
            return
        context = trace.set_span_in_context(parent)
        start = answered.ended - times.compute_seconds
        queue = self._tracer.start_span("queue", context, start_time=_nanoseconds(start - times.queue_seconds))
        queue.end(_nanoseconds(start))
        attributes = {
            "gen_ai.usage.input_tokens": usage.tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "moepass.flops": usage.flops,
        }
        step = self._tracer.start_span("step", context, attributes=attributes, start_time=_nanoseconds(start))
        step.end(_nanoseconds(answered.ended))


def _fail(span: Span, kind: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR)
    span.set_attribute("error.type", kind)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
