"""What the server says of itself: its model, health, readiness, version and metrics; and /invocations, SageMaker's way
to any of the other routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from fastapi.responses import Response

from moepass.models.errors import InputError
from moepass.models.version import __version__
from moepass.runtime.serving.http.metrics_text import MEDIA_TYPE, metrics_text
from moepass.runtime.serving.requests.backend import ServingState
from moepass.runtime.serving.routes import chat, completions, decisions, rerank, scores, systemone, vectors
from moepass.runtime.serving.routes.errors import ErrorReply, error_response
from moepass.runtime.serving.routes.service import Call, EmptyReply, Route


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    root: str
    owned_by: str = "moepass"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class ReadyReply(msgspec.Struct):
    """`details` say how the model runs."""

    state: ServingState
    model: str
    details: dict[str, Any]


class VersionReply(msgspec.Struct):
    version: str


async def models(call: Call) -> ModelList:
    status, names = call.service.backend.status(), call.service.settings.model_names
    return ModelList([ModelCard(name, call.service.created, status.max_sequence_tokens, names[0]) for name in names])


async def health(call: Call) -> EmptyReply:
    """The process lives; whether it answers is what /ready says."""
    return EmptyReply()


async def ready(call: Call) -> ReadyReply | Response:
    status = call.service.backend.status()
    found = ReadyReply(status.state, call.model, dict(status.details))
    if status.state == "ready":
        return found
    return Response(msgspec.json.encode(found), 503, {"Retry-After": "1"}, media_type="application/json")


async def ping(call: Call) -> EmptyReply | Response:
    if call.service.backend.status().state == "ready":
        return EmptyReply()
    return error_response(503, "the server is not ready; /ready says why", headers={"Retry-After": "1"})


async def version(call: Call) -> VersionReply:
    return VersionReply(__version__)


async def metrics(call: Call) -> Response:
    """In the text format of Prometheus."""
    backend = call.service.backend
    view = await backend.view()
    return Response(metrics_text(call.model, backend.status(), view), media_type=MEDIA_TYPE)


async def invoke(call: Call) -> Any:
    """The body decides which route is meant."""
    return await _meant(call.json())(call)


def _meant(body: dict[str, Any]) -> Callable[[Call], Awaitable[Any]]:
    known: tuple[tuple[str, Callable[[Call], Awaitable[Any]]], ...] = (
        ("state", systemone.systemone),
        ("questions", decisions.create_decision),
        ("messages", chat.chat),
        ("prompt", completions.complete),
        ("label_token_ids", scores.score),
        ("queries", scores.score),
        ("text_1", scores.score),
        ("documents", rerank.rerank),
        ("texts", rerank.rerank),
        ("input", vectors.embed),
        ("inputs", vectors.embed_plain),
    )
    for field, handler in known:
        if field in body:
            return handler
    raise InputError(
        f"no route is known by this body; it must have one of the fields {', '.join(field for field, _ in known)}",
        name="body",
        expected=tuple(field for field, _ in known),
    )


_BODIES = tuple(
    dict.fromkeys(
        body
        for module in (systemone, decisions, chat, completions, scores, rerank, vectors)
        for route in module.ROUTES
        for body in route.bodies
    )
)
_REPLIES = tuple(
    dict.fromkeys(
        found
        for module in (systemone, decisions, chat, completions, scores, rerank, vectors)
        for route in module.ROUTES
        for found in route.replies
    )
)

ROUTES = (
    Route("GET", "/v1/models", models, (), (ModelList,)),
    Route("GET", "/health", health, (), (EmptyReply,)),
    Route("GET", "/ready", ready, (), (ReadyReply,)),
    Route("GET", "/ping", ping, (), (EmptyReply, ErrorReply)),
    Route("POST", "/ping", ping, (), (EmptyReply, ErrorReply)),
    Route("GET", "/version", version, (), (VersionReply,)),
    Route("GET", "/metrics", metrics, (), (str,), media_type="text/plain"),
    Route("POST", "/invocations", invoke, _BODIES, _REPLIES, has_streams=True),
)
