"""Checkpoint folders load completely or not at all, and errors name the wrong value in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moepass import CheckpointError
from moepass.models.checkpoint.checkpoint_folders import (
    Prompt,
    load_config,
    load_prompt,
    load_tokenizer,
    meta_model,
    resolve_model,
)
from moepass.models.checkpoint.load_model import load_model
from tests.helpers.graphs.error_fields import refused
from tests.helpers.graphs.tiny_checkpoint import (
    broken_copy,
    edit_config,
    edit_weights,
    original_model,
    save_tiny_checkpoint,
)
from tests.helpers.graphs.tiny_configs import tiny_config
from tests.helpers.models.tiny import tiny_inputs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint that stores every expert separately, so that loading merges them."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "mixtral", "mixtral")


def test_loads_the_saved_weights(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load_model(checkpoint)
    original = original_model()
    inputs = tiny_inputs(original)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, original(**inputs).logits)
    assert not model.training
    assert not model.config.use_cache
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert capfd.readouterr() == ("", "")


def test_the_dtype_is_taken_and_experts_are_grouped(checkpoint: Path) -> None:
    model = load_model(checkpoint, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.config._experts_implementation == "grouped_mm"


def test_merges_single_experts(mixtral: Path) -> None:
    original = original_model("mixtral")
    inputs = tiny_inputs(original)
    with torch.no_grad():
        assert torch.equal(load_model(mixtral)(**inputs).logits, original(**inputs).logits)


def _split(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({name: weights[name] for name in keys}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, keys in parts.items() for name in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def test_loads_a_checkpoint_in_parts(checkpoint: Path, tmp_path: Path) -> None:
    assert load_model(broken_copy(checkpoint, tmp_path / "parts", _split)).num_parameters() > 0


def test_meta_model_needs_the_config_alone(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    file.write_bytes((checkpoint / "config.json").read_bytes())
    model = meta_model(resolve_model(file, config_alone=True))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _truncate_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5])


def _only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _missing_part(folder: Path) -> None:
    _split(folder)
    (folder / "b.safetensors").unlink()


def _part_elsewhere(folder: Path) -> None:
    _split(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("b.safetensors", "../b.safetensors"))


def _shrink_norm(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()


def _custom_code(folder: Path) -> None:
    edit_config(model_type="mine", auto_map={"AutoConfig": "code.Config"})(folder)
    (folder / "code.py").write_text("raise SystemExit('code of a checkpoint ran')\n")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "has no weights: neither model.safetensors",
    ),
    "truncated": (_truncate, r"model.safetensors \(\d+ bytes\) is truncated"),
    "truncated header": (_truncate_header, r"model.safetensors \(5 bytes\) is truncated"),
    "only a pickle": (_only_a_pickle, "pytorch_model.bin, a pickle, which moepass does not open"),
    "missing part": (_missing_part, "lacks b.safetensors, which model.safetensors.index.json names"),
    "part elsewhere": (_part_elsewhere, "names '../b.safetensors'; it must be a .safetensors file in the same folder"),
    "missing weight": (
        edit_weights(lambda weights: weights.pop("model.norm.weight")),
        "lacks weights that the config asks for: model.norm.weight",
    ),
    "left over": (
        edit_weights(lambda weights: weights.update(extra=torch.zeros(2))),
        "holds weights that the config does not use: extra",
    ),
    "shape": (edit_weights(_shrink_norm), r"model.norm.weight has shape \[63\], but the config asks for \[64\]"),
    "experts": (edit_config(num_local_experts=4, num_experts=4), r"experts.* has shape \[8, .*asks for \[4, "),
    "layers": (edit_config(num_hidden_layers=1), "does not use: model.layers.1"),
    "more layers": (edit_config(num_hidden_layers=9), "lacks weights that the config asks for: model.layers"),
    "malformed config": (
        lambda folder: (folder / "config.json").write_text('{"model_type": '),
        "config.json is malformed",
    ),
    "config a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json is malformed"),
    "no type": (lambda folder: (folder / "config.json").write_text("{}"), "has no model_type"),
    "unknown type": (edit_config(model_type="qwen3_mow"), "'qwen3_mow' is unknown .* did you mean qwen3_moe"),
    "no language model": (edit_config(model_type="vit"), "'vit' has no language-model head"),
    "custom code": (_custom_code, "'mine' is unknown to transformers"),
    "wrong value": (
        edit_config(num_attention_heads="four"),
        "does not fit model_type 'qwen3_moe'.*num_attention_heads",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_refused_in_one_line(case: str, checkpoint: Path, tmp_path: Path) -> None:
    edit, message = BROKEN[case]
    folder = broken_copy(checkpoint, tmp_path / "broken", edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_missing_single_expert_is_refused(mixtral: Path, tmp_path: Path) -> None:
    def drop(weights: dict[str, torch.Tensor]) -> None:
        weights.pop(next(name for name in weights if ".experts.1." in name))

    with pytest.raises(CheckpointError, match="single experts do not merge"):
        load_model(broken_copy(mixtral, tmp_path / "broken", edit_weights(drop)))


def test_a_config_whose_numbers_make_no_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = broken_copy(checkpoint, tmp_path / "broken", edit_config(hidden_size=-64))
    with pytest.raises(CheckpointError, match="negative dimension -64") as caught:
        meta_model(folder)
    assert caught.value.path == str(folder)


def test_paths_that_are_no_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    with refused(CheckpointError, path=tmp_path / "nowhere"):
        resolve_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve_model(tmp_path)
    with pytest.raises(CheckpointError, match="x is not a readable folder: File name too long"):
        resolve_model("x" * 5000)
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_model("a\0b")
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        resolve_model(checkpoint / "config.json")
    assert resolve_model(str(checkpoint)) == checkpoint


def test_tokenizer_must_be_there(checkpoint: Path, tmp_path: Path) -> None:
    folder = broken_copy(checkpoint, tmp_path / "broken", lambda copy: (copy / "tokenizer.json").unlink())
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(folder)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "phimoe"])
def test_a_config_alone_has_no_tokenizer(family: str, tmp_path: Path) -> None:
    """transformers makes an empty tokenizer for families that it knows, with which no text could be read."""
    tiny_config(family).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_of_two_files_is_a_tokenizer(tmp_path: Path) -> None:
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("a b\n")
    assert load_tokenizer(tmp_path)("ab")["input_ids"] == [2]


def test_prompt_file(checkpoint: Path, tmp_path: Path) -> None:
    assert load_prompt(checkpoint) == Prompt()
    (tmp_path / "prompt.json").write_text('{"template": "Q: {text} A:", "labels": ["x"], "max_text_tokens": 7}')
    prompt = load_prompt(tmp_path)
    assert (prompt.labels, prompt.max_text_tokens) == (("x",), 7)
    assert prompt.render("{text} {0}") == "Q: {text} {0} A:"


def test_a_pair_template_may_have_a_place_for_an_instruction(tmp_path: Path) -> None:
    file = tmp_path / "prompt.json"
    file.write_text('{"pair_template": "{instruction}: {query} {document}", "pair_instruction": "find"}')
    prompt = load_prompt(tmp_path)
    assert prompt.takes_instruction
    assert prompt.render_pair("{instruction}", "d") == "find: {instruction} d"
    assert prompt.render_pair("q", "d", "{query}") == "{query}: q d"
    assert not Prompt(pair_template="{query} {document}").takes_instruction
    file.write_text('{"pair_template": "{instruction}{instruction} {query} {document}"}')
    with pytest.raises(CheckpointError, match=r"instruction\} at most once"):
        load_prompt(tmp_path)


def test_prompts_of_sentence_transformers_are_the_default(tmp_path: Path) -> None:
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text('{"prompts": {"query": "q: "}, "default_prompt_name": null, "__version__": {}}')
    assert load_prompt(tmp_path) == Prompt(prompts={"query": "q: "})
    (tmp_path / "prompt.json").write_text('{"vector": "mean"}')
    assert load_prompt(tmp_path) == Prompt(vector="mean", prompts={"query": "q: "})
    (tmp_path / "prompt.json").write_text('{"prompts": {"own": ""}}')
    assert load_prompt(tmp_path) == Prompt(prompts={"own": ""})
    (tmp_path / "prompt.json").unlink()
    file.write_text('{"prompts": {"query": "q: "}, "default_prompt_name": "query"}')
    assert load_prompt(tmp_path) == Prompt(prompts={"query": "q: "}, default_prompt_name="query")
    file.write_text('{"default_prompt_name": "query"}')
    with pytest.raises(CheckpointError, match=r"'query'; it must be null, because there are no prompts"):
        load_prompt(tmp_path)
    file.write_text("{}")
    assert load_prompt(tmp_path) == Prompt()
    file.write_text('{"prompts": ["query"]}')
    with pytest.raises(CheckpointError, match=r"config_sentence_transformers\.json is malformed"):
        load_prompt(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is malformed"),
        ('{"template": "no place"}', "it must hold {text} exactly once"),
        ('{"template": "{text}{text}"}', "it must hold {text} exactly once"),
        ('{"labels": [1]}', r"Expected `str`, got `int` - at `\$.labels"),
        ('{"lables": []}', "unknown field `lables`"),
        ('{"prompts": {"a": "b"}, "default_prompt_name": "c"}', "'c'; it must be one of its prompts: a"),
        ('{"max_text_tokens": 0}', "max_text_tokens is 0; it must be 1 or more"),
        ('{"probe": {"input": "x", "answers": ["a"], "expected": "a"}}', "two or more different answers"),
        ('{"probe": {"input": "x", "answers": ["a", "a"], "expected": "a"}}', "two or more different answers"),
        ('{"probe": {"input": "x", "answers": ["a", "b"], "expected": "c"}}', "including the expected one"),
    ],
)
def test_wrong_prompt_file(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_prompt(tmp_path)


def test_the_demo_checkpoint_is_one() -> None:
    folder = resolve_model("demo")
    assert load_config(folder).model_type == "qwen3_moe"
    assert load_prompt(folder).labels
