"""The page for people at `/`, and what it shows: the server's state as JSON at /v1/state."""

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
    """How the server is now.

    `labels` are the answers that the model knows, where it knows no others. Sizes of steps say nothing of what is in
    them. `sums` are since the start.
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
    """Asks the ranks what they are doing, and waits for them at most a quarter of a second."""
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
    """A page that asks questions and shows what the server does."""
    content, headers = _page()
    return Response(content, headers=headers, media_type="text/html; charset=utf-8")


@functools.cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page, and headers that let it run its own script and style alone, and talk to this server alone."""
    text = (resources.files("moepass.runtime.serving.http") / "page.html").read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"script-src {_hash_of('script', text)}",
        f"style-src {_hash_of('style', text)}",
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


def _hash_of(element: str, text: str) -> str:
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


ROUTES = (
    Route("GET", "/", page, (), (str,), media_type="text/html"),
    Route("GET", "/v1/state", state, (), (StateReply,)),
)
