"""Scores are what a plain loop over single texts gives, whatever the batches, and come in the order of the texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from error_fields import refused
from tiny_checkpoint import save_tiny_checkpoint
from torch import nn

import moepass
from moepass import InputError
from moepass.models.checkpoint.checkpoint_folders import Prompt, load_model, load_prompt, load_tokenizer
from moepass.models.testing.tiny import tiny_model
from moepass.runtime.ranks.rendezvous import PeerError
from moepass.runtime.serving.scoring import PromptModel, Score, Scorer

TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "x",
    "this is a film yes yes yes yes",
    "park",
    "the dog ran to a cat",
    "mat on",
]
# One token each; of several tokens; one that begins with another; one that shares a beginning with another.
EAGER = {"lower": "eager"}
LABELS = ["yes", "no", "maybe good", "good dog park", "yes dog", "good bad"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def scorer(checkpoint: Path) -> Scorer:
    return Scorer.of(load_model(checkpoint), load_tokenizer(checkpoint), Prompt("{text}<sep>"))


def _reference(scorer: Scorer, model: Any, text: str, labels: Sequence[str]) -> tuple[dict[str, float], float]:
    """One text, one label, one forward without padding at a time, on all logits."""
    sums = {}
    prompt = scorer.tokenizer(scorer.prompt.render(text))["input_ids"]
    for label in labels:
        tokens = scorer.tokenizer(label, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0].double().log_softmax(-1)
        sums[label] = sum(float(logits[len(prompt) - 1 + place, token]) for place, token in enumerate(tokens))
    total = sum(math.exp(value) for value in sums.values())
    # "yes dog" begins with "yes" and so is part of it.
    mass = sum(math.exp(value) for label, value in sums.items() if label != "yes dog" or "yes" not in labels)
    return {label: math.exp(value) / total for label, value in sums.items()}, mass


def _assert_close(ours: Score, theirs: Score) -> None:
    assert ours.label == theirs.label
    assert ours.probabilities == pytest.approx(theirs.probabilities, rel=1e-4)
    assert ours.mass == pytest.approx(theirs.mass, rel=1e-4)


@pytest.mark.parametrize("labels", [["yes", "no", "dog"], LABELS, ["maybe good"]], ids=["single", "mixed", "one"])
def test_scores_are_those_of_a_plain_loop(scorer: Scorer, checkpoint: Path, labels: list[str]) -> None:
    model = load_model(checkpoint)
    for text, result in zip(TEXTS, scorer.score(TEXTS, labels, batch_size=4), strict=True):
        probabilities, mass = _reference(scorer, model, text, labels)
        assert result.probabilities == pytest.approx(probabilities, rel=1e-4)
        assert result.mass == pytest.approx(mass, rel=1e-4)
        assert result.label == max(probabilities, key=probabilities.__getitem__)
        assert math.isclose(sum(result.probabilities.values()), 1.0)
        assert list(result.probabilities) == labels


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_batch_size_and_padding_do_not_matter(scorer: Scorer, batch_size: int) -> None:
    alone = [next(scorer.score([text], LABELS)) for text in TEXTS]
    together = list(scorer.score(TEXTS, LABELS, batch_size=batch_size))
    for ours, theirs in zip(together, alone, strict=True):
        _assert_close(ours, theirs)


def test_results_come_in_the_order_of_the_texts(scorer: Scorer) -> None:
    # More texts than a window of 16 batches holds, of changing lengths.
    texts = [TEXTS[number % len(TEXTS)] for number in range(40)]
    results = list(scorer.score(texts, ["yes", "no"], batch_size=1))
    first = {text: results[texts.index(text)] for text in TEXTS}
    for text, result in zip(texts, results, strict=True):
        _assert_close(result, first[text])


def test_labels_of_one_token_share_a_row(scorer: Scorer) -> None:
    assert scorer.labels(["yes", "no", "dog"]).contexts == [()]
    assert len(scorer.labels(LABELS).contexts) < len(LABELS)


def test_mass_counts_nested_labels_once(scorer: Scorer) -> None:
    (alone,) = scorer.score(["a dog"], ["yes", "no"])
    (nested,) = scorer.score(["a dog"], ["yes", "no", "yes dog"])
    assert nested.mass == pytest.approx(alone.mass, rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "jamba"])
def test_logits_at_chosen_places_are_the_models_own(family: str) -> None:
    model = tiny_model(family)  # granitemoe scales its logits after the output matrix
    ids = torch.randint(3, 100, (3, 8), generator=torch.Generator().manual_seed(0))
    places = torch.tensor([[0, 7], [3, 4], [7, 7]])
    module = PromptModel(model)
    with torch.no_grad():
        chosen = module(ids, torch.ones_like(ids), places)
        full = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert torch.allclose(chosen, full[torch.arange(3)[:, None], places], atol=1e-6)
    assert module.head_apart == (family != "granitemoe")


@pytest.mark.slow
def test_streamed_and_compiled_gives_the_same_with_one_compilation(scorer: Scorer, checkpoint: Path) -> None:
    model = load_model(checkpoint)
    moepass.offload_experts(model)

    def compile_module(module: nn.Module) -> Any:
        return torch.compile(module, backend="asyncep", options={"lower": "eager"})

    streamed = Scorer.of(model, scorer.tokenizer, scorer.prompt, compile_module)
    with moepass.record_compilations() as compilations:
        for batch_size in (3, 1, 2, 5):  # square, single and uneven batches
            results = streamed.score(TEXTS, ["yes", "no"], batch_size=batch_size)
            for ours, theirs in zip(results, scorer.score(TEXTS, ["yes", "no"]), strict=True):
                _assert_close(ours, theirs)
    assert [item.plan.strategy for item in compilations] == ["asyncep"]


@pytest.mark.slow
def test_a_model_that_loops_over_tokens_is_compiled_for_each_width(tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path / "jamba", "jamba")
    plain = Scorer.of(load_model(folder), load_tokenizer(folder), Prompt("{text}<sep>"))
    model = load_model(folder)
    moepass.offload_experts(model)
    streamed = Scorer.of(
        model, plain.tokenizer, plain.prompt, lambda module: torch.compile(module, backend="asyncep", options=EAGER)
    )
    for texts in (TEXTS[:2], TEXTS[3:4]):
        for ours, theirs in zip(streamed.score(texts, ["yes", "no"]), plain.score(texts, ["yes", "no"]), strict=True):
            _assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], "no labels are given"),
        (["yes", " "], "label ' ' tokenises to nothing"),
        (["yes", ""], "label '' tokenises to nothing"),
        (["yes", "no", "yes"], "label 'yes' is given twice"),
        (["yes", " yes"], "labels 'yes' and ' yes' are the same tokens"),
        (["\ud800"], "is no valid Unicode text"),
    ],
)
def test_wrong_labels(scorer: Scorer, labels: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        scorer.score(TEXTS, labels)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text 2: the text is empty"),
        (" \n", "text 2: the text is empty"),
        (
            "cat " * 70,
            r"text 2: the prompt has \d+ tokens, but the model takes at most 64; shorten the text, or set max",
        ),
        ("a\udfff", "text 2: .* is no valid Unicode text"),
    ],
)
def test_wrong_texts_are_refused_before_the_first_score(scorer: Scorer, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        scorer.score(["fine", text], ["yes", "no"])


def test_a_text_must_leave_room_for_the_labels(scorer: Scorer) -> None:
    text = " ".join(["yes"] * 62)  # and <sep>: 63 of 64 tokens
    assert len(list(scorer.score([text], ["yes", "no"]))) == 1
    with pytest.raises(InputError, match="at most 62 beside the labels' 2") as caught:
        scorer.score([text], ["good dog park"])
    assert (caught.value.name, caught.value.value, caught.value.expected) == ("text 1", 63, 62)


def test_max_text_tokens_cuts_the_text_and_not_the_template(checkpoint: Path) -> None:
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    cutting = Scorer.of(model, tokenizer, Prompt("no {text}<sep>", max_text_tokens=3))
    whole = Scorer.of(model, tokenizer, Prompt("no {text}<sep>"))
    (cut,), (short,) = (
        cutting.score(["yes dog cat mat the"], ["yes", "no"]),
        whole.score(["yes dog cat"], ["yes", "no"]),
    )
    _assert_close(cut, short)


def test_batch_size_below_one(scorer: Scorer) -> None:
    with refused(InputError, name="batch_size", value=0):
        list(scorer.score(TEXTS, ["yes"], batch_size=0))


def test_without_a_prompt_file_the_text_is_the_prompt(checkpoint: Path, scorer: Scorer) -> None:
    plain = Scorer.of(load_model(checkpoint), scorer.tokenizer, load_prompt(checkpoint))
    assert plain.encode("a dog", plain.labels(["yes"]), "x") == tuple(scorer.tokenizer("a dog")["input_ids"])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), PeerError("rank 1 is gone")])
def test_making_a_scorer_runs_no_expert_and_hides_no_error(checkpoint: Path, error: RuntimeError) -> None:
    model = load_model(checkpoint)

    def fail(*_: object) -> None:
        raise error

    model.base_model.layers[0].register_forward_pre_hook(fail)
    scorer = Scorer.of(model, load_tokenizer(checkpoint), Prompt("{text}"))
    with pytest.raises(type(error), match=str(error)):
        list(scorer.score(["a dog"], ["yes", "no"]))
