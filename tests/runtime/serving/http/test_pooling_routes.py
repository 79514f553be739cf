"""Classes and embeddings equal the outputs of the model's head."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import TextClassificationPipeline

from moepass.models.checkpoint.checkpoint_folders import Prompt
from tests.helpers.graphs.tiny_checkpoint import broken_copy
from tests.helpers.serving.byte_checkpoint import CONTROL_TOKENS, classifier
from tests.helpers.serving.plain_scores import label_probabilities
from tests.helpers.serving.served import Served, served

TEXTS = ["The cat sat on the mat", "a dog"]
PAIRS = [(TEXTS[0],), tuple(TEXTS)]
PAD = CONTROL_TOKENS.index("<|pad|>")


def append_padding(folder: Path) -> None:
    """Let the tokenizer of a checkpoint append its padding token to every text."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|pad|>", pair="$A <sep> $B <|pad|>", special_tokens=[("<|pad|>", PAD), ("<sep>", PAD + 1)]
    )
    tokenizer.save(str(path))


def _state(server: Served, text: str) -> torch.Tensor:
    ids = torch.tensor([server.writer.tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return server.backend.model(ids, output_hidden_states=True).hidden_states[-1][0]


def _classes(server: Served, text: str) -> torch.Tensor:
    ids = torch.tensor([server.writer.tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return server.backend.model(ids, attention_mask=torch.ones_like(ids)).logits[0]


def test_openais_client_gets_embeddings(base: Served) -> None:
    with openai.OpenAI(base_url=f"{base.url}/v1", api_key="any") as client:
        reply = client.embeddings.create(model="tiny", input=TEXTS)  # the client requests base64 and decodes it
    for text, entry in zip(TEXTS, reply.data, strict=True):
        expected = torch.nn.functional.normalize(_state(base, text)[-1], dim=0)
        assert entry.embedding == pytest.approx(expected.tolist(), abs=1e-4)
    tokens = [base.writer.tokenizer(text)["input_ids"] for text in TEXTS]
    again = base.post("/v1/embeddings", {"input": tokens, "encoding_format": "float"})
    assert again["data"][1]["embedding"] == pytest.approx(reply.data[1].embedding, abs=1e-6)


def test_embeddings_may_be_returned_unnormalised(base: Served) -> None:
    (reply,) = base.post("/embed", {"inputs": TEXTS[0], "normalize": False})
    assert reply == pytest.approx(_state(base, TEXTS[0])[-1].tolist(), abs=1e-4)
    (normalised,) = base.post("/embed", {"inputs": [TEXTS[0]]})
    assert float(np.linalg.norm(normalised)) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_a_checkpoint_may_ask_for_the_mean(checkpoint: Any) -> None:
    with served(checkpoint, prompt=Prompt(vector="mean")) as running:
        (vector,) = running.post("/embed", {"inputs": TEXTS[0], "normalize": False})
        assert vector == pytest.approx(_state(running, TEXTS[0]).mean(0).tolist(), abs=1e-4)


def test_pooling_returns_the_output_of_the_models_head(base: Served, classes: Served) -> None:
    (entry,) = base.post("/pooling", {"input": TEXTS[0], "encoding_format": "base64", "task": "embed"})["data"]
    vector = np.frombuffer(base64.b64decode(entry["data"]), "<f4")
    assert vector.tolist() == pytest.approx(base.post("/embed", {"inputs": TEXTS[0]})[0], abs=1e-6)
    (entry,) = classes.post("/pooling", {"input": TEXTS[0]})["data"]
    assert entry["data"] == pytest.approx(_classes(classes, TEXTS[0]).softmax(-1).tolist(), abs=1e-4)
    assert base.refused("/pooling", {"input": "a", "task": "classify"})["param"] == "task"


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_texts_are_classified(classes: Served, path: str) -> None:
    replies = classes.post(path, {"input": TEXTS})["data"]
    for text, entry in zip(TEXTS, replies, strict=True):
        expected = _classes(classes, text).softmax(-1)
        assert entry["probs"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert entry["label"] == ("bad", "good", "neither")[int(expected.argmax())]
        assert entry["num_classes"] == 3


@pytest.mark.parametrize(
    ("problem_type", "classes"),
    [
        ("multi_label_classification", 3),
        ("multi_label_classification", 1),
        ("single_label_classification", 3),
        ("regression", 1),
        ("regression", 3),
        (None, 1),
        (None, 2),
    ],
)
def test_classes_are_those_of_the_pipeline_of_transformers(
    problem_type: str | None, classes: int, checkpoint: Path
) -> None:
    model, names = classifier(classes), tuple(f"LABEL_{number}" for number in range(classes))
    model.config.problem_type = problem_type
    with served(checkpoint, model=model, class_names=names) as running:
        pipeline = TextClassificationPipeline(model=model, tokenizer=running.writer.tokenizer)
        expected = {entry["label"]: entry["score"] for entry in pipeline(TEXTS[0], top_k=None)}
        values = [expected[name] for name in names]
        (classified,) = running.post("/classify", {"input": TEXTS[0]})["data"]
        assert classified["probs"] == pytest.approx(values, abs=1e-5)
        assert classified["label"] == max(expected, key=expected.__getitem__)
        (pooled,) = running.post("/pooling", {"input": TEXTS[0]})["data"]
        assert pooled["data"] == pytest.approx(values, abs=1e-5)
        for entry in running.post("/predict", {"inputs": TEXTS[0]}):
            assert entry["score"] == pytest.approx(expected[entry["label"]], abs=1e-5)


@pytest.mark.parametrize(
    "ids",
    [[9, 8], [9, 8, PAD], [9, 8, *[PAD] * 40], [PAD, 9, 8], [9, PAD, 8, PAD], [*range(50, 90), PAD], [PAD], [PAD, PAD]],
)
def test_classes_are_read_at_the_last_token_that_is_not_padding(classes: Served, ids: list[int]) -> None:
    with torch.no_grad():
        expected = classes.backend.model(torch.tensor([ids])).logits[0].softmax(-1).tolist()
    # The same sequence without padding may be in the cache, and the other sequence shares a prefix.
    replies = classes.post("/classify", {"input": [ids, [*ids[:1], 7], ids]})["data"]
    assert [entry["probs"] for entry in replies[::2]] == [pytest.approx(expected, abs=1e-5)] * 2
    (entry,) = classes.post("/pooling", {"input": ids})["data"]
    assert entry["data"] == pytest.approx(expected, abs=1e-5)


def test_classes_of_texts_whose_tokenizer_appends_its_padding_are_those_of_transformers(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Qwen's embedding tokenizers end texts with <|endoftext|>, which is the token that pads them."""
    folder = broken_copy(checkpoint, tmp_path / "appends", append_padding)
    with served(folder, model=classifier(1), class_names=("relevance",)) as running:
        model, tokenizer = running.backend.model, running.writer.tokenizer
        assert tokenizer("a")["input_ids"][-1] == PAD
        with torch.no_grad():
            values = [model(**tokenizer(*texts, return_tensors="pt")).logits.sigmoid().item() for texts in PAIRS]
        (classified,) = running.post("/classify", {"input": PAIRS[0][0]})["data"]
        assert classified["probs"] == pytest.approx(values[:1], abs=1e-5)
        (predicted,) = running.post("/predict", {"inputs": PAIRS[0][0]})
        assert predicted["score"] == pytest.approx(values[0], abs=1e-5)
        query, document = PAIRS[1]
        (ranked,) = running.post("/rerank", {"query": query, "documents": [document]})["results"]
        assert ranked["relevance_score"] == pytest.approx(values[1], abs=1e-5)


@pytest.mark.slow
def test_labels_of_a_checkpoint_are_classes(demo: Served) -> None:
    text = "Das ist gut so."
    (entry,) = demo.post("/classify", {"input": text})["data"]
    tokenizer, labels = demo.writer.tokenizer, demo.writer.prompt.labels
    ids = [[tokenizer.convert_tokens_to_ids(label)] for label in labels]
    expected = label_probabilities(demo.backend.model, tokenizer(f"{text}<sep>")["input_ids"], ids)
    assert entry["probs"] == pytest.approx(expected, abs=1e-4)
    likeliest = labels[expected.index(max(expected))]
    assert entry["label"] == likeliest
    (best, *_) = demo.post("/predict", {"inputs": text})
    assert (best["label"], best["score"]) == (likeliest, pytest.approx(max(expected), abs=1e-4))


def test_predictions_come_best_first(classes: Served) -> None:
    single = classes.post("/predict", {"inputs": TEXTS[0]})
    assert [entry["score"] for entry in single] == sorted((entry["score"] for entry in single), reverse=True)
    batch = classes.post("/predict", {"inputs": [[TEXTS[0]], [TEXTS[1]]]})
    assert batch[0] == single
    raw = classes.post("/predict", {"inputs": TEXTS[0], "raw_scores": True})
    assert [entry["score"] for entry in raw] == pytest.approx(
        sorted(_classes(classes, TEXTS[0]).tolist(), reverse=True), abs=1e-4
    )
    pair = classes.post("/predict", {"inputs": TEXTS})
    ids = torch.tensor([classes.writer.tokenizer(*TEXTS)["input_ids"]])
    with torch.no_grad():
        expected = classes.backend.model(ids, attention_mask=torch.ones_like(ids)).logits[0].softmax(-1)
    assert [entry["score"] for entry in pair] == pytest.approx(sorted(expected.tolist(), reverse=True), abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [[1], "a"]}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/embed", {"inputs": [9999]}, "inputs"),
        ("/embed", {"inputs": ["a", ""]}, "inputs[1]"),
        ("/classify", {"input": "a"}, "model"),
        ("/predict", {"inputs": []}, "inputs"),
        ("/predict", {"inputs": ["a", "b", "c"]}, "inputs"),
        ("/predict", {"inputs": ["a", ["b"]]}, "inputs"),
        ("/predict", {"inputs": ["a", "b"]}, "inputs"),
    ],
)
def test_invalid_pooling_requests_are_refused_with_their_field(base: Served, path: str, body: Any, param: str) -> None:
    assert base.refused(path, body)["param"] == param


def test_a_classifier_gives_no_embeddings(classes: Served) -> None:
    assert "ask /classify" in classes.refused("/v1/embeddings", {"input": "a"})["message"]
