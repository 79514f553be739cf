"""`moepass pack`: the copy loads as the same model from every home, and a damaged or unfinished copy is an error."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import moepass
from moepass.models.checkpoint.checkpoint_files import CheckpointFiles
from moepass.models.checkpoint.load_model import load_model
from moepass.models.errors import CheckpointError, InputError, MoepassError
from moepass.models.layouts.published import PackedFormat
from moepass.runtime.offload import pack_checkpoint as packing
from moepass.runtime.offload.pack_checkpoint import PackReport, pack_checkpoint
from tests.helpers.models.quantized_checkpoints import FORMS, save_quantized
from tests.helpers.models.tiny import tiny_inputs, tiny_model

pytestmark = pytest.mark.usefixtures("no_grad")


def _saved(folder: Path, family: str = "qwen3_moe", dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    # As wide as it takes for packing to save bytes.
    sizes = {"hidden_size": 128, "moe_intermediate_size": 96} if family == "qwen3_moe" else {}
    tiny_model(family, dtype=dtype, num_hidden_layers=2, **sizes, **config).save_pretrained(folder)
    return folder


def _pack(source: Path, target: Path, format: PackedFormat = "lossless") -> PackReport:
    return pack_checkpoint(source, target, format, lambda done, total: None)


def _assert_same_weights(first: Path, second: Path) -> None:
    expected, state = load_model(first).state_dict(), load_model(second).state_dict()
    assert state.keys() == expected.keys()
    for name, weight in state.items():
        assert weight.dtype == expected[name].dtype
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_packed_checkpoint_is_the_same_model(dtype: torch.dtype, tmp_path: Path) -> None:
    source = _saved(tmp_path / "source", dtype=dtype)
    (source / "tokenizer.json").write_text("{}")
    report = _pack(source, tmp_path / "packed")
    assert report.packed_bytes < report.expert_bytes
    stored = sum(file.stat().st_size for file in (tmp_path / "packed").glob("experts-*.safetensors"))
    assert report.packed_bytes <= stored <= report.packed_bytes * 1.2
    assert (tmp_path / "packed" / "tokenizer.json").read_text() == "{}"
    _assert_same_weights(source, tmp_path / "packed")


# Stacked experts with biases and transposed matrices; a shared expert and a dense layer, which are not packed.
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_other_layouts_of_experts(family: str, tmp_path: Path) -> None:
    source = _saved(tmp_path / "source", family)
    _pack(source, tmp_path / "packed")
    _assert_same_weights(source, tmp_path / "packed")
    inputs = tiny_inputs(load_model(source))
    expected = moepass.load_pretrained(source)(**inputs).logits
    assert torch.equal(moepass.load_pretrained(tmp_path / "packed")(**inputs).logits, expected)


@pytest.mark.parametrize(
    "home", ["host", pytest.param("disk", marks=pytest.mark.slow), pytest.param("device", marks=pytest.mark.slow)]
)
def test_packed_experts_stream_from_every_home(home: str, tmp_path: Path) -> None:
    source = _saved(tmp_path / "source")
    _pack(source, tmp_path / "packed")
    inputs = tiny_inputs(load_model(source))
    expected = load_model(source)(**inputs).logits
    model = moepass.load_pretrained(tmp_path / "packed", home=home)
    with moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
        assert torch.equal(compiled(**inputs).logits, expected)
    formats = [bank.format for bank in compilations[0].plan.banks]
    assert [(format.decoder, format.link_bytes < format.slot_bytes) for format in formats] == [
        ("lossless bf16", True)
    ] * 2


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2**-24), (torch.float16, 2**-11)], ids=str)
def test_elf_keeps_its_bound_and_reports_the_error(dtype: torch.dtype, bound: float, tmp_path: Path) -> None:
    source = _saved(tmp_path / "source", dtype=dtype)
    report = _pack(source, tmp_path / "packed", "elf")
    assert report.packed_bytes < 0.8 * report.expert_bytes
    expected, state = load_model(source).state_dict(), load_model(tmp_path / "packed").state_dict()
    errors = [float((weight.double() - expected[name].double()).abs().max()) for name, weight in state.items()]
    assert 0 < max(errors) <= bound
    assert report.largest_error == max(errors)
    streamed = moepass.load_pretrained(tmp_path / "packed")
    inputs = tiny_inputs(streamed)
    assert torch.equal(streamed(**inputs).logits, load_model(tmp_path / "packed")(**inputs).logits)
    with pytest.raises(CheckpointError, match="has no experts that elf packing takes"):
        _pack(_saved(tmp_path / "bf16"), tmp_path / "none", "elf")


def test_what_does_not_become_smaller_stays_as_it_is(tmp_path: Path) -> None:
    source = _saved(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    for key, value in weights.items():
        if ".experts." in key and "down_proj" not in key:
            weights[key] = torch.randint(0, 256, (*value.shape, 2), dtype=torch.uint8).view(value.dtype)[..., 0]
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    _pack(source, tmp_path / "packed")
    keys = {key for file in (tmp_path / "packed").glob("experts-*") for key in load_file(file)}
    assert {key.endswith("_proj.weight") for key in keys if "down_proj" not in key} == {True}
    assert {key.endswith("_proj.weight") for key in keys if "down_proj" in key} == {False}
    restored = {
        key: value for file in (tmp_path / "packed").glob("*.safetensors") for key, value in load_file(file).items()
    }
    assert all(
        torch.equal(restored[key].view(torch.int16), weights[key].view(torch.int16))
        for key in weights
        if key in restored
    )


def test_experts_that_layers_share_are_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _saved(tmp_path / "source")
    alone = _pack(source, tmp_path / "alone")
    find = packing.find_expert_modules

    def with_tied_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        return {f"{path}{ending}": module for ending in ("", ".tied") for path, module in find(model).items()}

    monkeypatch.setattr(packing, "find_expert_modules", with_tied_layers)
    assert _pack(source, tmp_path / "packed") == alone
    files = [sorted(file.name for file in (tmp_path / name).iterdir()) for name in ("alone", "packed")]
    assert files[0] == files[1]
    _assert_same_weights(source, tmp_path / "packed")


def test_an_interrupted_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = _saved(tmp_path / "source"), tmp_path / "packed"
    write, written = packing._write, []

    def fail_at_the_second_file(file: Path, *arguments: Any, **keywords: Any) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(file.name)
        write(file, *arguments, **keywords)

    monkeypatch.setattr(packing, "_write", fail_at_the_second_file)
    with pytest.raises(KeyboardInterrupt):
        _pack(source, target)
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        moepass.load_pretrained(target)
    first = (target / "experts-00000.safetensors").stat()
    monkeypatch.setattr(packing, "_write", write)
    _pack(source, target)
    assert (target / "experts-00000.safetensors").stat() == first
    _assert_same_weights(source, target)


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_incomplete(tmp_path: Path) -> None:
    source, target = _saved(tmp_path / "source", num_experts=64), tmp_path / "packed"
    for _ in range(30):
        process = subprocess.Popen([sys.executable, "-m", "moepass.cli", "pack", str(source), "-o", str(target)])
        while process.poll() is None and not list(target.glob(".*.part")):
            pass
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
    else:
        assert _pack(source, target)
    _pack(source, target)
    _assert_same_weights(source, target)
    assert not list(target.glob(".*"))


def test_a_file_that_is_read_back_with_other_bytes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _saved(tmp_path / "source")

    def save_with_another_bit(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        key = next(key for key in tensors if key.endswith("_fractions"))
        tensors[key].view(-1)[5] ^= 1
        save_file(tensors, file, metadata)

    monkeypatch.setattr(packing, "save_file", save_with_another_bit)
    with pytest.raises(CheckpointError, match=r"does not have its checksum|read back with other bytes"):
        _pack(source, tmp_path / "packed")
    assert [file.name for file in (tmp_path / "packed").iterdir()] == ["moepass-pack.json"]


@pytest.mark.parametrize("home", ["host", "device", "disk"])
@pytest.mark.parametrize("ending", ["fractions", "exponents"])
def test_a_changed_byte_is_an_error(home: str, ending: str, tmp_path: Path) -> None:
    source, target = _saved(tmp_path / "source"), tmp_path / "packed"
    _pack(source, target)
    weights = load_file(target / "experts-00001.safetensors")
    weights[f"model.layers.1.mlp.experts.3.up_proj.weight_bf16_{ending}"].view(-1)[99] ^= 4
    save_file(weights, target / "experts-00001.safetensors", {"format": "pt"})
    with pytest.raises(MoepassError, match=r"model\.layers\.1\.mlp\.experts.*matrix 3 of packed weights"):
        # Experts in files are read by the first run.
        moepass.load_pretrained(target, home=home)(**tiny_inputs(load_model(source)))


def test_bad_sources_and_targets(tmp_path: Path) -> None:
    source = _saved(tmp_path / "source")
    quantised, _ = save_quantized(tiny_model("qwen3_moe", dtype=torch.bfloat16), FORMS["nvfp4"], tmp_path / "nvfp4")
    with pytest.raises(CheckpointError, match="is quantised or packed already"):
        _pack(quantised, tmp_path / "packed")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(InputError, match="is not empty, and `moepass pack` did not write it"):
        _pack(source, tmp_path / "full")
    _pack(source, tmp_path / "packed")
    with pytest.raises(CheckpointError, match="is quantised or packed already"):
        _pack(tmp_path / "packed", tmp_path / "twice")
    other = _saved(tmp_path / "other")
    with pytest.raises(InputError, match=r"was begun for source in lossless format, or .* has changed since"):
        _pack(other, tmp_path / "packed")
    dense = Qwen3Config(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64, head_dim=16)
    Qwen3ForCausalLM(dense).save_pretrained(tmp_path / "dense")
    with pytest.raises(CheckpointError, match="has no experts that lossless packing takes"):
        _pack(tmp_path / "dense", tmp_path / "none")


def test_an_unfinished_first_file_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / ".moepass-pack.json.part").write_text("{")
    source = _saved(tmp_path / "source")
    _pack(source, tmp_path / "packed")
    _assert_same_weights(source, tmp_path / "packed")


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    source, target = _saved(tmp_path / "source"), tmp_path / "packed"
    with packing._locked(target), pytest.raises(InputError, match="another process is writing to"):
        _pack(source, target)
    _pack(source, target)


@pytest.mark.parametrize("failing", ["save_file", "_finish"])
def test_errors_of_the_disk_are_named(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _saved(tmp_path / "source")

    def fail(*arguments: Any) -> None:
        raise SafetensorError("No space left") if failing == "save_file" else OSError(28, "No space left")

    with monkeypatch.context() as patch:
        patch.setattr(packing, failing, fail)
        with pytest.raises(InputError, match="packed cannot be written to: No space left"):
            _pack(source, tmp_path / "packed")
    _pack(source, tmp_path / "packed")
    _assert_same_weights(source, tmp_path / "packed")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_config_without_dtype_stays_that_of_the_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    source = _saved(tmp_path / "source", dtype=dtype)
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    _pack(source, tmp_path / "packed")
    _assert_same_weights(source, tmp_path / "packed")


def test_experts_that_are_computed_in_another_dtype_are_not_packed(tmp_path: Path) -> None:
    source = _saved(tmp_path / "source", dtype=torch.float32)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    with pytest.raises(CheckpointError, match="stored and computed in bf16, fp16, fp32"):
        _pack(source, tmp_path / "packed")


def test_another_dtype_decodes_while_loading(tmp_path: Path) -> None:
    source = _saved(tmp_path / "source", dtype=torch.float32)
    _pack(source, tmp_path / "packed")
    models = [moepass.load_pretrained(folder, dtype=torch.bfloat16) for folder in (source, tmp_path / "packed")]
    inputs = tiny_inputs(models[0])
    assert torch.equal(models[0](**inputs).logits, models[1](**inputs).logits)
    sizes = [moepass.offload_report(model).home_bytes for model in models]
    assert sizes[0] == sizes[1]


def test_scalars_and_folders_are_copied(tmp_path: Path) -> None:
    source = _saved(tmp_path / "source")
    (source / "templates").mkdir()
    (source / "templates" / "chat.jinja").write_text("x")
    (source / "pytorch_model.bin.index.json").write_text("{}")
    file = tmp_path / "scalar.safetensors"
    save_file({"scale": torch.tensor(0.5)}, file)
    files = CheckpointFiles([file])
    packing._write(tmp_path / "copy.safetensors", files, list(files), {})
    assert load_file(tmp_path / "copy.safetensors")["scale"] == 0.5
    _pack(source, tmp_path / "packed")
    assert (tmp_path / "packed" / "templates" / "chat.jinja").read_text() == "x"
    assert not (tmp_path / "packed" / "pytorch_model.bin.index.json").exists()


def test_transformers_finds_no_weights_in_a_packed_checkpoint(tmp_path: Path) -> None:
    _pack(_saved(tmp_path / "source"), tmp_path / "packed")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _saved(tmp_path / "source")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=10))
    with pytest.raises(InputError, match=r"has room for 10 bytes; packing .* needs up to"):
        _pack(source, tmp_path / "packed")
    assert list((tmp_path / "packed").iterdir()) == []
