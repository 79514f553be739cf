"""The command line: its output and exit status, and one-line errors for bad input that write no partial output."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from typer.models import OptionInfo
from typer.testing import CliRunner

from moepass.cli.main import app
from moepass.cli.score_command import parse_labels
from moepass.demo.comparison import run_demo
from moepass.explaining.capture_model import capture_plans, explain_meta_model
from moepass.models.byte_counts import parse_bytes
from moepass.models.checkpoint.checkpoint_folders import meta_model
from moepass.models.errors import OptionError
from moepass.passes.ir.plan import Plan
from moepass.runtime.offload.offload import offload_experts
from tests.helpers.graphs.tiny_checkpoint import broken_copy, edit_config, original_model, save_tiny_checkpoint
from tests.helpers.models.quantized_checkpoints import FORMS, quantize

RECORDS: list[dict[str, Any]] = [
    {"id": 7, "text": "the cat sat on the mat"},
    {"text": "a dog", "label": "kept", "nested": {"a": [1, None]}},
    {"text": "maybe"},
]
QUICK = ["--eager", "--labels", "yes,no"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint") / "dense"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=64, **sizes)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    return folder


def _run(*arguments: str | Path, text: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


def _lines(records: list[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _assert_one_line(result: Any, message: str, status: int = 1) -> None:
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("moepass: error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


# ---- score -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_score_writes_one_answer_per_line(checkpoint: Path) -> None:
    result = _run("score", checkpoint, "--lower", "eager", "--labels", "yes,no,maybe good", text=_lines(RECORDS))
    assert result.exit_code == 0, result.output
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(answers) == len(RECORDS)
    for answer in answers:
        assert list(answer["probabilities"]) == ["yes", "no", "maybe good"]
        assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert answer["label"] == max(answer["probabilities"], key=answer["probabilities"].get)
        assert 0 < answer["mass"] < 1
        assert "text" not in answer
    assert answers[0]["id"] == 7
    assert answers[1]["input_label"] == "kept"
    assert answers[1]["nested"] == {"a": [1, None]}
    assert result.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--lower", "eager"], ["--eager", "--no-stream"]])
@pytest.mark.parametrize("form", ["fp8 blocks", "int4 packed"])
def test_a_quantised_checkpoint_has_the_scores_of_its_dequantised_weights(
    form: str, options: list[str], tmp_path: Path
) -> None:
    plain = save_tiny_checkpoint(tmp_path / "plain")
    quantised = quantize(plain, FORMS[form], tmp_path / "quantised")
    arguments = ["--labels", "yes,no", *options]
    results = [_run("score", folder, *arguments, text=_lines(RECORDS)) for folder in (plain, quantised)]
    assert [result.exit_code for result in results] == [0, 0], results[1].output
    assert results[0].stdout == results[1].stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--no-stream"], ["--eager"], ["--link", "emulate:1e9", "--slots", "1"]])
def test_options_do_not_change_probabilities(options: list[str], checkpoint: Path) -> None:
    plain = _run("score", checkpoint, "--labels", "yes,no", "--eager", "--no-stream", text=_lines(RECORDS))
    changed = _run("score", checkpoint, "--labels", "yes,no", "--lower", "eager", *options, text=_lines(RECORDS))
    assert changed.exit_code == 0, changed.output
    for ours, theirs in zip(changed.stdout.splitlines(), plain.stdout.splitlines(), strict=True):
        assert json.loads(ours)["probabilities"] == pytest.approx(json.loads(theirs)["probabilities"], rel=1e-4)


def test_score_reads_and_writes_files(checkpoint: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + _lines(RECORDS).encode() + b"\n")  # some editors write a byte order mark
    target.write_text("old")
    result = _run("score", checkpoint, *QUICK, "--input", source, "--output", target)
    assert (result.exit_code, result.output) == (0, "")
    assert len(target.read_text().splitlines()) == len(RECORDS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_labels_of_the_prompt_file_are_the_default(checkpoint: Path, tmp_path: Path) -> None:
    def add_prompt(folder: Path) -> None:
        (folder / "prompt.json").write_text('{"template": "{text}<sep>", "labels": ["dog", "cat"]}')

    folder = broken_copy(checkpoint, tmp_path / "prompted", add_prompt)
    result = _run("score", folder, "--eager", text=_lines(RECORDS))
    assert list(json.loads(result.stdout.splitlines()[0])["probabilities"]) == ["dog", "cat"]


def test_labels_as_commas_or_as_json() -> None:
    assert parse_labels(" yes, no") == [" yes", " no"]
    assert parse_labels('["a, b", "c"]') == ["a, b", "c"]
    assert parse_labels(None) is None


@pytest.mark.parametrize("text", ["yes, no", " yes,no", "yes,no, maybe", "a,b, ", "yes,  no"])
def test_labels_that_differ_in_their_space_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="start with a space") as caught:
        parse_labels(text)
    assert json.dumps(text.split(",")) in str(caught.value)
    assert parse_labels(json.dumps(text.split(","))) == text.split(",")


def _line_17(line: str) -> str:
    return _lines([{"text": "a dog"}] * 16) + line + "\n" + _lines([{"text": "a cat"}])


BAD_INPUT = {
    "malformed": (_line_17('{"text": "a'), "line 17 of standard input is not valid JSON"),
    "no object": (_line_17('"a dog"'), 'line 17 of standard input is a string; it must be an object such as {"text"'),
    "no text": (_line_17('{"txt": "a"}'), "line 17 of standard input has no \"text\"; its keys are 'txt'"),
    "text a number": (_line_17('{"text": 5}'), 'line 17 of standard input: "text" is a number; it must be a string'),
    "text null": (_line_17('{"text": null}'), '"text" is null; it must be a string'),
    "text empty": (_line_17('{"text": " "}'), 'line 17 of standard input: "text" is empty'),
    "text too long": (_line_17(json.dumps({"text": "cat " * 99})), "line 17: the prompt has"),
    "not UTF-8": (
        _line_17('{"text": "X"}').encode().replace(b"X", b"\xff"),
        "line 17 of standard input is not valid JSON",
    ),
    "blank lines count": (_line_17("").replace("\n\n", "\n\n[]\n"), "line 18 of standard input is a list"),
    "nothing": ("", "standard input is empty; it must contain one JSON object per line"),
    "only blanks": ("\n \n", "standard input is empty"),
}


@pytest.mark.sampled(every=11)
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_lines_are_errors_with_their_number_and_no_output(case: str, checkpoint: Path, tmp_path: Path) -> None:
    text, message = BAD_INPUT[case]
    target = tmp_path / "out.jsonl"
    _assert_one_line(_run("score", checkpoint, *QUICK, text=text), message)
    _assert_one_line(_run("score", checkpoint, *QUICK, "--output", target, text=text), message)
    assert list(tmp_path.iterdir()) == []


BAD_OPTIONS: dict[str, tuple[list[str], str, int]] = {
    "no label": (["--labels", ""], "label '' has no tokens", 1),
    "blank label": (["--labels", '["yes", " "]'], "label ' ' has no tokens", 1),
    "same label": (["--labels", "yes,yes"], "label 'yes' occurs twice", 1),
    "labels no list": (["--labels", "[1]"], "are not a JSON list of strings", 1),
    "no labels": ([], "there are no labels", 1),
    "no slots": (["--labels", "yes,no", "--slots", "0"], "slots is 0; a ring needs at least 1", 2),
    "device absent": (["--labels", "yes,no", "--device", "cuda:99"], "device is 'cuda:99', but this machine has", 1),
    "no device": (["--labels", "yes,no", "--device", "gpu"], "device is 'gpu'; it must be cpu, cuda or cuda:INDEX", 1),
    "meta": (["--labels", "yes,no", "--device", "meta"], "device is 'meta', which cannot compute", 1),
    "link": (["--labels", "yes,no", "--link", "slow"], "link is 'slow'; it must be `real` or `emulate:BYTES_PER_S`", 2),
    "input absent": (["--input", "/nowhere.jsonl"], "input '/nowhere.jsonl' cannot be read: No such file", 1),
    "input a folder": (["--input", "/"], "input '/' cannot be read: Is a directory", 1),
    "output a folder": (["--output", "/"], "output '/' is a folder; give the name of a file", 1),
    "output nowhere": (["--output", "/nowhere/out"], "the folder /nowhere does not exist", 1),
}


@pytest.mark.sampled(every=14)
@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_errors_of_one_line(case: str, checkpoint: Path) -> None:
    options, message, status = BAD_OPTIONS[case]
    _assert_one_line(_run("score", checkpoint, *options, text=_lines(RECORDS)), message, status)


BAD_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "is not a checkpoint: it has no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "truncated": (lambda folder: os.truncate(folder / "model.safetensors", 4000), "(4000 bytes) is truncated"),
    "shapes": (edit_config(num_hidden_layers=9), "lacks weights that the config asks for"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_models_are_errors_of_one_line(case: str, checkpoint: Path, tmp_path: Path) -> None:
    edit, message = BAD_MODELS[case]
    folder = broken_copy(checkpoint, tmp_path / "broken", edit)
    _assert_one_line(_run("score", folder, *QUICK, text=_lines(RECORDS)), message)


def test_a_model_without_experts_scores_only_without_streaming(dense: Path) -> None:
    _assert_one_line(
        _run("score", dense, *QUICK, text=_lines(RECORDS)),
        "has no experts to stream, because LlamaForCausalLM is dense; use --no-stream",
    )
    assert _run("score", dense, *QUICK, "--no-stream", text=_lines(RECORDS)).exit_code == 0


def test_a_failure_while_writing_leaves_the_old_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moepass.runtime.serving.offline.text_scorer import TextScorer

    original = TextScorer.windows_of

    def fail_after_one(self: TextScorer, *arguments: Any, **options: Any) -> Any:
        yield next(original(self, *arguments, **options))
        raise ZeroDivisionError("not one of ours")

    monkeypatch.setattr(TextScorer, "windows_of", fail_after_one)
    target = tmp_path / "out.jsonl"
    target.write_text("old")
    result = _run("score", checkpoint, *QUICK, "--output", target, text=_lines(RECORDS))
    assert isinstance(result.exception, ZeroDivisionError)  # such errors keep their traceback
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_usage_errors_have_status_2(checkpoint: Path) -> None:
    assert _run("score").exit_code == 2
    assert _run("score", checkpoint, "--batch-size", "0").exit_code == 2
    assert _run("score", checkpoint, "--lower", "llvm").exit_code == 2
    assert _run("explain", checkpoint, "--tokens", "-1").exit_code == 2


# ---- explain ---------------------------------------------------------------------------------------------------------


def test_explain_begins_with_the_strategy(checkpoint: Path) -> None:
    result = _run("explain", checkpoint, "--all")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "qwen3_moe" in lines[0]
    assert any(line.startswith("resident: all experts fit on every device") for line in lines[:5])
    for word in ("found", "rewritten", "refused    nothing", "compile", "memory", "threshold", "slot 0 meanwhile"):
        assert word in result.stdout
    assert max(map(len, lines)) <= 80


def test_explain_writes_json_for_a_config_alone(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes((checkpoint / "config.json").read_bytes())
    result = _run("explain", file, "--tokens", "64", "--slots", "3", "--format", "json")
    explained = json.loads(result.stdout)
    assert explained["workload"] == {"batch": 1, "seq": 64, "tokens": 64}
    (plan,) = explained["compiler"]["explanation"]["plans"]
    assert plan["strategy"] == "asyncep"
    assert explained["compiler"]["explanation"]["expert_bytes"] == sum(
        bank["format"]["home_bytes"] for bank in plan["banks"]
    )
    assert [block["by_analogy"] for block in explained["blocks"]] == [False, True]
    assert explained["schedule"]["slots"] <= 3


@pytest.mark.slow
def test_explain_reports_that_a_dense_model_has_nothing_to_stream(dense: Path) -> None:
    result = _run("explain", dense, "--seq", "16")
    assert result.exit_code == 0, result.output
    assert "no figures: the sizes of model_type 'llama' are not known" in " ".join(result.stdout.split())
    assert "cannot be served: the sizes of model_type 'llama' are not known" in result.stdout
    assert "resident: the graph has no MoE block, so there is nothing to move" in result.stdout


@pytest.mark.slow
def test_explain_shows_the_plan_that_runs(checkpoint: Path) -> None:
    import moepass
    from moepass.models.checkpoint.load_model import load_model

    model = load_model(checkpoint)
    offload_experts(model, slots=2)
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager"}, dynamic=False)
    with moepass.record_compilations() as compilations, torch.no_grad():
        compiled(input_ids=torch.zeros((2, 16), dtype=torch.int64), use_cache=False)
    (explained,) = explain_meta_model(meta_model(checkpoint), 2, 16, 2, "eager").plans
    run = compilations[0].plan
    assert _as_scheduled(explained) == _as_scheduled(run)
    # On the meta device attention is decomposed. In the run its kernel gets a mask, with which it computes as many
    # pairs of tokens.
    assert explained.cost is not None
    assert run.cost is not None
    assert explained.cost.at({})[0] == run.cost.at({})[0]


def _as_scheduled(plan: Plan) -> Plan:
    """Return the plan without what only a run or only the report knows: costs, lowerings and decisions."""
    return dataclasses.replace(
        plan,
        cost=None,
        steps=tuple(dataclasses.replace(step, cost=None) for step in plan.steps),
        segments=tuple(dataclasses.replace(segment, cost=None, lowering=None) for segment in plan.segments),
        sequences=(),
        decisions=None,
    )


@pytest.mark.slow
def test_explain_shows_every_graph_of_a_model_that_breaks() -> None:
    class Breaks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = original_model().to("meta")

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            first = self.model(input_ids=input_ids, use_cache=use_cache).logits
            torch._dynamo.graph_break()
            return self.model(inputs_embeds=first[..., :64], use_cache=use_cache).logits

    model = Breaks()
    offload_experts(model, device="meta")
    plans, stopped = capture_plans(model, 2, 8)
    assert [plan.strategy for plan in plans] == ["asyncep", "asyncep"]
    assert stopped is None


def test_explain_refuses_bad_models(tmp_path: Path) -> None:
    _assert_one_line(_run("explain", tmp_path / "nowhere"), "does not exist; give the folder of a checkpoint")
    _assert_one_line(
        _run("explain", "qwen3-235b"), "model 'qwen3-235b' is unknown, and no folder or file has that name"
    )
    _assert_one_line(_run("explain", "qwen3-235b"), "did you mean qwen3-235b-a22b? It must be")
    file = tmp_path / "config.json"
    file.write_text("{")
    _assert_one_line(_run("explain", file), "config.json is malformed")
    file.write_text('{"model_type": "no_such_thing"}')
    _assert_one_line(_run("explain", tmp_path), "model_type 'no_such_thing' is unknown to transformers")


BAD_EXPLAIN: dict[str, tuple[list[str], str, int]] = {
    "hardware": (["--hardware", "8xh110-80g"], "hardware '8xh110-80g' is unknown; did you mean h100-80g", 1),
    "no fp8": (["--hardware", "8xa100-80g", "--dtype", "fp8"], "has no fp8 rate; it has", 1),
    "no disk": (["--home", "disk"], "has no disk link", 1),
    "no peers": (["--hardware", "8xl40s", "--home", "peer"], "has no peer link", 1),
    "budget": (["--memory-budget", "lots"], "memory budget 'lots' is not a number of bytes above 0", 1),
    "budget 0": (["--memory-budget", "0"], "memory budget '0' is not a number of bytes above 0", 1),
    "beyond the memory": (
        ["--memory-budget", "100GB"],
        "it must be between 1 and 80000000000, the memory of a device",
        1,
    ),
    "output": (["--output", "/"], "output '/' is a folder", 1),
}


@pytest.mark.parametrize("case", BAD_EXPLAIN)
def test_bad_options_of_explain_are_errors_of_one_line(case: str) -> None:
    options, message, status = BAD_EXPLAIN[case]
    _assert_one_line(_run("explain", "olmoe-1b-7b", *options), message, status)


def test_bytes_with_and_without_units() -> None:
    assert parse_bytes(None) is None
    assert [parse_bytes(text) for text in ("60e9", "60GB", "60 GB", "1GiB", "512B")] == [60e9, 60e9, 60e9, 2**30, 512]


@pytest.mark.slow
def test_explain_writes_files(checkpoint: Path, tmp_path: Path) -> None:
    for form, begin in (("html", "<!doctype html>"), ("trace", '{"traceEvents"')):
        file = tmp_path / form
        result = _run("explain", checkpoint, "--format", form, "--output", file)
        assert (result.exit_code, result.stdout) == (0, ""), result.output
        assert file.read_text().startswith(begin)


# ---- The process -----------------------------------------------------------------------------------------------------


def _process(*arguments: str | Path, text: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from moepass.cli.main import main; main()", *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.slow
def test_help_and_version_do_not_import_torch() -> None:
    check = (
        "import sys\nfrom moepass.cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit as error: assert not error.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    listed = re.findall(r"^│ (\w+)  ", finished.stdout[finished.stdout.index("Commands") :], re.M)
    assert listed == ["demo", "explain", "calibrate", "pack", "score", "serve", "batch", "bench", "cache"]
    assert _process("--version").stdout.startswith("moepass ")


def test_a_bad_line_ends_the_process_with_one_line(checkpoint: Path) -> None:
    finished = _process("score", checkpoint, *QUICK, text=_line_17("{"))
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr == "moepass: error: line 17 of standard input is not valid JSON: Input data was truncated\n"


@pytest.mark.slow
def test_truncated_weights_end_the_process_with_one_line(checkpoint: Path, tmp_path: Path) -> None:
    folder = broken_copy(checkpoint, tmp_path / "broken", BAD_MODELS["truncated"][0])
    finished = _process("score", folder, *QUICK, text=_lines(RECORDS))
    assert (finished.returncode, finished.stdout, finished.stderr.count("\n")) == (1, "", 1)
    assert "is truncated or not a safetensors file" in finished.stderr


def test_demo_refuses_more_texts_than_there_are() -> None:
    _assert_one_line(_run("demo", "--texts", "999999"), "texts is 999999, but there are only")


@pytest.mark.slow
def test_demo_compares_every_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(40, "eager")
    shown = capsys.readouterr().out
    assert "equal: 0 of 40 predictions differ" in shown
    assert "asyncep (eager), streamed" in shown
    # The counts include what the engine compiled and copied while it was loaded.
    words = " ".join(shown.split())
    counts = re.search(r"compiled \((\d+) graphs?\).* ([\d.]+) (MB|GB) of experts were copied into the ring", words)
    assert counts is not None
    assert int(counts[1]) > 0


def test_no_option_gets_the_name_of_its_metavar() -> None:
    """typer 0.27 uses a metavar that is the parameter's name in capitals as the option's name: `--DEVICE`."""
    commands = [app.registered_callback, *app.registered_commands]
    options = [
        (name, option)
        for command in commands
        if command is not None and command.callback is not None
        for name, hint in get_type_hints(command.callback, include_extras=True).items()
        for option in getattr(hint, "__metadata__", ())
        if isinstance(option, OptionInfo)
    ]
    assert len(options) > 50
    # Inside Annotated, Typer stores the first name as the default.
    unnamed = [(name, option) for name, option in options if option.default is ...]
    assert [name for name, option in unnamed if option.metavar == name.upper()] == []
