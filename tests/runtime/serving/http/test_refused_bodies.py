"""Bodies that are absurd, too large or wrong: each is answered, or refused with a message that names the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from moepass.models.limits import MOST_BODY_BYTES, MOST_ITEMS, MOST_REQUEST_TOKENS
from moepass.runtime.serving.http.app import ROUTES
from moepass.runtime.serving.routes import prompt_inputs, service
from tests.helpers.serving.served import Served

POSTS = sorted({route.path for route in ROUTES if route.method == "POST" and route.bodies})
ASKED = {"type": "predicate", "instructions": "Is it so?"}
DECISION = {"model": "tiny", "input": "a text", "questions": [ASKED]}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}

# Invalid or unusual bodies: each is either refused with a message or answered.
ABSURD = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[1]",
    "null": b"null",
    "NaN": b'{"input": NaN}',
    "half a surrogate pair": b'{"model": "tiny", "input": "\\ud800", "prompt": "\\ud800"}',
    "no UTF-8": b'{"input": "\xff"}',
    "a huge number": b'{"input": "a", "priority": ' + b"9" * 400 + b"}",
    "a float beyond all": b'{"temperature": 1e999, "prompt": "a", "max_tokens": 1}',
    "a huge priority": json.dumps(DECISION | {"priority": 1 << 40, "prompt": "a", "state": "a"}).encode(),
    "a huge salt": json.dumps(DECISION | {"cache_salt": "s" * 5000, "prompt_cache_key": "s" * 5000}).encode(),
    "nested deeply": b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested deeply in a schema": b'{"state": ' + b"[" * 70 + b"]" * 70 + b', "questions": {}}',
    "null bytes": json.dumps(DECISION | {"input": "\0", "prompt": "\0", "state": "\0"}).encode(),
    "many fields": json.dumps({f"f{number}": number for number in range(20_000)}).encode(),
}


LONG = "a" * 2000  # exceeds the model's tokens; ENDLESS exceeds the limit of characters
ENDLESS = "a" * 10_000_000
LABELLED = {"id": "is it so?", "type": "yes_no", "question": ""}


@pytest.mark.sampled(every=25)
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": LONG, "max_tokens": 1}, "prompt"),
        ("/v1/completions", {"prompt": ["a", LONG], "max_tokens": 1}, "prompt[1]"),
        ("/v1/completions", {"prompt": ENDLESS, "max_tokens": 1}, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "model": "gpt"}, "model"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": ENDLESS}]}, "messages[0].content"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/decisions", DECISION | {"input": LONG}, "questions[0]"),
        ("/v1/decisions", DECISION | {"input": LONG, "questions": [ASKED | {"name": "model"}]}, "questions[0]"),
        ("/v1/decisions", {"input": LONG, "questions": [LABELLED]}, "questions[0]"),
        ("/v1/systemone", {"state": LONG, "questions": {"so?": {"type": "noul"}}}, "questions"),
        ("/v1/systemone", {"state": "s", "questions": {"?": {"type": "noul", "criteria": {"x": 0}}}}, "questions"),
        ("/v1/score", {"query": "a", "items": ["b", LONG], "label_token_ids": [5]}, "items[1]"),
        ("/v1/score", {"query": ENDLESS, "items": ["b"], "label_token_ids": [5]}, "query"),
        ("/score", {"queries": "a", "documents": LONG}, "documents[0]"),
        ("/score", {"text_1": "a", "text_2": ["b", LONG]}, "text_2[1]"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "texts": ["b", LONG]}, "texts[1]"),
        ("/tokenize", {"prompt": ENDLESS}, "prompt"),
        ("/detokenize", {"tokens": [5] * (MOST_REQUEST_TOKENS + 1)}, "tokens"),
        ("/invocations", {"x": 1}, None),
        ("/invocations", {"prompt": LONG, "max_tokens": 1}, "prompt"),
        ("/classify", {"input": "a"}, "model"),
        ("/predict", {"inputs": "a"}, "model"),
    ],
)  # fmt: skip
def test_an_error_names_its_field(chat: Served, path: str, body: Any, param: str | None) -> None:
    status = 404 if body.get("model") == "gpt" else 400
    assert chat.refused(path, body, status)["param"] == param


@pytest.mark.sampled(every=19)
@pytest.mark.parametrize("path", POSTS)
def test_absurd_bodies_are_refused_with_a_message(chat: Served, path: str) -> None:
    (fields,) = {frozenset(route.fields) for route in ROUTES if (route.method, route.path) == ("POST", path)}
    for name, body in ABSURD.items():
        response = chat.client.post(path, content=body)
        assert response.status_code in (200, 400), (name, response.text)
        if response.status_code == 400:
            error = response.json()["error"]
            assert error["message"], name
            assert error["param"] is None or error["param"].split(".")[0].split("[")[0] in fields, name


def _choices(count: int, text: str = "v") -> dict[str, Any]:
    values = [{"value": f"{text}{number}"} for number in range(count)]
    return {"type": "choice", "instructions": "?", "choices": values}


@pytest.mark.parametrize(
    "body",
    [
        DECISION | {"questions": [_choices(2, "x" * 5_000_000)]},
        DECISION | {"input": "x" * 10_000_000},
        DECISION | {"input": "\ufdfa" * 100_000},  # 18 times as long when normalised
        DECISION | {"questions": [_choices(255)] * 400},
    ],
    ids=["labels of 5 MB", "an input of 10 MB", "letters that grow", "400 questions of 255 choices"],
)
def test_far_too_large_bodies_are_refused(chat: Served, body: Any) -> None:
    assert chat.refused("/v1/decisions", body)["message"]


def test_400_questions_are_answered(chat: Served) -> None:
    reply = chat.post("/v1/decisions", DECISION | {"questions": [_choices(2)] * 399 + DECISION["questions"]})  # type: ignore[operator]
    assert len(reply["answers"]) == 400
    # Equal questions share their pieces.
    assert len(chat.backend.requests[-1].pieces) < 10


@pytest.mark.slow
def test_255_choices_are_answered(demo: Served) -> None:
    names = list(demo.writer.prompt.label_names.values())
    question = {"type": "choice", "instructions": "?", "choices": [{"value": name} for name in names]}
    (answer,) = demo.post("/v1/decisions", DECISION | {"questions": [question]})["answers"]
    assert sum(entry["probability"] for entry in answer["probabilities"]) == pytest.approx(1)


def test_a_body_beyond_the_limit_is_refused(chat: Served) -> None:
    # Send chunks without a Content-Length.
    def parts() -> Iterator[bytes]:
        for _ in range(MOST_BODY_BYTES // (1 << 20) + 1):
            yield b" " * (1 << 20)

    response = httpx.post(f"{chat.url}/v1/decisions", content=parts())
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    packed = httpx.post(f"{chat.url}/v1/decisions", content=b"x", headers={"Content-Encoding": "gzip"})
    assert packed.status_code == 415


def test_bodies_of_all_clients_together_are_bounded(chat: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(DECISION).encode()
    monkeypatch.setattr(service, "MOST_BODIES_BYTES", len(body))
    assert chat.client.post("/v1/decisions", content=body).status_code == 200
    refusal = chat.client.post("/v1/decisions", content=body + b" ")
    assert (refusal.status_code, refusal.headers["retry-after"]) == (429, "1")
    # Failed requests also return their bytes to the budget.
    chat.refused("/v1/decisions", {})
    assert chat.service.bodies.taken == 0
    assert chat.client.post("/v1/decisions", content=body).status_code == 200


@pytest.mark.slow
def test_too_many_items_and_tokens_are_refused(base: Served) -> None:
    items = ["a"] * (MOST_ITEMS + 1)
    assert base.refused("/v1/score", {"query": "a", "items": items, "label_token_ids": [5]})["param"] == "items"
    assert base.refused("/v1/completions", {"prompt": items, "max_tokens": 1})["param"] == "prompt"
    lists = [[number % 300, number // 300] + [9] * 500 for number in range(MOST_ITEMS)]
    assert len(lists) * 502 > MOST_REQUEST_TOKENS
    body = {"query": [], "items": lists, "label_token_ids": [5]}
    assert str(MOST_REQUEST_TOKENS) in base.refused("/v1/score", body)["message"]


@pytest.mark.slow
def test_answers_with_too_many_numbers_are_refused_before_the_model_is_asked(
    base: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_inputs, "MOST_ANSWER_NUMBERS", 5)
    asked = len(base.backend.requests)
    for path, body in (
        ("/v1/score", {"query": "a", "items": ["a", "b"], "label_token_ids": [5, 6, 7]}),
        ("/v1/completions", {"prompt": [[5, 6], [7, 8]], "max_tokens": 0, "echo": True, "logprobs": 1}),
    ):
        assert "limit is 5" in base.refused(path, body)["message"]
    assert len(base.backend.requests) == asked
    assert "limit is 5" in base.refused("/v1/embeddings", {"input": "a"})["message"]
