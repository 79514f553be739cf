"""Untrusted checkpoints, inputs and environments: each error is one line, and no code of a checkpoint runs."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import moepass
from moepass.cli.main import app
from moepass.models.checkpoint.checkpoint_folders import load_tokenizer
from moepass.models.checkpoint.load_model import load_model
from moepass.models.errors import CheckpointError
from tests.helpers.graphs.tiny_checkpoint import broken_copy, edit_config, edit_weights, save_tiny_checkpoint

TEXTS = "".join(json.dumps({"text": text}) + "\n" for text in ("the cat sat", "a dog", "maybe"))
COMMAND = [sys.executable, "-c", "from moepass.cli.main import main; main()"]
QUICK = ["--eager", "--labels", "yes,no"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


def _run(*arguments: str | Path, text: str = TEXTS) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


def _assert_one_line(result: Any, message: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("moepass: error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


# ---- Weights that are not finite -------------------------------------------------------------------------------------


def _with_nan(weights: dict[str, torch.Tensor], token: int | None = None) -> None:
    for name, value in weights.items():
        if token is None and name == "lm_head.weight":
            value[:] = float("nan")
        elif token is not None and name == "model.embed_tokens.weight":
            value[token] = float("nan")


def test_logits_that_are_nan_are_an_error_that_names_the_line(checkpoint: Path, tmp_path: Path) -> None:
    folder = broken_copy(checkpoint, tmp_path / "nan", edit_weights(_with_nan))
    target = tmp_path / "out.jsonl"
    for more in ([], ["--output", str(target)]):
        result = _run("score", folder, *QUICK, *more, text="\n\n" + TEXTS)
        _assert_one_line(result, "line 3: the log-probabilities of the labels are nan, nan, so the model's logits")
    assert not target.exists()


def test_the_line_of_a_single_text_with_nan_is_named(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    dog = tokenizer(" dog", add_special_tokens=False)["input_ids"][-1]
    folder = broken_copy(checkpoint, tmp_path / "nan", edit_weights(lambda weights: _with_nan(weights, dog)))
    result = _run("score", folder, *QUICK, "--batch-size", "1")
    assert result.exit_code == 1
    assert result.stdout.count("\n") <= 1  # the line before may have been written
    assert "moepass: error: line 2: the log-probabilities" in result.stderr


# ---- Code of a checkpoint --------------------------------------------------------------------------------------------


def _bring_code(where: Callable[[Path], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "mine.py").write_text(
            f"open({str(folder / 'RAN')!r}, 'w').close()\n"
            "from transformers import PreTrainedConfig, PreTrainedTokenizerFast\n"
            "class Config(PreTrainedConfig):\n    model_type = 'mine'\n"
            "class Tokenizer(PreTrainedTokenizerFast):\n    pass\n"
        )
        where(folder)

    return edit


def _in_the_config(folder: Path) -> None:
    names = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model", "AutoTokenizer": ["mine.Tokenizer"] * 2}
    edit_config(model_type="mine", auto_map=names)(folder)


def _in_the_tokenizer(folder: Path) -> None:
    values = json.loads((folder / "tokenizer_config.json").read_text())
    values |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Tokenizer", "mine.Tokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["score", "explain"])
def test_a_checkpoint_with_code_is_refused_without_a_question(command: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = broken_copy(checkpoint, tmp_path / "mine", _bring_code(_in_the_config))
    words = [*COMMAND, command, str(folder), *(QUICK if command == "score" else [])]
    source = tmp_path / "texts.jsonl"
    source.write_text(TEXTS)
    words += ["--input", str(source)] if command == "score" else []
    finished = subprocess.run(words, input="y\ny\n", capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert finished.stderr == (
        f"moepass: error: {folder}/config.json: model_type 'mine' is unknown to transformers "
        + finished.stderr.partition("unknown to transformers ")[2]
    )
    assert finished.stderr.count("\n") == 1
    assert not (folder / "RAN").exists()


@pytest.mark.parametrize("where", [_in_the_config, _in_the_tokenizer])
def test_a_tokenizer_never_runs_code(
    where: Callable[[Path], None], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[object] = []

    def ask(*arguments: object) -> str:
        questions.append(arguments)
        return "y"

    monkeypatch.setattr("builtins.input", ask)
    folder = broken_copy(checkpoint, tmp_path / "mine", _bring_code(where))
    with contextlib.suppress(CheckpointError):  # some tokenizers can be read without the code
        load_tokenizer(folder)
    assert questions == []
    assert not (folder / "RAN").exists()


@pytest.mark.slow
def test_every_loader_of_transformers_is_told_to_run_no_code() -> None:
    root = Path(__file__).resolve().parents[3]
    loaders = 0
    for file in (path for room in ("models", "passes", "runtime", "moepass") for path in (root / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            # AutoConfig and from_config may run code too. A GenerationConfig contains only data.
            assert "AutoConfig" not in name, file
            if name.endswith(".from_pretrained") and not name.startswith("GenerationConfig"):
                assert isinstance(node, ast.Call)
                arguments = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert arguments.get("trust_remote_code") == "False", f"{file}: {name}"
                loaders += 1
    assert loaders == 2


# ---- Checkpoints that cannot be computed ----------------------------------------------------------------------------


def _to_fp8(folder: Path) -> None:
    edit_weights(
        lambda weights: weights.update(
            {name: value.to(torch.float8_e4m3fn) for name, value in weights.items() if "experts" in name}
        )
    )(folder)


def _quantised(folder: Path) -> None:
    _to_fp8(folder)
    edit_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})(folder)


def _typed(folder: Path) -> None:
    _to_fp8(folder)
    edit_config(dtype="float8_e4m3fn")(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_quantised, "quantised by 'fp8', but the checkpoint lacks"),
        (_typed, "is torch.float8_e4m3fn, in which moepass cannot compute; dequantise the weights"),
    ],
)
def test_an_fp8_checkpoint_without_scales_is_refused_with_a_remedy(
    edit: Callable[[Path], None], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = broken_copy(checkpoint, tmp_path / "fp8", edit)
    _assert_one_line(_run("score", folder, *QUICK), message)
    explained = _run("explain", folder, "--format", "json")
    assert explained.exit_code == 0, explained.output


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_in_8_bits_without_their_scales_are_refused(
    dtype: torch.dtype, checkpoint: Path, tmp_path: Path
) -> None:
    def convert(weights: dict[str, torch.Tensor]) -> None:
        weights |= {name: value.to(dtype) for name, value in weights.items() if "experts" in name}

    folder = broken_copy(checkpoint, tmp_path / "bits", edit_weights(convert))
    for load in (load_model, moepass.load_pretrained):
        with pytest.raises(CheckpointError, match=r"is stored as (F8_E4M3|I8), and the config does not say how to deq"):
            load(folder)


def test_a_folder_with_an_adapter_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    def add(folder: Path) -> None:
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/model"}')

    folder = broken_copy(checkpoint, tmp_path / "adapter", add)
    _assert_one_line(_run("score", folder, *QUICK), "holds an adapter (adapter_config.json); merge it into its model")
    with pytest.raises(CheckpointError, match="holds an adapter"):
        moepass.load_pretrained(folder)


def test_more_experts_per_token_than_there_are(checkpoint: Path, tmp_path: Path) -> None:
    folder = broken_copy(checkpoint, tmp_path / "broken", edit_config(num_experts_per_tok=99))
    for words in (["score", folder, *QUICK], ["explain", folder]):
        _assert_one_line(
            _run(*words), "num_experts_per_tok is 99, but num_experts is 8; a token can use 1 to 8 experts"
        )


@pytest.mark.slow
def test_a_config_that_does_not_fit_together_leaves_no_traceback(checkpoint: Path, tmp_path: Path) -> None:
    folder = broken_copy(checkpoint, tmp_path / "broken", edit_config(num_key_value_heads=3))
    finished = subprocess.run([*COMMAND, "explain", str(folder)], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    assert finished.stderr.startswith("moepass: error: broken cannot be captured; perhaps the numbers of its config")
    assert finished.stderr.count("\n") == 1


# ---- Input and environment -------------------------------------------------------------------------------------------


def test_a_line_of_12_mb_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    long = json.dumps({"text": "the cat " * 1_500_000})
    result = _run("score", tmp_path / "nowhere", *QUICK, text=TEXTS + long)
    _assert_one_line(result, "line 4 of standard input is longer than 4194304 bytes, the limit; split it")


def test_a_deeply_nested_line_is_refused(checkpoint: Path) -> None:
    deep = '{"text": "a", "more": ' + "[" * 100_000 + "]" * 100_000 + "}"
    _assert_one_line(
        _run("score", checkpoint, *QUICK, text=TEXTS + deep),
        "line 4 of standard input is not valid JSON: it is nested deeper",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threads", "1000000000"], "threads is 1000000000; the limit is 1024"),
        (["--batch-size", "1000000000000"], "batch_size is 1000000000000; the limit is 65536"),
        (["--labels", ",".join(f"a{number}" for number in range(2000))], "the number of labels is 2000; the limit is"),
        (["--labels", "[" * 100_000], "are not a JSON list of strings"),
        (["--labels", "no," + "yes " * 90], "the longest label has 90 tokens, but the model takes at most 64"),
    ],
)
def test_numbers_of_score_have_limits(options: list[str], message: str, checkpoint: Path) -> None:
    result = _run("score", checkpoint, *QUICK, *options)
    _assert_one_line(result, message)
    assert len(result.stderr) < 1200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "1000"], "; the limit is 512"),
        (["--hardware", "1000000xh100"], "ranks is 1,000,000; it must lie between 1 and 512"),
        (["--batch", "1000000000"], "; the limit is "),
    ],
)
def test_numbers_of_explain_have_limits(options: list[str], message: str) -> None:
    _assert_one_line(_run("explain", "demo", *options), message)


@pytest.mark.parametrize("command", ["score", "explain", "calibrate"])
def test_a_folder_as_output_is_named_once(command: str, checkpoint: Path, tmp_path: Path) -> None:
    words = {"score": ["score", checkpoint, *QUICK], "explain": ["explain", checkpoint], "calibrate": ["calibrate"]}
    result = _run(*words[command], "--output", tmp_path)
    _assert_one_line(result, "")
    assert result.stderr == f"moepass: error: output {str(tmp_path)!r} is a folder; give the name of a file\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["score", "explain", "demo"])
def test_a_compiler_cache_that_cannot_be_written_is_named(command: str, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    words = {"score": ["score", str(checkpoint), "--labels", "yes,no"], "explain": ["explain", str(checkpoint)]}
    for cache in (file, file / "below"):
        finished = subprocess.run(
            [*COMMAND, *words.get(command, [command])],
            input=TEXTS,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        )
        assert finished.returncode == 1
        assert finished.stdout == ""
        assert finished.stderr.startswith(f"moepass: error: TORCHINDUCTOR_CACHE_DIR is {str(cache)!r}, which cannot be")
        assert "set TORCHINDUCTOR_CACHE_DIR to a writable folder" in finished.stderr
        assert finished.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["0"], "chunk_tokens is '0'; it must be a number of tokens from 1 on, or 'auto'"),
        (["all"], "chunk_tokens is 'all'; it must be"),
        (["auto"], "there is no memory budget that chunks could fit into"),
        (["auto", "--memory-budget", "1GB", "--home", "device"], "and a home that experts are streamed from"),
    ],
)
def test_wrong_chunk_sizes_are_refused(checkpoint: Path, given: list[str], words: str) -> None:
    result = _run("serve", checkpoint, "--chunk-tokens", *given)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_tuning_is_refused_if_there_are_no_kernels(checkpoint: Path) -> None:
    for options in (["--device", "cpu"], ["--device", "cuda", "--eager"], ["--device", "cuda", "--lower", "eager"]):
        result = _run("serve", checkpoint, *options, "--tune-kernels")
        assert result.exit_code == 2
        assert "experts have no Triton kernels" in result.stderr
