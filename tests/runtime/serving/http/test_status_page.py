"""/v1/state returns the state of the ranks, and / is the page that shows it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi.responses import Response

from moepass.models.checkpoint.checkpoint_folders import Prompt
from moepass.runtime.serving.http import server_routes
from moepass.runtime.serving.requests.backend import BackendStatus
from moepass.runtime.serving.requests.view import BackendView
from moepass.runtime.serving.routes.server_settings import ServerSettings
from moepass.runtime.serving.routes.service import Call, Service
from tests.helpers.serving.example_view import VIEW


class StatusBackend:
    def status(self) -> BackendStatus:
        return BackendStatus("ready", 8, 8, metrics={"answered": 5.0})

    async def view(self) -> BackendView:
        return VIEW


def test_the_state_contains_ranks_and_step_sizes() -> None:
    writer: Any = SimpleNamespace(
        has_chat_template=False, prompt=Prompt(labels=("<a>", "<b>"), label_names={"<a>": "A"})
    )
    service = Service(StatusBackend(), writer, ServerSettings(("tiny",)))  # type: ignore[arg-type]
    state = msgspec.json.decode(msgspec.json.encode(asyncio.run(server_routes.state(Call(service, b"", "id")))))
    assert (state["state"], state["model"], state["running"], state["waiting"]) == ("ready", "tiny", 1, 2)
    assert state["labels"] == ["A", "<b>"]
    assert state["sums"] == {"answered": 5}
    first, second = state["ranks"]
    assert (first["load_flops"], first["most_load_flops"], first["form_text"]) == (30, 120.0, "tries: …")
    assert first["memory_bytes"] == {"weights": 3e9, "slots": 0, "step": 2e9, "cache": 1e9}
    assert (first["memory_limit_bytes"], second["memory_bytes"]) == (8e9, {})
    step = first["engine"]["step"]
    assert step["nodes"][1] == {"parent": 0, "tokens": 9, "is_cached": False, "reads": 2}
    assert (step["left_out"], step["cached_tokens"]) == (1, 16)
    assert (second["state"], second["most_load_flops"], second["engine"]["step"]) == ("lost", None, None)


@pytest.fixture(scope="module")
def response() -> Response:
    call: Any = None
    return asyncio.run(server_routes.page(call))


def test_the_page_runs_nothing_but_its_own_script(response: Response) -> None:
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(directive.split(" ", 1) for directive in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    for element in ("script", "style"):
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", bytes(response.body).decode(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    assert response.headers["x-content-type-options"] == "nosniff"


def test_the_page_fetches_nothing_and_inserts_no_html(response: Response) -> None:
    text = bytes(response.body).decode().replace("http://www.w3.org/2000/svg", "")  # the SVG namespace is not fetched
    assert not re.findall(r"https?:|//[a-z]|@import|url\(|<img|<iframe|import\(| src=", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(", text)
    assert not re.findall(r"localStorage|sessionStorage|document\.cookie", text)
    assert not re.findall(r"\son[a-z]+=|\sstyle=", text)  # the content security policy blocks these
