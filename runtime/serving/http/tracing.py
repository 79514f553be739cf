"""Traces for OpenTelemetry, where its SDK is installed (extra `otel`): a span for each call, and what it waited for.

    decisions demo                 what a client asked; its parent is the client's `traceparent`
        queue                      until a rank began it
        step                       from then until its answer

Attributes follow the conventions for generative AI (gen_ai.*, in development) where they fit. None holds a text.
Nothing of OpenTelemetry is imported here unless the environment asks for traces, or the process has set them up.
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

# What of the environment asks for traces (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables).
_ASKING = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER")
_EXPORTERS = "opentelemetry_traces_exporter"
# gen_ai.operation.name has names for these; the others are called by their route.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/embed": "embeddings",
}
# A call may be thousands of requests to the ranks; so many of them have spans of their own.
MOST_REQUESTS = 16


def configured_tracer(environment: Mapping[str, str]) -> Tracer | None:
    """As the process has set OpenTelemetry up, or as its variables in `environment` say; None where neither asks.

    What has not been sent when the process ends is sent then.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if "opentelemetry.sdk.trace" in sys.modules:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        provider = trace.get_tracer_provider()
        if isinstance(provider, TracerProvider):
            return provider.get_tracer("moepass", __version__)
    asking = [name for name in _ASKING if environment.get(name)]
    names = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    if not asking or names == "none":
        return None
    try:
        exporters = [_exporter(name.strip(), environment) for name in names.split(",")]
        return _provider(exporters, environment).get_tracer("moepass", __version__)
    except (ImportError, LookupError) as error:
        logger.warning(
            "%s asks for traces, and there are none: %s; pip install 'moepass[otel]' installs what they need",
            asking[0],
            error,
        )
        return None


def _exporter(name: str, environment: Mapping[str, str]) -> Any:
    """The exporter that the specification calls `name`. Raises LookupError where no package brings it."""
    if name == "otlp":
        protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL"
        )
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    found = list(metadata.entry_points(group=_EXPORTERS, name=name))
    if not found:
        raise LookupError(f"no exporter {name!r} is installed")
    return found[0].load()()


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
    """A span for each request that has a body; it ends when the answer is sent."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        span = self._started(scope)

        async def send_told(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    _fail(span, str(message["status"]))
            await send(message)

        try:
            await self.app(scope, receive, send_told)
        except BaseException as error:
            _fail(span, type(error).__name__)
            raise
        finally:
            call = scope.get("moepass", {}).get("call")
            if isinstance(call, Call):
                self._tell(span, call, scope["path"])
            span.end()

    def _started(self, scope: Scope) -> Span:
        from opentelemetry import propagate, trace

        # FastAPI makes a span of its own where the process has set OpenTelemetry up. Then this one is inside of it.
        is_inside = trace.get_current_span().get_span_context().is_valid
        return self._tracer.start_span(
            f"POST {scope['path']}",
            None if is_inside else propagate.extract(dict(Headers(scope=scope))),
            trace.SpanKind.INTERNAL if is_inside else trace.SpanKind.SERVER,
            {"http.request.method": "POST", "url.path": scope["path"]},
        )

    def _tell(self, span: Span, call: Call, path: str) -> None:
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
        for answered in call.answered[:MOST_REQUESTS]:
            self._tell_times(span, answered)

    def _tell_times(self, parent: Span, answered: AnsweredRequest) -> None:
        from opentelemetry import trace

        times, usage = answered.times, answered.usage
        if times is None:
            return
        context = trace.set_span_in_context(parent)
        began = answered.ended - times.compute_seconds
        queue = self._tracer.start_span("queue", context, start_time=_nanoseconds(began - times.queue_seconds))
        queue.end(_nanoseconds(began))
        attributes = {
            "gen_ai.usage.input_tokens": usage.tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "moepass.flops": usage.flops,
        }
        step = self._tracer.start_span("step", context, attributes=attributes, start_time=_nanoseconds(began))
        step.end(_nanoseconds(answered.ended))


def _fail(span: Span, kind: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR)
    span.set_attribute("error.type", kind)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
