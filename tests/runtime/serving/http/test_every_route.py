"""Properties of all routes: keys, errors, clients that leave, states and the document."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from moepass import __version__
from moepass.clients.batch_run import Batch
from moepass.models.errors import CheckpointError, OptionError
from moepass.models.limits import MOST_ITEMS
from moepass.runtime.serving.http.app import OPEN_PATHS, ROUTES, create_app
from moepass.runtime.serving.requests.answer import AnswerTimes
from moepass.runtime.serving.requests.backend import (
    AnswerTimeoutError,
    NotServingError,
    QueueFullError,
    SequenceTooLongError,
)
from moepass.runtime.serving.routes.server_settings import ServerSettings
from tests.helpers.serving.byte_checkpoint import save_byte_checkpoint
from tests.helpers.serving.replies import check_alike, lasting
from tests.helpers.serving.served import CHAT_TEMPLATE, Served, served

POSTS = sorted({route.path for route in ROUTES if route.method == "POST" and route.bodies})
ASKED = {"type": "predicate", "instructions": "Is it so?"}
DECISION = {"model": "tiny", "input": "a text", "questions": [ASKED]}
INVOCATIONS: list[tuple[dict[str, Any], str]] = [
    ({"state": "s", "questions": {"q": {"type": "noul", "instructions": "?"}}}, "/v1/systemone"),
    (DECISION, "/v1/decisions"),
    ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, "/v1/chat/completions"),
    ({"prompt": "a", "max_tokens": 1}, "/v1/completions"),
    ({"query": "a", "items": ["b"], "label_token_ids": [5]}, "/v1/score"),
    ({"queries": "a", "documents": ["b"]}, "/score"),
    ({"query": "a", "documents": ["b"]}, "/rerank"),
    ({"query": "a", "texts": ["b"]}, "/rerank"),
    ({"input": "a"}, "/v1/embeddings"),
    ({"inputs": "a"}, "/embed"),
]


def with_values(path: str) -> str:
    """Return the path of a route with values for its variable parts."""
    return path.replace("{model:path}", "tiny")


@pytest.fixture
def backend_error(chat: Served) -> Iterator[Callable[[Exception], None]]:
    def set_error(error: Exception) -> None:
        chat.backend.error = error

    yield set_error
    chat.backend.error = None


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFullError("the queue is full", retry_after_seconds=2.5), 429, "queue_full"),
        (NotServingError("the server drains", value="draining"), 503, "not_serving"),
        (AnswerTimeoutError("no answer in 1 s", expected=1.0), 504, "timeout"),
        (SequenceTooLongError("9 tokens; the limit is 8", value=9, expected=8), 400, "context_length_exceeded"),
    ],
)
def test_errors_of_the_backend_have_their_status(
    chat: Served, backend_error: Callable[[Exception], None], error: Exception, status: int, code: str
) -> None:
    backend_error(error)
    response = chat.client.post("/v1/decisions", json=DECISION)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.json()["error"]["message"] == str(error)
    assert response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)


def test_openais_client_knows_a_full_queue(
    chat: Served, client: openai.OpenAI, backend_error: Callable[[Exception], None]
) -> None:
    backend_error(QueueFullError("the queue is full", retry_after_seconds=1))
    with pytest.raises(openai.RateLimitError, match="queue is full"):
        client.decisions.create(**DECISION)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [RuntimeError("secret of /srv/private"), CheckpointError("no /srv/private/x", path="/srv/private/x")]
)
def test_an_unexpected_error_leaks_no_details(
    chat: Served, backend_error: Callable[[Exception], None], error: Exception
) -> None:
    backend_error(error)
    message = chat.refused("/v1/decisions", DECISION, 500)["message"]
    assert "/srv/private" not in message


@pytest.fixture
def broken(chat: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets all log-probabilities of the backend to one value."""

    def set_value(value: float) -> None:
        answer_unchanged = chat.backend.answer

        async def answer(request: Any, **options: Any) -> Any:
            reply = await answer_unchanged(request, **options)
            for piece in reply.pieces:
                for read in piece.reads:
                    read.log_probabilities[:] = value
            return reply

        monkeypatch.setattr(chat.backend, "answer", answer)

    return set_value


def test_a_question_whose_labels_all_are_impossible_is_refused(chat: Served, broken: Callable[[float], None]) -> None:
    broken(float("-inf"))
    (answer,) = chat.post("/v1/decisions", DECISION)["answers"]
    assert (answer["type"], "probability 0" in answer["reason"]) == ("refusal", True)
    chat.refused("/v1/systemone", {"state": "s", "questions": {"q": {"type": "noul"}}})


def test_a_model_with_nan_outputs_is_an_error(chat: Served, broken: Callable[[float], None]) -> None:
    broken(float("nan"))
    assert "outputs are NaN" in chat.refused("/v1/decisions", DECISION, 500)["message"]


def test_one_prompt_of_a_batch_that_fails_cancels_the_others(chat: Served) -> None:
    before = chat.backend.cancelled
    gate = asyncio.Event()
    chat.backend.gate = gate
    good = chat.backend.answer

    async def answer(request: Any, **options: Any) -> Any:
        if request.id.endswith("-1"):
            await asyncio.sleep(0.01)
            raise SequenceTooLongError("too long", value=9, expected=8)
        return await good(request, **options)

    chat.backend.answer = answer  # type: ignore[method-assign]
    try:
        chat.refused("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 1})
    finally:
        del chat.backend.answer
        chat.backend.gate = None
    assert chat.backend.cancelled == before + 2


def test_a_client_that_leaves_cancels_its_request(chat: Served) -> None:
    before, asked = chat.backend.cancelled, len(chat.backend.requests)
    chat.backend.gate = asyncio.Event()
    try:
        body = json.dumps(DECISION).encode()
        host, port = chat.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as leaving:
            head = f"POST /v1/decisions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            leaving.sendall(head.encode() + body)
            _wait_until(lambda: len(chat.backend.requests) > asked)
        _wait_until(lambda: chat.backend.cancelled == before + 1)
    finally:
        chat.backend.gate = None
    chat.post("/v1/decisions", DECISION)


def _wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it has not happened in 10 s")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that takes more tokens than a list may have entries."""
    with served(save_byte_checkpoint(tmp_path_factory.mktemp("long"), max_position_embeddings=8192)) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "field", "answers"),
    [
        ("/v1/completions", "prompt", "choices"),
        ("/v1/embeddings", "input", "data"),
        ("/pooling", "input", "data"),
        ("/embed", "inputs", None),
    ],
)
def test_a_flat_list_of_token_ids_is_one_prompt_of_any_length(
    long: Served, path: str, field: str, answers: str | None
) -> None:
    tokens = [number % 256 for number in range(MOST_ITEMS + 904)]
    options = {"max_tokens": 1, "logprobs": 1} if field == "prompt" else {}
    replies = [long.post(path, {field: prompts, **options}) for prompts in (tokens, [tokens])]
    flat, nested = (reply if answers is None else reply[answers] for reply in replies)
    assert len(flat) == 1
    assert flat == nested
    too_long = long.refused(path, {field: [7] * 8193, **options})
    assert too_long["code"] == "context_length_exceeded"


@pytest.fixture(scope="module")
def guarded(checkpoint: Path) -> Iterator[Served]:
    with served(checkpoint, chat_template=CHAT_TEMPLATE, api_key="sésame") as running:
        yield running


@pytest.fixture(scope="module")
def stranger(guarded: Served) -> Iterator[httpx.Client]:
    """A client without the key. A client of its own for each request would read all certificates each time."""
    with httpx.Client(base_url=guarded.url) as client:
        yield client


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_the_key_guards_every_route_but_health(stranger: httpx.Client, route: Any) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer sesame"},
        {"Authorization": "Basic sésame".encode()},
        {"Authorization": ""},
        {"Authorization": b"Bearer \xff"},
    ):
        response = stranger.request(route.method, route.path, headers=headers)
        if route.path in OPEN_PATHS and not route.bodies:
            assert response.status_code == 200
        else:
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/openapi.json", "/nowhere"])
def test_the_key_guards_unknown_paths_too(stranger: httpx.Client, path: str) -> None:
    assert stranger.get(path).status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_the_right_key_opens(stranger: httpx.Client, scheme: str) -> None:
    headers = {"Authorization": f"{scheme} sésame".encode()}
    assert stranger.post("/v1/decisions", json=DECISION, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/nowhere", 404, "there is no route '/nowhere'; GET /openapi.json lists all routes"),
        ("POST", "/v1/decisions/", 404, "there is no route '/v1/decisions/'; GET /openapi.json lists all routes"),
        ("GET", "/v1/decisions", 405, "/v1/decisions does not support GET; it supports POST"),
        ("DELETE", "/ping", 405, "/ping does not support DELETE; it supports GET, HEAD, POST"),
    ],
)
def test_unknown_routes_and_methods_are_errors_that_name_the_supported_ones(
    chat: Served, method: str, path: str, status: int, words: str
) -> None:
    """The error is no redirect, which would send the client to the host in its Host header."""
    response = chat.client.request(method, path, headers={"Host": "elsewhere.example"})
    assert (response.status_code, response.json()["error"]["message"]) == (status, words)
    assert "location" not in response.headers


CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "name", "neutral"),
    [
        ("/v1/chat/completions", CHAT, "chat_template", None),
        ("/v1/chat/completions", CHAT, "chat_template_kwargs", {"enable_thinking": False}),
        ("/v1/chat/completions", CHAT, "add_generation_prompt", True),
        ("/v1/decisions", DECISION, "truncate_prompt_tokens", -1),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}, "prompt_logprobs", None),
        ("/v1/decisions", DECISION, "chat_template_kwargs", None),
    ],
)
def test_unsupported_fields_that_change_results_are_refused_and_others_ignored(
    chat: Served, path: str, body: dict[str, Any], name: str, neutral: object
) -> None:
    refused = chat.client.post(path, json={**body, name: 7})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert chat.client.post(path, json={**body, name: neutral, "of_another_server": 7}).status_code == 200


def test_a_server_reports_its_state(chat: Served) -> None:
    get = chat.client.get
    assert get("/health").json() == {}
    assert get("/ready").json() == {"state": "ready", "model": "tiny", "details": {"attention": "eager"}}
    assert get("/ping").status_code == chat.client.post("/ping").status_code == 200
    assert get("/version").json() == {"version": __version__}
    assert [card["id"] for card in get("/v1/models").json()["data"]] == ["tiny", "alias"]
    metrics = get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "moepass_requests_total " in metrics.text
    chat.backend.state = "draining"
    try:
        assert (get("/ready").status_code, get("/ready").json()["state"]) == (503, "draining")
        assert get("/ping").status_code == 503
        assert get("/health").status_code == 200
    finally:
        chat.backend.state = "ready"


@pytest.mark.parametrize("path", sorted(route.path for route in ROUTES if route.method == "GET"))
def test_head_is_answered_like_get_without_a_body(chat: Served, path: str) -> None:
    for state, status in (("ready", 200), ("draining", 503 if path in ("/ready", "/ping") else 200)):
        chat.backend.state = state
        try:
            probed, got = chat.client.head(with_values(path)), chat.client.get(with_values(path))
        finally:
            chat.backend.state = "ready"
        assert (probed.status_code, probed.content, got.status_code) == (status, b"", status)
        assert probed.headers["content-type"] == got.headers["content-type"]
    # The connection stays usable, and routes that compute do not support HEAD.
    assert chat.client.head("/v1/decisions").status_code == 405


def test_openais_client_lists_the_models(client: openai.OpenAI) -> None:
    cards = list(client.models.list())
    assert [card.id for card in cards] == ["tiny", "alias"]
    assert [client.models.retrieve(card.id) for card in cards] == cards
    for name in ("tin", "tiny/", "a/b", "tiny%20"):
        with pytest.raises(openai.NotFoundError, match="'tiny' or 'alias'"):
            client.models.retrieve(name)


def test_responses_have_ids_and_times(chat: Served) -> None:
    response = chat.client.post("/v1/decisions", json=DECISION, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert int(response.headers["openai-processing-ms"]) >= 0
    assert "backend;dur=" in response.headers["server-timing"]
    second_response = chat.client.post("/v1/decisions", json=DECISION, headers={"X-Request-Id": "a b\x7f" * 99})
    assert second_response.headers["x-request-id"].startswith("req-")


def test_responses_have_queue_and_compute_times(chat: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_unchanged = chat.backend.answer

    async def answer(request: Any, **options: Any) -> Any:
        return dataclasses.replace(await answer_unchanged(request, **options), times=AnswerTimes(0.25, 1.5))

    monkeypatch.setattr(chat.backend, "answer", answer)
    timing = chat.client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1}).headers["server-timing"]
    assert "queue;dur=250.0, compute;dur=1500.0" in timing


@pytest.mark.slow
def test_the_state_names_the_labels_that_a_model_knows(chat: Served, demo: Served, classes: Served) -> None:
    assert "German" in demo.client.get("/v1/state").json()["labels"]
    for server, predicts in ((chat, True), (classes, False)):
        state = server.client.get("/v1/state").json()
        assert (state["labels"], state["predicts_tokens"], state["ranks"]) == ([], predicts, [])


# A body for every route that computes something and does not occur in INVOCATIONS.
MORE_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"query": "a", "items": ["b"], "label_token_ids": [5]}, "/generative_scoring"),
    ({"query": "a", "documents": ["b"]}, "/v1/rerank"),
    ({"query": "a", "documents": ["b"]}, "/v2/rerank"),
    ({"input": "a"}, "/pooling"),
    ({"prompt": "a"}, "/tokenize"),
    ({"tokens": [5]}, "/detokenize"),
    ({"prompt": "a", "max_tokens": 1}, "/invocations"),
    ({"prompt": "a", "max_tokens": 1}, "/"),
]
BODIES_OF_CLASSIFIERS: list[tuple[dict[str, Any], str]] = [
    ({"input": "a"}, "/classify"),
    ({"input": "a"}, "/v1/classify"),
    ({"inputs": "a"}, "/predict"),
]


def test_every_route_answers(chat: Served, classes: Served) -> None:
    answered = {("GET", route.path) for route in ROUTES if route.method == "GET"} | {("POST", "/ping")}
    for method, path in answered:
        assert chat.client.request(method, with_values(path)).status_code == 200, (method, path)
    for server, bodies in ((chat, INVOCATIONS + MORE_BODIES), (classes, BODIES_OF_CLASSIFIERS)):
        for body, path in bodies:
            assert server.post(path, body), path
            answered.add(("POST", path))
    assert answered == {(route.method, route.path) for route in ROUTES}


@pytest.mark.parametrize(("body", "path"), INVOCATIONS)
@pytest.mark.parametrize("general", ["/invocations", "/"])
def test_an_invocation_calls_the_route_of_its_body(chat: Served, general: str, body: Any, path: str) -> None:
    invoked, direct = chat.post(general, body), chat.post(path, body)
    assert lasting(invoked) == lasting(direct)


def test_inputs_at_the_root_of_a_classifier_are_classified(classes: Served) -> None:
    body = {"inputs": ["a", "b"]}
    assert classes.post("/", body) == classes.post("/predict", body)


def test_an_invocation_that_matches_no_route_is_refused(chat: Served) -> None:
    assert "questions" in chat.refused("/invocations", {"x": 1})["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/decisions", DECISION),
        ("/v1/decisions", {"input": "a", "questions": [{"id": "q", "type": "yes_no", "question": "?"}]}),
        ("/v1/systemone", {"state": "a", "questions": {"q": {"type": "noul"}}}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1]}),
        ("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [1]}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ],
)
def test_a_model_that_predicts_no_tokens_says_so(classes: Served, path: str, body: Any) -> None:
    assert "no language-model head" in classes.refused(path, body)["message"]


def test_a_model_that_is_not_served_is_not_found(chat: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny' or 'alias'"):
        client.decisions.create(**DECISION | {"model": "gpt"})  # type: ignore[arg-type]


def test_unknown_routes_and_methods_have_error_replies(chat: Served) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/decisions", 405)):
        response = chat.client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["type"]


def test_the_document_describes_every_route(chat: Served) -> None:
    document = chat.client.get("/openapi.json").json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, route.path.replace(":path", "")) for route in ROUTES}
    text = json.dumps(document)
    for reference in {fragment.split('"')[0] for fragment in text.split('"#/components/schemas/')[1:]}:
        assert reference in document["components"]["schemas"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_names": ()},
        {"model_names": ("tiny", " ")},
        {"api_key": ""},
        {"api_key": "secret\n"},
        {"api_key": "sec\0ret"},
        {"api_key": " secret"},
        {"timeout_seconds": 0.0},
        {"timeout_seconds": float("nan")},
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ServerSettings(**{"model_names": ("tiny",)} | wrong)


@pytest.mark.slow
def test_a_batch_in_the_servers_process_is_answered_as_over_http(chat: Served, tmp_path: Path) -> None:
    bodies = [*INVOCATIONS, ({"prompt": "a", "max_tokens": 9}, "/v1/completions"), ({}, "/no/route")]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"custom_id": str(n), "method": "POST", "url": path, "body": body} for n, (body, path) in enumerate(bodies)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def ask(batch: Batch) -> None:
        transport = httpx.ASGITransport(create_app(chat.service))
        async with httpx.AsyncClient(base_url="http://here", transport=transport) as client:
            await batch.run(client, most_open=4, patience_seconds=60)

    with Batch(str(source), str(target)) as batch:
        asyncio.run(ask(batch))
    answers = {answer["custom_id"]: answer["response"] for answer in map(json.loads, target.open())}
    assert len(answers) == len(bodies)
    for number, (body, path) in enumerate(bodies):
        response, answer = chat.client.post(path, json=body), answers[str(number)]
        assert answer["status_code"] == response.status_code
        check_alike(lasting(answer["body"]), lasting(response.json()))
