"""The status page at `/`, and the server's state as JSON at /v1/state."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources
from typing import Literal

import msgspec
from fastapi.responses import Response

from moepass.models.version import __version__
from moepass.runtime.serving.requests.backend import ServingState
from moepass.runtime.serving.requests.view import RankView
from moepass.runtime.serving.routes.service import Call, Route


class StateReply(msgspec.Struct):
    """The current state of the server.

    Attributes:
        labels: The answers of a model that answers with its own labels only; otherwise empty.
        running: Requests that ranks compute now.
        waiting: Requests that wait for a rank.
        ranks: The state of each rank. Steps are described by sizes; texts and tokens are not included.
        sums: Counters since the start, by name.
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


ROUTES = (
    Route("GET", "/", page, (), (str,), media_type="text/html"),
    Route("GET", "/v1/state", state, (), (StateReply,)),
)
