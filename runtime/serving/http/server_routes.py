"""Routes about the server: models, health, version, metrics, and its state as a page or JSON; /invocations."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, Literal

import msgspec
from fastapi.responses import Response

from moepass.models.errors import InputError
from moepass.models.version import __version__
from moepass.runtime.serving.http.metrics_text import MEDIA_TYPE, metrics_text
from moepass.runtime.serving.requests.backend import ServingState
from moepass.runtime.serving.requests.view import RankView
from moepass.runtime.serving.routes import chat, completions, decision_routes, pooling, rerank, scores, systemone
from moepass.runtime.serving.routes.errors import ErrorReply, error_response
from moepass.runtime.serving.routes.service import Call, EmptyReply, Route


class ModelCard(msgspec.Struct):
    """A served model name; `root` is the name that answers use."""

    id: str
    created: int
    max_model_len: int
    root: str
    owned_by: str = "moepass"
    object: Literal["model"] = "model"


class SystemModel(msgspec.Struct):
    """A served model name in the format of the System One API, with the day on which the server started."""

    name: str
    release_date: str
    description: str


class ModelList(msgspec.Struct):
    """The reply of /v1/models, in OpenAI's format, and in that of the System One API."""

    data: list[ModelCard]
    models: list[SystemModel]
    object: Literal["list"] = "list"


class ReadyReply(msgspec.Struct):
    """The reply of /ready; `details` describe how the model runs."""

    state: ServingState
    model: str
    details: dict[str, Any]


class StateReply(msgspec.Struct):
    """The current state of the server. `labels` is empty unless the model answers with its own labels only.

    The states of `ranks` describe steps by sizes, without texts and tokens. `sums` are counters since the start.
    """

    state: ServingState
    model: str
    version: str
    predicts_tokens: bool
    labels: list[str]
    running: int
    waiting: int
    ranks: list[RankView]
    sums: dict[str, float]
    object: Literal["state"] = "state"


class VersionReply(msgspec.Struct):
    """The reply of /version."""

    version: str


async def models(call: Call) -> ModelList:
    """List the names under which the model is served."""
    status, names = call.service.backend.status(), call.service.settings.model_names
    created = call.service.created
    day = time.strftime("%Y-%m-%d", time.gmtime(created))
    return ModelList(
        [ModelCard(name, created, status.max_sequence_tokens, names[0]) for name in names],
        [SystemModel(name, day, f"{names[0]}, served by moepass") for name in names],
    )


async def model_card(call: Call) -> ModelCard:
    """Return the entry of one model name. Raises HttpError (404) if it is not served."""
    wanted = call.path_values["model"]
    call.check_model(wanted)
    return next(card for card in (await models(call)).data if card.id == wanted)


async def health(call: Call) -> EmptyReply:
    """Return 200 while the process runs; /ready says whether it answers requests."""
    return EmptyReply()


async def ready(call: Call) -> ReadyReply | Response:
    """Return the server's state, with status 503 unless it is ready."""
    status = call.service.backend.status()
    reply = ReadyReply(status.state, call.model, dict(status.details))
    if status.state == "ready":
        return reply
    return Response(msgspec.json.encode(reply), 503, {"Retry-After": "1"}, media_type="application/json")


async def ping(call: Call) -> EmptyReply | Response:
    """Return 200 if the server is ready, otherwise 503, as SageMaker asks."""
    if call.service.backend.status().state == "ready":
        return EmptyReply()
    return error_response(503, "the server is not ready; GET /ready returns its state", headers={"Retry-After": "1"})


async def version(call: Call) -> VersionReply:
    """Return the version of moepass."""
    return VersionReply(__version__)


async def metrics(call: Call) -> Response:
    """Return all metrics in Prometheus' text format."""
    backend = call.service.backend
    view = await backend.view()
    return Response(metrics_text(call.model, backend.status(), view), media_type=MEDIA_TYPE)


async def state(call: Call) -> StateReply:
    """Return the server's state; wait for the ranks' own view at most a quarter of a second."""
    view = await call.service.backend.view()
    status, writer = call.service.backend.status(), call.writer
    labels = () if writer.has_chat_template else writer.prompt.labels
    return StateReply(
        status.state,
        call.model,
        __version__,
        status.predicts_tokens,
        [writer.prompt.label_names.get(label, label) for label in labels],
        view.running,
        view.waiting,
        list(view.ranks),
        dict(status.metrics),
    )


async def page(call: Call) -> Response:
    """Return the HTML page that asks questions and shows the server's state."""
    content, headers = _page()
    return Response(content, headers=headers, media_type="text/html; charset=utf-8")


@functools.cache
def _page() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers, which allow only its own script and style, and requests to this server."""
    text = (resources.files("moepass.runtime.serving.http") / "page.html").read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"script-src {_content_hash('script', text)}",
        f"style-src {_content_hash('style', text)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return text.encode(), headers


def _content_hash(element: str, text: str) -> str:
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


async def invoke(call: Call) -> Any:
    """Call the route that the fields of the body indicate, as clients of SageMaker and of TEI's root need it."""
    body = call.json()
    for field, handler in _HANDLERS.items():
        if field in body:
            return await handler(call)
    problem = f"the body matches no route; it must have one of the fields {', '.join(_HANDLERS)}"
    raise InputError(problem, name="body", expected=tuple(_HANDLERS))


# The route that /invocations calls if the body has a field; the first of these fields decides.
_HANDLERS: dict[str, Callable[[Call], Awaitable[Any]]] = {
    "state": systemone.systemone,
    "questions": decision_routes.create_decision,
    "messages": chat.chat,
    "prompt": completions.complete,
    "label_token_ids": scores.score,
    "queries": scores.score,
    "text_1": scores.score,
    "documents": rerank.rerank,
    "texts": rerank.rerank,
    "input": pooling.embed,
    "inputs": pooling.embed_or_predict,
}
_MODULES = (systemone, decision_routes, chat, completions, scores, rerank, pooling)
MODEL_ROUTES = [route for module in _MODULES for route in module.ROUTES]
_BODIES = tuple(dict.fromkeys(body for route in MODEL_ROUTES for body in route.bodies))
_REPLIES = tuple(dict.fromkeys(kind for route in MODEL_ROUTES for kind in route.replies))

ROUTES = (
    Route("GET", "/v1/models", models, (), (ModelList,)),
    Route("GET", "/v1/models/{model:path}", model_card, (), (ModelCard,)),
    Route("GET", "/health", health, (), (EmptyReply,)),
    Route("GET", "/ready", ready, (), (ReadyReply,)),
    Route("GET", "/ping", ping, (), (EmptyReply, ErrorReply)),
    Route("POST", "/ping", ping, (), (EmptyReply, ErrorReply)),
    Route("GET", "/version", version, (), (VersionReply,)),
    Route("GET", "/metrics", metrics, (), (str,), media_type="text/plain"),
    Route("GET", "/", page, (), (str,), media_type="text/html"),
    Route("POST", "/", invoke, _BODIES, _REPLIES, has_streams=True),
    Route("GET", "/v1/state", state, (), (StateReply,)),
    Route("POST", "/invocations", invoke, _BODIES, _REPLIES, has_streams=True),
)
