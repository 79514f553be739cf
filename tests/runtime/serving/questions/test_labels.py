"""Labels of any number of tokens are scored as a plain loop over full sequences scores them."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from moepass.models.checkpoint.checkpoint_folders import Prompt, load_tokenizer, resolve_model
from moepass.models.checkpoint.load_model import load_model
from moepass.models.errors import CheckpointError, InputError
from moepass.models.limits import MOST_LABELS, TooLargeError
from moepass.runtime.serving.questions.labels import (
    ImpossibleLabelsError,
    ask_labels,
    encode_labels,
    label_warnings,
    score_labels,
)
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.questions.request_tree import RequestTree, TreeAnswer
from tests.helpers.graphs.error_fields import refused
from tests.helpers.graphs.tiny_checkpoint import save_tiny_checkpoint
from tests.helpers.serving.plain_scores import label_log_probability
from tests.helpers.serving.reference_backend import ReferenceBackend

# Labels of one and of several tokens, one that starts with another label, and two with a common first token.
LABELS = ["yes", "no", "maybe good", "good dog park", "yes dog", "good bad"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def writer(checkpoint: Path) -> PromptWriter:
    return PromptWriter(load_tokenizer(checkpoint), Prompt("{text}<sep>"), 64)


def test_labels_are_scored_exactly(checkpoint: Path, writer: PromptWriter) -> None:
    model = load_model(checkpoint)
    rendered = writer.ask("the cat sat on the mat")
    (prompt,) = writer.encode([rendered])
    labels = encode_labels(writer.encoder, rendered, LABELS)
    assert {len(label) for label in labels} > {1}
    tree = RequestTree(64)
    reads = ask_labels(tree, prompt, labels, "the text")
    answer = asyncio.run(ReferenceBackend(model).answer(tree.request("r"), timeout_seconds=9))
    scores = reads.scores(TreeAnswer(tree, answer))
    expected = [label_log_probability(model, prompt.tolist(), label) for label in labels]
    assert scores.log_probabilities == pytest.approx(expected, abs=1e-5)
    weights = [math.exp(value) for value in expected]
    assert scores.probabilities == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-5)
    assert scores.mass == pytest.approx(sum(weights) - weights[LABELS.index("yes dog")], rel=1e-4)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ([], "no labels"),
        (["yes", "yes"], "occurs twice"),
        (["yes", " yes"], "same tokens"),
        (["yes", " "], "has no tokens"),
    ],
)
def test_labels_that_cannot_be_distinguished_are_refused(writer: PromptWriter, labels: list[str], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        encode_labels(writer.encoder, "x<sep>", labels)


def test_a_label_that_would_change_the_prompt_is_encoded_alone(writer: PromptWriter) -> None:
    assert writer.encoder.names(encode_labels(writer.encoder, "the ye", ["s"])[0]) == ["s"]
    (warning,) = label_warnings(writer.encoder, "the ye", ["s"])
    assert "changes the last token of the prompt" in warning


def test_too_many_labels_are_refused(writer: PromptWriter) -> None:
    labels = [f"yes {number}" for number in range(MOST_LABELS + 1)]
    with refused(TooLargeError, value=MOST_LABELS + 1, expected=MOST_LABELS):
        encode_labels(writer.encoder, "x", labels)


def test_a_label_that_lacks_its_blank_is_named_with_its_tokens() -> None:
    folder = resolve_model("demo")
    writer = PromptWriter(load_tokenizer(folder), Prompt("{text}"), 512)
    (warning,) = label_warnings(writer.encoder, "it is:", ["the"])
    assert "['t', 'he']" in warning
    assert "['Ġthe']" in warning
    assert label_warnings(writer.encoder, "it is:", [" the"]) == []


def test_a_label_that_begins_with_another_counts_once() -> None:
    scores = score_labels([(1,), (1, 2), (3,)], [math.log(0.5), math.log(0.2), math.log(0.25)])
    assert scores.mass == pytest.approx(0.75)
    assert sum(scores.probabilities) == pytest.approx(1)


def test_labels_that_are_all_impossible_are_an_error() -> None:
    assert score_labels([(1,), (2,)], [-math.inf, 0.0]).probabilities == (0.0, 1.0)
    with pytest.raises(ImpossibleLabelsError, match="probability 0"):
        score_labels([(1,), (2,)], [-math.inf, -math.inf])


def test_inserted_texts_may_contain_the_placeholders(checkpoint: Path) -> None:
    prompt = Prompt(pair_template="q: {query} d: {document}")
    assert prompt.render_pair("{document}", "{query}") == "q: {document} d: {query}"


def test_a_conversation_needs_a_chat_template(writer: PromptWriter) -> None:
    with pytest.raises(InputError, match="no chat template"):
        writer.chat([{"role": "user", "content": "x"}])


def test_the_error_of_a_template_is_the_reason(checkpoint: Path) -> None:
    tokenizer: Any = load_tokenizer(checkpoint)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="roles must alternate"):
        PromptWriter(tokenizer, Prompt(), 64).ask("x")


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{{ undefined.role }}", "template fails"), ("{{ messages[0].role }}: ", "omits the text")],
)
def test_check_finds_a_wrong_template(checkpoint: Path, template: str, reason: str) -> None:
    tokenizer: Any = load_tokenizer(checkpoint)
    PromptWriter(tokenizer, Prompt("{text}<sep>"), 64).check()
    tokenizer.chat_template = template
    with pytest.raises(CheckpointError, match=reason):
        PromptWriter(tokenizer, Prompt(), 64).check()


def test_a_text_that_cannot_fit_is_refused_before_encoding(writer: PromptWriter) -> None:
    with pytest.raises(TooLargeError, match="in characters"):
        writer.ask("x" * 10_000_000)
