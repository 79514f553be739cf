"""/score, /generative_scoring and /rerank give the probabilities of plain transformers."""

from __future__ import annotations

import math
from typing import Any

import cohere
import pytest
import torch

from moepass.models.checkpoint.checkpoint_folders import Prompt
from tests.helpers.serving.plain_scores import label_probabilities, next_token_table
from tests.helpers.serving.served import Served, served

LABELS = [70, 80, 90]


def _next(server: Served, text: str) -> list[float]:
    tokens = server.writer.tokenizer(text)["input_ids"]
    return [math.exp(float(next_token_table(server.backend.model, tokens)[-1, token])) for token in LABELS]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("item_first", [False, True])
def test_label_tokens_have_their_own_probabilities(base: Served, path: str, item_first: bool) -> None:
    items = ["the dog", "", " ran"]
    body = {"query": "a cat and ", "items": items, "label_token_ids": LABELS, "item_first": item_first, "unknown": 1}
    reply = base.post(path, body)
    expected = [_next(base, item + "a cat and " if item_first else "a cat and " + item) for item in items]
    for scores, mass, right in zip(reply["scores"], reply["label_masses"], expected, strict=True):
        assert scores == pytest.approx(right, abs=1e-4)
        assert mass == pytest.approx(sum(right), abs=1e-4)
    shares = base.post(path, body | {"apply_softmax": True})["scores"]
    for scores, right in zip(shares, expected, strict=True):
        assert scores == pytest.approx([value / sum(right) for value in right], abs=1e-4)


def test_items_share_their_query(base: Served) -> None:
    query = "the cat sat on the mat and " * 20
    reply = base.post("/v1/score", {"query": query, "items": ["a", "b", "c"], "label_token_ids": LABELS})
    assert len(base.backend.requests[-1].pieces) >= 3
    assert reply["usage"]["prompt_tokens"] < 2 * len(base.writer.tokenizer(query)["input_ids"])


def test_token_ids_are_scored_as_they_are(base: Served) -> None:
    reply = base.post("/v1/score", {"query": [7, 8], "items": [[9], [10, 11]], "label_token_ids": LABELS})
    for item, scores in zip(([9], [10, 11]), reply["scores"], strict=True):
        table = next_token_table(base.backend.model, [7, 8, *item])
        assert scores == pytest.approx([math.exp(float(table[-1, token])) for token in LABELS], abs=1e-4)


def test_generative_scoring_gives_the_share_of_the_first_label(base: Served) -> None:
    reply = base.post("/generative_scoring", {"query": "is ", "items": ["a", "b"], "label_token_ids": LABELS[:2]})
    for index, item in enumerate("ab"):
        expected = _next(base, f"is {item}")[:2]
        assert reply["data"][index]["score"] == pytest.approx(expected[0] / sum(expected), abs=1e-4)
        assert reply["data"][index]["index"] == index


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [5, 5]}, "label_token_ids"),
        ({"label_token_ids": [512]}, "label_token_ids"),
        ({"label_token_ids": [-1]}, "label_token_ids"),
        ({"items": []}, "items"),
        ({"items": [[1]]}, "items"),
        ({"query": [1]}, "items"),
        ({"query": [999], "items": [[1]]}, "query"),
        ({"query": [], "items": [[]]}, "items[0]"),
        ({"query": None}, "query"),
    ],
)
def test_invalid_score_requests_are_refused_with_their_field(base: Served, change: dict[str, Any], param: str) -> None:
    body = {"query": "a", "items": ["b"], "label_token_ids": LABELS}
    assert base.refused("/v1/score", body | change)["param"] == param


def _relevance(server: Served, query: str, document: str) -> float:
    tokenizer = server.writer.tokenizer
    text = (
        f"<|user|>Query: {query}\nDocument: {document}\n\nIs the document relevant to the query?\n"
        "Answer Yes or No only.<|end|><|assistant|>"
    )
    labels = [tokenizer(label)["input_ids"] for label in ("Yes", "No")]
    return label_probabilities(server.backend.model, tokenizer(text)["input_ids"], labels)[0]


DOCUMENTS = ["a dog ran", "the cat sat", "for i in range"]


@pytest.mark.slow
def test_coheres_client_gets_documents_by_relevance(chat: Served) -> None:
    client = cohere.ClientV2(api_key="any", base_url=chat.url)
    reply = client.rerank(model="tiny", query="which animal?", documents=DOCUMENTS, top_n=2)
    expected = sorted(
        ((_relevance(chat, "which animal?", text), index) for index, text in enumerate(DOCUMENTS)), reverse=True
    )
    assert [result.index for result in reply.results] == [index for _, index in expected[:2]]
    assert [result.relevance_score for result in reply.results] == pytest.approx(
        [score for score, _ in expected[:2]], abs=1e-4
    )


def test_texts_are_ranked_as_a_list(chat: Served) -> None:
    reply = chat.post("/rerank", {"query": "q", "texts": DOCUMENTS, "return_text": True})
    assert sorted(entry["index"] for entry in reply) == [0, 1, 2]
    assert [entry["score"] for entry in reply] == sorted((entry["score"] for entry in reply), reverse=True)
    for entry in reply:
        assert entry["text"] == DOCUMENTS[entry["index"]]
        assert entry["score"] == pytest.approx(_relevance(chat, "q", entry["text"]), abs=1e-4)


def test_jinas_documents_come_back(chat: Served) -> None:
    body = {"query": "q", "documents": [{"text": "a"}, "b"], "return_documents": True, "top_n": 0}
    reply = chat.post("/v1/rerank", body)["results"]
    assert {entry["document"]["text"] for entry in reply} == {"a", "b"}


def test_one_query_or_several_are_scored_with_documents(chat: Served) -> None:
    single = chat.post("/score", {"queries": "q", "documents": DOCUMENTS})["data"]
    several = chat.post("/score", {"text_1": ["q", "r", "q"], "text_2": DOCUMENTS})["data"]
    assert [entry["score"] for entry in single] == pytest.approx(
        [_relevance(chat, "q", text) for text in DOCUMENTS], abs=1e-4
    )
    assert several[0]["score"] == pytest.approx(single[0]["score"], abs=1e-6)
    assert several[1]["score"] == pytest.approx(_relevance(chat, "r", DOCUMENTS[1]), abs=1e-4)
    assert chat.refused("/score", {"queries": ["q", "r"], "documents": DOCUMENTS})["param"] == "queries"
    assert chat.refused("/score", {"queries": "q"})["param"] == "queries"


def test_a_model_with_one_output_scores_pairs_with_it(reward: Served) -> None:
    reply = reward.post("/rerank", {"query": "q", "documents": DOCUMENTS})["results"]
    for result in reply:
        tokens = reward.writer.tokenizer("q", DOCUMENTS[result["index"]])["input_ids"]
        ids = torch.tensor([tokens])
        with torch.no_grad():
            logit = float(reward.backend.model(ids, attention_mask=torch.ones_like(ids)).logits[0, 0])
        assert result["relevance_score"] == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-4)


@pytest.mark.slow
def test_models_that_cannot_compare_texts_say_so(demo: Served, classes: Served) -> None:
    assert "pair_template" in demo.refused("/rerank", {"query": "a", "documents": ["b"]})["message"]
    assert "3 classes" in classes.refused("/rerank", {"query": "a", "documents": ["b"]})["message"]
    assert (
        "no language-model head"
        in classes.refused("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1]})["message"]
    )


@pytest.mark.slow
def test_a_checkpoints_own_template_of_pairs_is_used(checkpoint: Any) -> None:
    prompt = Prompt(pair_template="<|user|>{query} <sep> {document}<|end|>", pair_labels=("yes", "no"))
    with served(checkpoint, prompt=prompt) as running:
        (reply,) = running.post("/rerank", {"query": "a<sep>", "documents": ["b"]})["results"]
        tokenizer = running.writer.tokenizer
        control = running.writer.encoder.control_tokens
        tokens = running.backend.requests[-1].pieces[0].tokens.tolist()
        assert [control[token] for token in tokens if token in control] == ["<|user|>", "<sep>", "<|end|>"]
        labels = [tokenizer(label)["input_ids"] for label in ("yes", "no")]
        assert reply["relevance_score"] == pytest.approx(
            label_probabilities(running.backend.model, tokens, labels)[0], abs=1e-4
        )


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"documents": []}, "documents"),
        ({"top_n": -1}, "top_n"),
        ({"relevant_spans": {}}, None),
        ({"relevant_spans": {"a": 1}}, "relevant_spans"),
        ({"query": 1}, "query"),
    ],
)
def test_invalid_rerank_requests_are_refused_with_their_field(
    chat: Served, change: dict[str, Any], param: str | None
) -> None:
    body = {"query": "a", "documents": ["b"]} | change
    if param is None:
        chat.post("/rerank", body)
    else:
        assert chat.refused("/rerank", body)["param"] == param
