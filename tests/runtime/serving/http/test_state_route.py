"""/v1/state says how ranks are, and / is the page that shows it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Iterator

import pytest
from served import Served

from moepass.runtime.serving.requests.answer import AnswerTimes
from moepass.runtime.serving.requests.view import BackendView, EngineView, RankView, StepNode, StepView

STEP = StepView(4, 0.5, 2, 9, 16, 800, 1600, 0.25, (StepNode(-1, 16, True, 0), StepNode(0, 9, False, 2)), 1)
VIEW = BackendView(
    (
        RankView(0, "ready", 30, 50, 120.0, 3, 1e6, "trie", "tries: …", EngineView(STEP, 8, 6, 2, 64)),
        RankView(1, "lost", 0, 0, None, 0, 0.0, None, "", EngineView()),
    ),
    waiting=2,
    running=1,
)


@pytest.fixture
def seen(chat: Served) -> Iterator[Served]:
    chat.backend.seen = VIEW
    yield chat
    chat.backend.seen = BackendView()


def test_the_state_holds_ranks_and_steps_in_sizes(seen: Served) -> None:
    found = seen.client.get("/v1/state").json()
    assert (found["state"], found["model"], found["running"], found["waiting"]) == ("ready", "tiny", 1, 2)
    first, second = found["ranks"]
    assert (first["load_flops"], first["most_load_flops"], first["form_text"]) == (30, 120.0, "tries: …")
    step = first["engine"]["step"]
    assert step["nodes"][1] == {"parent": 0, "tokens": 9, "is_cached": False, "reads": 2}
    assert (step["left_out"], step["cached_tokens"]) == (1, 16)
    assert (second["state"], second["most_load_flops"], second["engine"]["step"]) == ("lost", None, None)
    assert found["labels"] == []
    assert found["sums"]["requests"] >= 0


def test_the_state_names_the_labels_that_a_model_knows(demo: Served, classes: Served) -> None:
    assert "German" in demo.client.get("/v1/state").json()["labels"]
    assert classes.client.get("/v1/state").json()["predicts_tokens"] is False


def test_the_page_runs_nothing_but_its_own_script(chat: Served) -> None:
    response = chat.client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    for element in ("script", "style"):
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    assert response.headers["x-content-type-options"] == "nosniff"


def test_the_page_fetches_nothing_from_elsewhere_and_makes_no_html_of_texts(chat: Served) -> None:
    text = chat.client.get("/").text
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|//[a-z]|@import|url\(|<img|<iframe|import\(| src=", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(", text)
    assert not re.findall(r"localStorage|sessionStorage|document\.cookie", text)
    assert not re.findall(r"\son[a-z]+=|\sstyle=", text)  # the policy would not run them


def test_responses_say_how_long_a_request_waited(chat: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = chat.backend.answer

    async def answer(request, **options):  # type: ignore[no-untyped-def]
        found = await whole(request, **options)
        object.__setattr__(found, "times", AnswerTimes(0.25, 1.5))
        await asyncio.sleep(0)
        return found

    monkeypatch.setattr(chat.backend, "answer", answer)
    body = {"prompt": ["a", "b"], "max_tokens": 1}
    timing = chat.client.post("/v1/completions", json=body).headers["server-timing"]
    assert "queue;dur=250.0" in timing
    assert "compute;dur=1500.0" in timing
