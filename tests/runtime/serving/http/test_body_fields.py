"""Fields of other servers are used, or change nothing, or are refused by name; every field of a client is decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moepass.runtime.serving.http.server_routes import MODEL_ROUTES
from moepass.runtime.serving.routes import pooling, token_routes
from moepass.runtime.serving.routes.body_fields import BODIES, EVERY_BODY, ValueRule, rules_of
from moepass.runtime.serving.routes.chat import ChatMessage
from tests.helpers.serving import client_fields
from tests.helpers.serving.replies import check_alike, lasting
from tests.helpers.serving.served import Served

ROUTES = [*MODEL_ROUTES, *token_routes.ROUTES]
KINDS: dict[str, type[msgspec.Struct]] = {kind.__name__: kind for route in ROUTES for kind in route.bodies}
KINDS["ChatMessage"] = ChatMessage
CLIENTS: dict[str, Mapping[str, client_fields.Fields]] = {
    "openai": client_fields.openai_fields(),
    "cohere": client_fields.cohere_fields(),
    "Hugging Face": client_fields.hugging_face_fields(),
    "text-embeddings-inference": client_fields.TEI,
    "Jina": client_fields.JINA,
    "vLLM": client_fields.VLLM,
    "SGLang": client_fields.SGLANG,
    "transformers": client_fields.TRANSFORMERS,
}


@pytest.mark.parametrize(
    ("client", "kind"), [(client, kind) for client, fields in CLIENTS.items() for kind in sorted(fields)]
)
def test_every_field_of_a_client_is_decided(client: str, kind: str) -> None:
    undecided = CLIENTS[client][kind] - {*KINDS[kind].__struct_fields__, *rules_of(kind)}
    assert not undecided, f"decide these fields of {client} for {kind} in body_fields.py: {sorted(undecided)}"


def test_parameters_of_hugging_faces_client_are_used() -> None:
    assert client_fields.hugging_face_parameters() == {*pooling.PredictParameters.__struct_fields__}


def test_a_field_that_a_client_adds_is_undecided() -> None:
    assert "a_new_field" not in rules_of("RerankBody")
    assert {"max_tokens_per_doc", "rank_fields", "priority"} <= client_fields.cohere_fields()["RerankBody"]
    assert {"verbosity", "stream", "functions"} <= client_fields.openai_fields()["ChatBody"]
    assert {"truncate", "prompt_name"} <= client_fields.hugging_face_fields()["PlainBody"]


def test_rules_are_about_bodies_and_fields_that_exist() -> None:
    assert BODIES.keys() == KINDS.keys()
    defined = set().union(*(names for fields in CLIENTS.values() for names in fields.values()))
    assert {name for kind in KINDS for name in rules_of(kind)} <= defined


# The body of each type, the server that answers it, and its path.
BASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "CompletionBody": ("base", "/v1/completions", {"prompt": "a", "max_tokens": 1}),
    "ChatBody": ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    "DecisionsBody": (
        "chat",
        "/v1/decisions",
        {"model": "tiny", "input": "a", "questions": [{"type": "predicate", "instructions": "?"}]},
    ),
    "LabelledBody": (
        "chat",
        "/v1/decisions",
        {"input": "a", "questions": [{"id": "q", "type": "yes_no", "question": "?"}]},
    ),
    "SystemoneBody": ("chat", "/v1/systemone", {"state": "a", "questions": {"q": {"type": "noul"}}}),
    "LabelScoreBody": ("base", "/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [5]}),
    "GenerativeBody": ("base", "/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [5]}),
    "PairScoreBody": ("chat", "/score", {"queries": "a", "documents": ["b"]}),
    "RerankBody": ("chat", "/rerank", {"query": "a", "documents": ["b"]}),
    "EmbeddingBody": ("base", "/v1/embeddings", {"input": "a"}),
    "PlainBody": ("base", "/embed", {"inputs": "a"}),
    "ClassifyBody": ("classes", "/classify", {"input": "a"}),
    "PoolingBody": ("base", "/pooling", {"input": "a"}),
    "PredictBody": ("classes", "/predict", {"inputs": "a"}),
    "TokenizeBody": ("base", "/tokenize", {"prompt": "a"}),
    "DetokenizeBody": ("base", "/detokenize", {"tokens": [5]}),
}


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> dict[str, Served]:
    return {name: request.getfixturevalue(name) for name in ("base", "chat", "classes")}


@pytest.mark.parametrize("kind", BASES)
def test_rules_hold(servers: dict[str, Served], kind: str) -> None:
    """A request with all values that change nothing is answered as without them; each other value is refused."""
    server, path, body = BASES[kind]
    neutral = lasting(servers[server].post(path, body), "usage")
    rules = {name: rule for name, rule in rules_of(kind).items() if name not in KINDS[kind].__struct_fields__}
    longest = max(len(rule.values or ()) for rule in rules.values())
    for number in range(-1, longest):
        values = {name: _accepted(rule, number) for name, rule in rules.items()}
        check_alike(lasting(servers[server].post(path, body | values), "usage"), neutral)
    for name, rule in rules.items():
        if rule.values is not None:
            error = servers[server].refused(path, body | {name: ["surprising"]})
            assert error["param"] == name
            assert error["message"].startswith(f'{name} is ["surprising"], but ')


def _accepted(rule: ValueRule, number: int) -> Any:
    if rule.values is None:
        return "anything"
    return None if number < 0 or not rule.values else rule.values[min(number, len(rule.values) - 1)]


PAIR = ("/rerank", {"query": "a", "documents": ["b"]})
TEXTS = ("/rerank", {"query": "a", "texts": ["b"]})
SCORE = ("/score", {"queries": "a", "documents": ["b"]})
EMBED = ("/v1/embeddings", {"input": "a"})
PLAIN = ("/embed", {"inputs": "a"})
POOL = ("/pooling", {"input": "a"})
COMPLETE = ("/v1/completions", {"prompt": "a", "max_tokens": 1})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
REFUSED: list[tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = [
    *((PAIR, {name: "Find it"}) for name in ("instruct", "instruction")),
    *((TEXTS, {name: "Find it"}) for name in ("instruct", "instruction")),
    (SCORE, {"instruction": "Find it"}),
    (PAIR, {"max_tokens_per_doc": -1}),
    (PAIR, {"max_chunks_per_doc": 1}),
    (PAIR, {"rank_fields": ["title"]}),
    (PAIR, {"top_k": 1}),
    (PAIR, {"truncation": True}),
    (PAIR, {"max_doc_length": 5}),
    (PAIR, {"truncate": "MIDDLE"}),
    (PAIR, {"truncate_prompt_tokens": 0}),
    (PAIR, {"truncate_prompt_tokens": -2}),
    (PAIR, {"truncation_side": "left", "truncation_direction": "Right"}),
    (PAIR, {"truncate": "START", "truncation_direction": "right"}),
    (PAIR, {"softmax": False}),
    (PAIR, {"chat_template": "{{ query }}"}),
    (PAIR, {"chat_template_kwargs": {"instruction": "Find it"}}),
    (PAIR, {"add_special_tokens": False}),
    (PAIR, {"padding": "max_length"}),
    (PAIR, {"return_embeddings": True}),
    (TEXTS, {"texts": ["b"], "documents": ["b"]}),
    (EMBED, {"prompt_name": "query"}),
    (EMBED, {"input_type": "search_query"}),
    (EMBED, {"task": "retrieval.query"}),
    (EMBED, {"embedding_type": "binary"}),
    (EMBED, {"embedding_types": ["int8"]}),
    (EMBED, {"embedding_types": ["float", "int8"]}),
    (EMBED, {"late_chunking": True}),
    (EMBED, {"max_tokens": 1}),
    (EMBED, {"output_dimension": 8}),
    (EMBED, {"embed_dtype": "float16"}),
    (EMBED, {"endianness": "big"}),
    (EMBED, {"messages": [{"role": "user", "content": "a"}]}),
    (EMBED, {"lora_path": "adapter"}),
    (EMBED, {"instruction": "Find it"}),
    (EMBED, {"images": ["data:image/png;base64,"]}),
    (EMBED, {"chat_template": "x"}),
    (PLAIN, {"prompt_name": "query"}),
    (PLAIN, {"encoding_format": "base64"}),
    (PLAIN, {"parameters": {"max_new_tokens": 5}}),
    (POOL, {"activation": False}),
    (COMPLETE, {"regex": "a+"}),
    (COMPLETE, {"json_schema": "{}"}),
    (COMPLETE, {"response_format": {"type": "json_object"}}),
    (COMPLETE, {"lora_path": "adapter"}),
    (COMPLETE, {"prompt_embeds": "AAAA"}),
    (COMPLETE, {"ebnf": "root ::= x"}),
    (COMPLETE, {"min_tokens": 1}),
    (COMPLETE, {"repetition_penalty": 1.2}),
    (COMPLETE, {"logprob_token_ids": [5]}),
    (COMPLETE, {"use_beam_search": True}),
    (COMPLETE, {"stop_token_ids": [5]}),
    (COMPLETE, {"custom_logit_processor": "x"}),
    (COMPLETE, {"session_params": {"id": "a"}}),
    (COMPLETE, {"return_hidden_states": True}),
    (COMPLETE, {"thinking_token_budget": 0}),
    (COMPLETE, {"vllm_xargs": {"a": 1}}),
    (COMPLETE, {"n": True}),
    (CHAT, {"reasoning_effort": "high"}),
    (CHAT, {"documents": [{"text": "a"}]}),
    (CHAT, {"functions": [{"name": "f"}]}),
    (CHAT, {"function_call": {"name": "f"}}),
    (CHAT, {"tool_choice": "required"}),
    (CHAT, {"reasoning": {"effort": "high"}}),
    (CHAT, {"input_ids": [5]}),
    (CHAT, {"task": "domain"}),
    (CHAT, {"add_special_tokens": True}),
    (CHAT, {"echo": True}),
    (CHAT, {"modalities": ["audio"]}),
    (CHAT, {"verbosity": "low"}),
    (CHAT, {"web_search_options": {}}),
    (CHAT, {"tool_prompt": "Use tools"}),
    (CHAT, {"regex": "a+"}),
    (CHAT, {"repetition_penalty": 2}),
    (("/v1/score", BASES["LabelScoreBody"][2]), {"truncate_prompt_tokens": 1}),
    (("/v1/score", BASES["LabelScoreBody"][2]), {"use_activation": False}),
    (("/v1/score", BASES["LabelScoreBody"][2]), {"instruction": "Find it"}),
    (("/v1/score", BASES["LabelScoreBody"][2]), {"return_pooled_hidden_states": True}),
    (("/generative_scoring", BASES["GenerativeBody"][2]), {"temperature": 0.5}),
    (("/generative_scoring", BASES["GenerativeBody"][2]), {"top_k": 2}),
    (("/tokenize", {"prompt": "a"}), {"tools": [{}]}),
    (("/tokenize", {"messages": [{"role": "user", "content": "a"}]}), {"add_special_tokens": True}),
    (("/tokenize", {"prompt": "a"}), {"prompt_name": "query"}),
    (("/invocations", COMPLETE[1]), {"regex": "a+"}),
    (("/", PLAIN[1]), {"prompt_name": "query"}),
]  # fmt: skip


@pytest.mark.parametrize(("request_body", "change"), REFUSED, ids=[f"{path} {change}" for (path, _), change in REFUSED])
def test_fields_that_would_change_the_results_are_refused(
    chat: Served, request_body: tuple[str, dict[str, Any]], change: dict[str, Any]
) -> None:
    path, body = request_body
    assert chat.refused(path, body | change)["param"] in (*change, "documents")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_calls": [{"id": "a"}]}, "messages[1].tool_calls"),
        ({"tool_call_id": "a"}, "messages[1].tool_call_id"),
        ({"function_call": {"name": "f"}}, "messages[1].function_call"),
        ({"reasoning_content": "so"}, "messages[1].reasoning_content"),
        ({"refusal": "no"}, "messages[1].refusal"),
        ({"tool_calls": None, "refusal": None, "audio": None, "of_another_server": 1}, None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_fields_of_messages_are_checked(chat: Served, path: str, change: dict[str, Any], param: str | None) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"} | change]
    body = {"messages": messages} | ({"max_tokens": 1} if path != "/tokenize" else {})
    if param is None:
        chat.post(path, body)
    else:
        assert chat.refused(path, body)["param"] == param


def test_an_error_shows_the_value_and_what_to_do(chat: Served) -> None:
    path, body = COMPLETE
    assert chat.refused(path, body | {"n": 2})["message"] == (
        "n is 2, but only the most likely token is returned; send 1, or remove it"
    )
    assert chat.refused(path, body | {"regex": "a" * 100})["message"] == (
        f"regex is \"{'a' * 59}…, but the model's probabilities are returned unchanged; remove it"
    )
    message = chat.refused("/v1/embeddings", {"input": "a", "prompt_name": "query"})["message"]
    assert message == "this checkpoint has no prompt 'query'; prompt_name must be left out, because it has none"


def test_fields_that_nobody_defines_are_ignored(chat: Served) -> None:
    for path, body in (PAIR, TEXTS, SCORE, EMBED, PLAIN, POOL, COMPLETE, CHAT):
        unchanged = lasting(chat.post(path, body), "usage")
        check_alike(lasting(chat.post(path, body | {"of_another_server": 7}), "usage"), unchanged)


def table() -> str:
    """Return the table of all fields in docs/api.md."""
    routes: dict[str, list[str]] = {}
    for route in ROUTES:
        for kind in route.bodies:
            routes.setdefault(kind.__name__, []).append(route.path)
    routes["ChatMessage"] = ["`messages` of `/v1/chat/completions`, `/tokenize`"]
    lines = [
        "| body | used | change nothing | only these values, or null | refused |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines.append(_row("all", (), EVERY_BODY))
    for kind, paths in routes.items():
        shown = paths[0] if kind == "ChatMessage" else ", ".join(f"`{path}`" for path in paths)
        first = f"{shown} (`{_MARKS[kind]}`)" if kind in _MARKS else shown
        used = KINDS[kind].__struct_fields__
        lines.append(_row(first, used, {name: rule for name, rule in BODIES[kind].items() if name not in used}))
    return "\n".join(lines)


# Fields that distinguish the bodies of a route.
_MARKS = {
    "DecisionsBody": "instructions",
    "LabelledBody": "id",
    "LabelScoreBody": "label_token_ids",
    "PairScoreBody": "queries",
}


def _row(first: str, used: tuple[str, ...], rules: Mapping[str, ValueRule]) -> str:
    def cells() -> Iterator[str]:
        yield first
        yield _names(used)
        yield _names(name for name, rule in rules.items() if rule.values is None)
        yield ", ".join(
            f"`{name}`: {' or '.join(f'`{msgspec.json.encode(value).decode()}`' for value in rule.values)}"
            for name, rule in sorted(rules.items())
            if rule.values
        )
        yield _names(name for name, rule in rules.items() if rule.values == ())

    return f"| {' | '.join(cells())} |"


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def test_the_documentation_contains_the_table_of_fields() -> None:
    page = Path(__file__).resolve().parents[4] / "docs" / "api.md"
    assert table() in page.read_text(encoding="utf-8"), table()
