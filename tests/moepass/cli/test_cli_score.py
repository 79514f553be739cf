"""Options of `moepass score`: skipped errors, labels, templates, homes, dtypes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moepass.cli.main import app
from moepass.cli.score_command import InputLines
from moepass.models.homes import HOMES
from moepass.runtime.serving.offline.load_scorer import compiling_pays, seven_digits
from tests.helpers.graphs.tiny_checkpoint import broken_copy, save_tiny_checkpoint
from tests.helpers.serving.byte_checkpoint import save_byte_checkpoint
from tests.helpers.serving.served import CHAT_TEMPLATE

QUICK = ["--eager", "--labels", "yes,no"]
GOOD = ["the cat sat", "a dog", "maybe"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


def _run(*arguments: str | Path, text: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


def _lines(*records: Any) -> str:
    return "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


def _probabilities(result: Any) -> list[dict[str, float]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line)["probabilities"] for line in result.stdout.splitlines()]


def test_lines_that_cannot_be_scored_are_skipped_and_reported(checkpoint: Path, tmp_path: Path) -> None:
    bad = ['{"text": "a', "[]", {"text": "cat " * 99, "id": 5}, {"text": " "}, {"text": "a" * (4 << 20)}]
    text = _lines({"text": GOOD[0]}, *bad[:2], {"text": GOOD[1]}, *bad[2:], {"text": GOOD[2]})
    target = tmp_path / "out.jsonl"
    result = _run("score", checkpoint, *QUICK, "--on-error", "skip", "--output", target, text=text)
    assert result.exit_code == 0, result.output
    written = [json.loads(line) for line in target.read_text().splitlines()]
    plain = _run("score", checkpoint, *QUICK, text=_lines(*({"text": text} for text in GOOD)))
    for ours, theirs in zip([answer["probabilities"] for answer in written], _probabilities(plain), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    report = result.stderr.splitlines()
    assert report[0] == "moepass: skipped 5 of 8 lines:"
    reasons = ["is not valid JSON", "is a list", "the prompt has", '"text" is empty', "is longer than 4194304 bytes"]
    for line, number, reason in zip(report[1:], [2, 3, 5, 6, 7], reasons, strict=True):
        assert line.startswith(f"  line {number}")
        assert reason in line
    # Without --on-error skip, the first error stops the command.
    stopped = _run("score", checkpoint, *QUICK, "--output", tmp_path / "none", text=text)
    assert (stopped.exit_code, "line 2 of standard input is not valid JSON" in stopped.stderr) == (1, True)
    assert not (tmp_path / "none").exists()


def test_nothing_is_written_if_every_line_is_skipped(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    result = _run("score", checkpoint, *QUICK, "--on-error", "skip", "--output", target, text='{"text": 1}\n')
    assert result.exit_code == 1
    assert "no line could be scored; skipped 1 of 1 lines: line 1 of standard input" in result.stderr
    assert not target.exists()


def test_the_report_of_skipped_lines_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moepass.cli.score_command._NAMED_LINES", 2)
    lines = InputLines((), "x", skips=True)
    for number in range(5):
        lines.skip(number, ValueError(f"line {number}: bad"))  # type: ignore[arg-type]
    lines.count = 7
    assert lines.report() == "skipped 5 of 7 lines:\n  line 0: bad\n  line 1: bad\n  and 3 more"


def test_labels_in_the_input_are_kept_and_compared(checkpoint: Path) -> None:
    answers = _probabilities(_run("score", checkpoint, *QUICK, text=_lines(*({"text": text} for text in GOOD))))
    best = [max(chances, key=chances.__getitem__) for chances in answers]
    wrong = "no" if best[1] == "yes" else "yes"
    gold = [best[0], wrong, "something else"]
    text = _lines(*({"text": source, "label": label} for source, label in zip(GOOD, gold, strict=True)))
    result = _run("score", checkpoint, *QUICK, text=text)
    assert [json.loads(line)["input_label"] for line in result.stdout.splitlines()] == gold
    assert result.stderr == "moepass: note: 1 of 2 labels agree (50.00%)\n"


@pytest.mark.slow
def test_templates(checkpoint: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "mine.json"
    prompt.write_text('{"template": "this is {text}<sep>", "labels": ["dog", "cat"]}')
    prompted = broken_copy(
        checkpoint, tmp_path / "own", lambda folder: (folder / "prompt.json").write_bytes(prompt.read_bytes())
    )
    text = _lines({"text": "a film"})
    (templated,) = _probabilities(_run("score", checkpoint, "--eager", "--template", prompt, text=text))
    assert list(templated) == ["dog", "cat"]
    for more in ([], ["--template", "prompt"]):
        assert _probabilities(_run("score", prompted, "--eager", *more, text=text)) == [
            pytest.approx(templated, abs=1e-5)
        ]
    (plain,) = _probabilities(
        _run("score", prompted, "--eager", "--template", "plain", text=_lines({"text": "this is a film<sep>"}))
    )
    (shielded,) = _probabilities(
        _run("score", checkpoint, "--eager", "--labels", "dog,cat", text=_lines({"text": "this is a film<sep>"}))
    )
    assert plain == pytest.approx(shielded, abs=1e-5)  # control tokens in a text are plain text
    assert plain != pytest.approx(templated, abs=1e-5)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("chat", "this checkpoint has no chat template; use prompt, plain or a file"),
        ("prompt", "this checkpoint has no prompt.json; use chat, plain or a file"),
        ("nowhere.json", "no such file exists; use chat, prompt, plain, or a file in the format of prompt.json"),
    ],
)
def test_missing_templates_are_refused(template: str, message: str, checkpoint: Path) -> None:
    result = _run("score", checkpoint, *QUICK, "--template", template, text=_lines({"text": "a"}))
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"template is {template!r}" in result.stderr
    assert message in result.stderr


@pytest.mark.slow
def test_the_chat_template_is_the_default(tmp_path: Path) -> None:
    folder = save_byte_checkpoint(tmp_path / "bytes")
    (folder / "prompt.json").write_text('{"template": "{text}!", "labels": ["Yes", "No"]}')
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT_TEMPLATE}))
    text = _lines({"text": "Is it?"})
    runs = {
        name: _probabilities(_run("score", folder, "--eager", *more, text=text))[0]
        for name, more in {"none": [], "chat": ["--template", "chat"], "prompt": ["--template", "prompt"]}.items()
    }
    assert runs["none"] == pytest.approx(runs["chat"], abs=1e-5)
    assert runs["chat"] != pytest.approx(runs["prompt"], abs=1e-5)


@pytest.mark.slow
def test_labels_of_the_prompt_can_be_given_by_name() -> None:
    text = _lines({"text": "Bitte geben Sie eine gültige Adresse ein"})
    (named,) = _probabilities(_run("score", "demo", "--eager", "--labels", "German,Dutch", text=text))
    (unnamed,) = _probabilities(_run("score", "demo", "--eager", "--labels", "<de>,<nl>", text=text))
    assert list(named) == ["German", "Dutch"]
    assert list(named.values()) == list(unnamed.values())
    assert named["German"] > 0.99
    unknown = _run("score", "demo", "--eager", "--labels", "German,Klingon", text=text)
    assert (
        "warning: label 'Klingon' is not one of the 69 labels that this model answers with (<af>, <ar>, <az>"
        in unknown.stderr
    )
    assert "label 'German'" not in unknown.stderr


def test_a_label_without_its_leading_blank_is_a_warning_with_its_tokens(checkpoint: Path) -> None:
    result = _run(
        "score", "demo", "--eager", "--labels", "the,<de>", "--template", "plain", text=_lines({"text": "mal"})
    )
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("moepass: warning: label 'the' ")
    assert result.stderr.endswith("Use the form that the model was trained with.\n")


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("home", HOMES)
def test_homes(home: str, checkpoint: Path) -> None:
    text = _lines(*({"text": text} for text in GOOD))
    result = _run("score", checkpoint, *QUICK, "--home", home, text=text)
    if HOMES[home].is_spread:
        assert result.exit_code == 2
        assert f"home is {home!r}, which distributes experts over several processes" in result.stderr
        return
    plain = _probabilities(_run("score", checkpoint, *QUICK, "--no-stream", text=text))
    for ours, theirs in zip(_probabilities(result), plain, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_the_dtype_of_the_weights(checkpoint: Path) -> None:
    text = _lines({"text": GOOD[0]})
    (exact,) = _probabilities(_run("score", checkpoint, *QUICK, text=text))
    (rounded,) = _probabilities(_run("score", checkpoint, *QUICK, "--dtype", "bf16", text=text))
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=0.05)


def test_a_long_shared_prefix_is_cached(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moepass.runtime.serving.offline.load_scorer._CACHED_PREFIX_TOKENS", 16)
    prompt = tmp_path / "long.json"
    prompt.write_text(json.dumps({"template": "the cat sat on the mat " * 4 + "{text}<sep>"}))
    text = _lines(*({"text": text} for text in GOOD))
    options = ["--template", str(prompt), "--step-tokens", "1"]
    cached = _probabilities(_run("score", checkpoint, *QUICK, *options, text=text))
    monkeypatch.setattr("moepass.runtime.serving.offline.load_scorer._CACHED_PREFIX_TOKENS", 1 << 20)
    for ours, theirs in zip(
        cached, _probabilities(_run("score", checkpoint, *QUICK, *options, text=text)), strict=True
    ):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_lines_that_were_read_ahead_keep_their_order() -> None:
    source = (json.dumps({"text": "x" * number}).encode() for number in range(1, 9))
    lines = InputLines(source, "x", skips=False)
    lines.read_ahead(3, 1 << 20)
    assert (lines.count, lines.known_bytes("-")) == (3, None)
    lines.read_ahead(9, 4)
    assert [line.number for line in lines] == list(range(1, 9))
    assert lines.at_end


def test_short_inputs_run_uncompiled() -> None:
    assert not compiling_pays("demo", 1 << 20)
    assert compiling_pays("demo", 1 << 26)
    assert compiling_pays("demo", None)


def test_seven_digits_round_as_printing_does() -> None:
    import numpy as np

    generator = np.random.default_rng(0)
    values = np.concatenate((10 ** generator.uniform(-40, 0, 2000), [0.0, 1.0, 0.5, 1e-22, 9.99999995e-3]))
    assert seven_digits(values).tolist() == [float(f"{value:.7g}") for value in values.tolist()]
