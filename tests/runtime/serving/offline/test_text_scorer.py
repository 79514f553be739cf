"""Scores equal those of a plain loop over single texts, for any steps, in the order of the texts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import moepass
from moepass import InputError
from moepass.models.checkpoint.checkpoint_folders import Prompt, load_prompt, load_tokenizer, resolve_model
from moepass.models.checkpoint.load_model import load_model
from moepass.models.errors import CheckpointError, MoepassError
from moepass.runtime.ranks.rendezvous import PeerError
from moepass.runtime.serving.engine.load_engine import Compile, EngineOptions, make_engine
from moepass.runtime.serving.engine.step_engine import StepResult
from moepass.runtime.serving.offline import encoded_texts
from moepass.runtime.serving.offline.text_scorer import TextScorer
from moepass.runtime.serving.questions.labels import ImpossibleLabelsError
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.requests.request import Request
from tests.helpers.graphs.tiny_checkpoint import save_tiny_checkpoint

TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "x",
    "this is a film yes yes yes yes",
    "park",
    "the dog ran to a cat",
    "mat on",
]
# Labels of one and of several tokens, one that starts with another label, and two with a common first token.
PROMPT = Prompt("{text}<sep>")
LABELS = ["yes", "no", "maybe good", "good dog park", "yes dog", "good bad"]


@dataclasses.dataclass(frozen=True)
class Text:
    name: str
    text: str


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


def _scorer(
    source: Path | Any,
    labels: Sequence[str],
    prompt: Prompt = PROMPT,
    most_texts: int | None = None,
    compile_module: Compile | None = None,
    tokenizer: Any = None,
    step_tokens: int | None = None,
) -> TextScorer:
    model = load_model(source) if isinstance(source, Path) else source
    options = EngineOptions(None, torch.device("cpu"), cache_bytes=0, step_tokens=step_tokens, warms_up=False)
    engine = make_engine(model, options, compile_module, bytes(32))
    tokenizer = tokenizer or load_tokenizer(source)
    return TextScorer(engine, PromptWriter(tokenizer, prompt, 64), labels, most_texts)


def _named(texts: Sequence[str]) -> list[Text]:
    return [Text(f"text {number}", text) for number, text in enumerate(texts, 1)]


def _scores(scorer: TextScorer, texts: Sequence[str]) -> list[tuple[dict[str, float], float]]:
    scores = []
    for window in scorer.windows(_named(texts)):
        for outcome in window.outcomes:
            assert isinstance(outcome, int)
            row = window.probabilities[outcome].tolist()
            scores.append((dict(zip(scorer.labels, row, strict=True)), float(window.mass[outcome])))
    return scores


def _reference(model: Any, tokenizer: Any, text: str, labels: Sequence[str]) -> tuple[dict[str, float], float]:
    """Return the scores of one text, from one unpadded forward pass per label."""
    sums = {}
    prompt = tokenizer(f"{text}<sep>")["input_ids"]
    for label in labels:
        tokens = tokenizer(label, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0].double().log_softmax(-1)
        sums[label] = sum(float(logits[len(prompt) - 1 + index, token]) for index, token in enumerate(tokens))
    total = sum(math.exp(value) for value in sums.values())
    # "yes dog" starts with "yes" and is not counted again.
    mass = sum(math.exp(value) for label, value in sums.items() if label != "yes dog" or "yes" not in labels)
    return {label: math.exp(value) / total for label, value in sums.items()}, mass


def _assert_close(ours: tuple[dict[str, float], float], theirs: tuple[dict[str, float], float]) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
    assert max(ours[0], key=ours[0].__getitem__) == max(theirs[0], key=theirs[0].__getitem__)


@pytest.mark.covering(1)
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("labels", [["yes", "no", "dog"], LABELS, ["maybe good"]], ids=["single", "mixed", "one"])
@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "jamba"])
def test_scores_are_those_of_a_plain_loop(family: str, labels: list[str], tmp_path: Path) -> None:
    # granitemoe scales its logits after the output matrix, jamba runs as padded rows.
    folder = save_tiny_checkpoint(tmp_path / family, family)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    results = _scores(_scorer(folder, labels, most_texts=4), TEXTS)
    for text, (probabilities, mass) in zip(TEXTS, results, strict=True):
        expected, expected_mass = _reference(model, tokenizer, text, labels)
        _assert_close((probabilities, mass), (expected, expected_mass))
        assert math.isclose(sum(probabilities.values()), 1.0)
        assert list(probabilities) == labels


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("most_texts", "step_tokens"), [(1, None), (2, None), (3, None), (100, None), (None, 5)])
def test_steps_do_not_matter(checkpoint: Path, most_texts: int | None, step_tokens: int | None) -> None:
    alone = _scorer(checkpoint, LABELS)
    together = _scores(_scorer(checkpoint, LABELS, most_texts=most_texts, step_tokens=step_tokens), TEXTS)
    for text, result in zip(TEXTS, together, strict=True):
        _assert_close(result, _scores(alone, [text])[0])


@pytest.mark.slow
def test_results_come_in_the_order_of_the_texts_window_by_window(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoded_texts, "CHUNK_TEXTS", 3)
    texts = [TEXTS[number % len(TEXTS)] for number in range(40)]
    scorer = _scorer(checkpoint, ["yes", "no"], step_tokens=1)
    read = 0

    def source() -> Iterator[Text]:
        nonlocal read
        for text in _named(texts):
            read += 1
            yield text

    windows = scorer.windows(source())
    first = next(windows)
    assert read == len(first.texts) < len(texts)  # the remaining stream is not read yet
    names = [text.name for window in itertools.chain([first], windows) for text in window.texts]
    assert names == [text.name for text in _named(texts)]
    results = _scores(scorer, texts)
    for text, result in zip(texts, results, strict=True):
        _assert_close(result, results[texts.index(text)])


def test_a_common_prefix_is_computed_once_in_a_step(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = _scorer(checkpoint, LABELS, Prompt("this is a film {text}<sep>"))
    run_step = scorer.engine.step
    results: list[StepResult] = []

    def step(*arguments: Any, **named: Any) -> StepResult:
        results.append(run_step(*arguments, **named))
        return results[-1]

    monkeypatch.setattr(scorer.engine, "step", step)
    assert len([*scorer.windows(_named(TEXTS + TEXTS))]) == 1
    computed_tokens = sum(result.tokens for result in results)
    (tokens,) = scorer.writer.encode(["this is a film"])
    encoded = scorer.writer.encode([f"this is a film {text}<sep>" for text in TEXTS])
    # Equal texts and their common prefix are computed once, the labels behind each distinct text.
    behind = sum(len(prompt) - len(tokens) for prompt in encoded)
    stems = {label[:-1] for label in scorer._labels_behind("x<sep>").labels if len(label) > 1}
    beginnings = {stem[:end] for stem in stems for end in range(1, len(stem) + 1)}
    assert computed_tokens <= len(tokens) + behind + len(TEXTS) * len(beginnings)
    assert computed_tokens < 2 * sum(map(len, encoded))


def test_labels_of_one_token_take_no_token_of_a_step(checkpoint: Path) -> None:
    assert _scorer(checkpoint, ["yes", "no", "dog"])._labels_behind("x<sep>").count == 0
    assert _scorer(checkpoint, LABELS)._labels_behind("x<sep>").count > 0


def test_mass_counts_nested_labels_once(checkpoint: Path) -> None:
    ((_, alone),) = _scores(_scorer(checkpoint, ["yes", "no"]), ["a dog"])
    ((_, nested),) = _scores(_scorer(checkpoint, ["yes", "no", "yes dog"]), ["a dog"])
    assert nested == pytest.approx(alone, rel=1e-4)


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="asyncep", options={"lower": "eager"})


@pytest.mark.slow
def test_streamed_and_compiled_gives_the_same_with_one_compilation(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    moepass.offload_experts(model)
    plain = _scores(_scorer(checkpoint, ["yes", "no"]), TEXTS)
    with moepass.record_compilations() as compilations:
        streamed = _scorer(model, ["yes", "no"], compile_module=_compiled, tokenizer=load_tokenizer(checkpoint))
        for count in (3, 1, 2, 7):
            for ours, theirs in zip(_scores(streamed, TEXTS[:count]), plain[:count], strict=True):
                _assert_close(ours, theirs)
    assert [item.plan.strategy for item in compilations] == ["asyncep"]


@pytest.mark.slow
def test_a_model_that_loops_over_tokens_runs_uncompiled_and_says_so(tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path / "jamba", "jamba")
    model = load_model(folder)
    moepass.offload_experts(model)
    streamed = _scorer(model, ["yes", "no"], compile_module=_compiled, tokenizer=load_tokenizer(folder))
    plain = _scorer(folder, ["yes", "no"])
    assert "loops over tokens" in streamed.engine.facts.notes["compiled"]
    before = streamed.engine.compilations()
    for texts in (TEXTS[:2], TEXTS[3:4]):
        for ours, theirs in zip(_scores(streamed, texts), _scores(plain, texts), strict=True):
            _assert_close(ours, theirs)
    assert streamed.engine.compilations() == before


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], "there are no labels"),
        (["yes", " "], "label ' ' has no tokens"),
        (["yes", ""], "label '' has no tokens"),
        (["yes", "no", "yes"], "label 'yes' occurs twice"),
        (["yes", " yes"], "labels 'yes' and ' yes' have the same tokens"),
        (["\ud800"], "is not valid Unicode"),
        (["no", "yes " * 90], "the longest label has 90 tokens, but the model takes at most 64"),
    ],
)
def test_wrong_labels(checkpoint: Path, labels: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _scorer(checkpoint, labels)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text 2: the text is empty"),
        (" \n", "text 2: the text is empty"),
        (
            "cat " * 70,
            r"text 2: the prompt has \d+ tokens, but the model takes at most 64; shorten the text, or set max",
        ),
        ("cat " * 7000, "text 2.* the limit is 4096: the model takes 64 tokens; send a shorter text"),
        ("a\udfff", "text 2: .* is not valid Unicode"),
    ],
)
def test_wrong_texts_are_refused_before_the_first_score_or_left_out(checkpoint: Path, text: str, message: str) -> None:
    scorer = _scorer(checkpoint, ["yes", "no"])
    texts = _named(["fine", text, "a dog"])
    with pytest.raises(InputError, match=message):
        next(scorer.windows(texts))
    (window,) = scorer.windows(texts, stops=False)
    assert [isinstance(outcome, int) for outcome in window.outcomes] == [True, False, True]
    with pytest.raises(InputError, match=message):
        raise window.outcomes[1]  # type: ignore[misc]
    scored = [(window.probabilities[row], window.mass[row]) for row in window.outcomes if isinstance(row, int)]
    for (ours, mass), (theirs, own_mass) in zip(scored, _scores(scorer, ["fine", "a dog"]), strict=True):
        assert ours.tolist() == pytest.approx(list(theirs.values()), rel=1e-4)
        assert mass == pytest.approx(own_mass, rel=1e-4)


def test_a_text_must_leave_room_for_the_labels(checkpoint: Path) -> None:
    text = " ".join(["yes"] * 62)  # and <sep>: 63 of 64 tokens
    assert len(_scores(_scorer(checkpoint, ["yes", "no"]), [text])) == 1
    with pytest.raises(InputError, match="at most 62 with 2 more for the labels") as caught:
        next(_scorer(checkpoint, ["good dog park"]).windows(_named([text])))
    assert (caught.value.name, caught.value.value, caught.value.expected) == ("text 1", 63, 62)


def test_max_text_tokens_cuts_the_text_and_not_the_template(checkpoint: Path) -> None:
    cutting = _scorer(checkpoint, ["yes", "no"], Prompt("no {text}<sep>", max_text_tokens=3))
    uncut = _scorer(checkpoint, ["yes", "no"], Prompt("no {text}<sep>"))
    for long, short in (("yes dog cat mat the", "yes dog cat"), ("yes dog cat " * 90, "yes dog cat")):
        _assert_close(_scores(cutting, [long])[0], _scores(uncut, [short])[0])
    _assert_close(_scores(cutting, ["yes dog"])[0], _scores(uncut, ["yes dog"])[0])


def test_texts_of_the_demo_are_cut_as_single_ones_are() -> None:
    folder = resolve_model("demo")
    writer = PromptWriter(load_tokenizer(folder), load_prompt(folder), 512)
    texts = ["word " * count + "é" * (count % 7) for count in range(1, 60)] + ["語" * 60, "<sep>" * 60, "x" * 5000]
    rendered, encoded = writer.encode_texts(texts, texts)
    assert rendered == [writer.ask(text) for text in texts]
    for prompt, tokens in zip(rendered, encoded, strict=True):
        assert tokens.tolist() == writer.encode([prompt])[0].tolist()


def test_without_a_prompt_file_the_text_is_the_prompt(checkpoint: Path) -> None:
    scorer = _scorer(checkpoint, ["yes"], load_prompt(checkpoint))
    ((tokens,),) = (scorer.writer.encode_texts(["a dog"], ["x"])[1],)
    assert tokens.tolist() == load_tokenizer(checkpoint)("a dog")["input_ids"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), PeerError("rank 1 is gone")])
def test_errors_of_the_model_are_not_hidden(checkpoint: Path, error: RuntimeError) -> None:
    model = load_model(checkpoint)
    scorer = _scorer(model, ["yes", "no"], tokenizer=load_tokenizer(checkpoint))

    def fail(*_: object) -> None:
        raise error

    model.base_model.layers[0].register_forward_pre_hook(fail)
    if isinstance(error, torch.OutOfMemoryError):  # each text is tried alone, and none fits
        with pytest.raises(InputError, match="text 1: its 3 tokens need more memory than the device has left"):
            next(scorer.windows(_named(["a dog", "x"])))
    else:
        with pytest.raises(PeerError, match=str(error)):
            next(scorer.windows(_named(["a dog", "x"])))


def test_an_error_names_the_text_with_nan(checkpoint: Path) -> None:
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    scorer = _scorer(model, ["yes", "no"], tokenizer=tokenizer)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer(" dog")["input_ids"][-1]] = float("nan")
    message = "text 2: the log-probabilities of the labels are nan, nan, so the model's logits are NaN"
    for stops in (True, False):
        with pytest.raises(CheckpointError, match=message):
            next(scorer.windows(_named(["the cat sat", "a dog", "dog"]), stops=stops))


def test_only_labels_that_are_all_impossible_are_an_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = _scorer(checkpoint, ["yes", "no"])
    yes, no = scorer._labels_behind("x<sep>").labels
    impossible = {yes[0]}
    step = scorer.engine.step

    def without(requests: Sequence[Request], **options: Any) -> Any:
        result = step(requests, **options)
        for request, answer in zip(requests, result.answers, strict=True):
            asked = request.pieces[0].reads[0].tokens.tolist()
            for index, token in enumerate(asked):
                if token in impossible:
                    answer.pieces[0].reads[0].log_probabilities[index] = -math.inf
        return result

    monkeypatch.setattr(scorer.engine, "step", without)
    ((probabilities, _),) = _scores(scorer, ["a dog"])
    assert probabilities == {"yes": 0.0, "no": 1.0}
    impossible.add(no[0])
    with pytest.raises(ImpossibleLabelsError, match="text 1: the model assigns probability 0 to all labels"):
        next(scorer.windows(_named(["a dog"])))
    (window,) = scorer.windows(_named(["a dog"]), stops=False)
    assert [isinstance(outcome, MoepassError) for outcome in window.outcomes] == [True]
