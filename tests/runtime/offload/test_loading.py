"""`load_pretrained` is equivalent to from_pretrained and offload_experts, and each rank reads only its own experts."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, conversion_mapping
from transformers.core_model_loading import MergeModulelist, Transpose, WeightConverter

import moepass
from moepass.models.checkpoint import checkpoint_files, checkpoint_folders
from moepass.models.checkpoint.checkpoint_files import CheckpointFiles, StoredTensor
from moepass.models.checkpoint.load_model import load_model
from moepass.models.formulas.expert_placement import shard_bounds
from moepass.runtime.offload import loading
from moepass.runtime.offload.loading import shown_progress
from moepass.runtime.offload.offload import OffloadReport
from moepass.runtime.ranks.rendezvous import PeerError
from tests.helpers.graphs.tiny_checkpoint import (
    broken_copy,
    edit_config,
    edit_weights,
    save_tiny_checkpoint,
)
from tests.helpers.models.tiny import (
    EXPERT_KINDS,
    TinyModelUnavailableError,
    discover_expert_families,
    discovered_tiny_model,
    main_result,
    tiny_inputs,
    tiny_model,
)
from tests.helpers.processes.ranks import run_ranks

# The package's attribute of that name may be the function, so the module is imported by name.
LOAD_MODEL = importlib.import_module("moepass.models.checkpoint.load_model")
# The code of these families writes to single numbers of loaded weights.
CHANGE_LOADED_WEIGHTS = {"hy_v4", "zaya"}
# These families store rows of gate and up alternately, so that banks have to be written for home disk.
HAVE_TO_BE_MADE = {"inkling2"}
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")


def _save(folder: Path, family: str, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB") -> Path:
    model = tiny_model(family, dtype=dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two layers of 8 experts, with one stored tensor per expert and projection, in several files."""
    folder = tmp_path_factory.mktemp("checkpoint") / "parts"
    tiny_model("qwen3_moe", num_hidden_layers=2).save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "whole")


def _reference(folder: Path, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, OffloadReport]:
    model = load_model(folder, dtype=dtype)
    return model, moepass.offload_experts(model)


def _check_same(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Check that every bit and attribute is the same as after `from_pretrained` and `offload_experts`."""
    _check_same_as(*_reference(folder, dtype), model)


def _check_same_as(reference: PreTrainedModel, report: OffloadReport, model: PreTrainedModel) -> None:
    banks = moepass.offload_report(model).store.banks
    for bank, expected in zip(banks, report.store.banks, strict=True):
        assert bank.spec == expected.spec
        for tensor, wanted in zip(bank.views(bank.shard), expected.views(expected.shard), strict=True):
            assert torch.equal(tensor, wanted)
    _check_dense_same(model, reference)
    assert moepass.offload_report(model).home_bytes == report.home_bytes
    assert model.config.to_dict() == reference.config.to_dict()
    assert getattr(model, "generation_config", None) == getattr(reference, "generation_config", None)
    assert model.name_or_path == reference.name_or_path
    _check_outputs_same(model, reference)


def _check_outputs_same(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    inputs = tiny_inputs(model)
    with torch.no_grad():
        expected = main_result(reference(**inputs))
        for _ in range(2):
            assert torch.equal(main_result(model(**inputs)), expected)


def _check_dense_same(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    for tensors in ("named_parameters", "named_buffers"):
        actual, expected = (dict(getattr(each, tensors)()) for each in (model, reference))
        assert list(actual) == list(expected)
        for name, wanted in expected.items():
            tensor = actual[name]
            assert (type(tensor), tensor.dtype, tensor.stride()) == (type(wanted), wanted.dtype, wanted.stride())
            assert name.endswith("shard") or torch.equal(tensor, wanted)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert [module.training for module in model.modules()] == [module.training for module in reference.modules()]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("family", EXPERT_KINDS)
def test_families_are_the_same_in_bfloat16_and_in_parts(family: str, tmp_path: Path) -> None:
    folder = _save(tmp_path, family, torch.bfloat16, "60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    _check_same(moepass.load_pretrained(folder), folder)


# Discovery finds all other families.
@pytest.mark.slow
def test_llama4_is_the_same_in_float32_and_in_one_file(tmp_path: Path) -> None:
    folder = _save(tmp_path, "llama4")
    _check_same(moepass.load_pretrained(folder), folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(record.name for record in discover_expert_families()))
def test_every_family_of_transformers_is_the_same_or_refused(family: str, tmp_path: Path) -> None:
    """Experts are read into memory, stay in the files of the checkpoint, or stay in files that are written first."""
    record = next(record for record in discover_expert_families() if record.name == family)
    try:
        discovered_tiny_model(record).save_pretrained(tmp_path)
        reference, report = _reference(tmp_path)
    except (TinyModelUnavailableError, moepass.CheckpointError) as error:
        pytest.skip(str(error))
    if family in CHANGE_LOADED_WEIGHTS:
        with pytest.raises(moepass.InputError, match=r"changes a weight that is not read yet; use from_pretrained"):
            moepass.load_pretrained(tmp_path)
        return
    _check_same_as(reference, report, moepass.load_pretrained(tmp_path))
    if sys.platform != "linux":
        return  # home disk advises the Linux kernel
    if family in HAVE_TO_BE_MADE:
        with pytest.raises(moepass.InputError, match="name a folder"):
            moepass.load_pretrained(tmp_path, home="disk")
    else:
        _check_outputs_same(moepass.load_pretrained(tmp_path, home="disk"), reference)
    banks = tmp_path / "banks"
    _check_outputs_same(moepass.load_pretrained(tmp_path, home=moepass.Disk(folder=banks)), reference)
    assert banks.exists() == (family in HAVE_TO_BE_MADE)


@pytest.mark.parametrize("family", ["deepseek_v3", "granitemoe"])
def test_another_type_is_converted_to_as_from_pretrained_does(family: str, tmp_path: Path) -> None:
    # deepseek_v3 has router weights in float32; granitemoe stores experts stacked.
    folder = _save(tmp_path, family)
    _check_same(moepass.load_pretrained(folder, dtype=torch.bfloat16), folder, torch.bfloat16)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", tie_word_embeddings=True, num_hidden_layers=1).save_pretrained(tmp_path)
    model = moepass.load_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    _check_same(model, tmp_path)


@pytest.mark.slow
def test_a_loaded_model_compiles_with_no_refusal(checkpoint: Path) -> None:
    model = moepass.load_pretrained(str(checkpoint), slots=1)
    inputs = tiny_inputs(model)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
        assert torch.equal(compiled(**inputs).logits, load_model(checkpoint)(**inputs).logits)
    assert not compilations[0].plan.refusals
    assert len(compilations[0].plan.banks) == 2


class _Counted:
    """A replacement of `safe_open` that counts the bytes read from each stored tensor."""

    def __init__(self, file: Any, counts: Counter[str]) -> None:
        self.file, self.counts = file, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def get_slice(self, key: str) -> Any:
        return _CountedSlice(self.file.get_slice(key), key, self.counts)


class _CountedSlice:
    def __init__(self, stored: Any, key: str, counts: Counter[str]) -> None:
        self.stored, self.key, self.counts = stored, key, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stored, name)

    def __getitem__(self, rows: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.stored[rows]
        self.counts[self.key] += tensor.nbytes
        return tensor


def _count_reads(patched: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    safe_open = checkpoint_files.safe_open
    patched.setattr(checkpoint_files, "safe_open", lambda *args, **kw: _Counted(safe_open(*args, **kw), counts))
    return counts


def _load_on_a_rank(folder: Path, compiles: bool) -> tuple[dict[str, int], int, list[tuple[int, int]]]:
    """Return the bytes read from each stored tensor, the bytes of the shards, and the calls of the progress hook."""
    progress: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patched:
        counts = _count_reads(patched)
        model = moepass.load_pretrained(
            folder, home=moepass.Peer(timeout_s=50), progress=lambda done, total: progress.append((done, total))
        )
    report = moepass.offload_report(model)
    assert report.home == "peer"
    reference, _ = _reference(folder)
    _check_dense_same(model, reference)
    inputs = tiny_inputs(model)
    with torch.no_grad():
        expected = reference(**inputs).logits
        assert torch.equal(model(**inputs).logits, expected)
        if compiles:
            compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
            assert torch.equal(compiled(**inputs).logits, expected)
    return dict(counts), report.home_bytes, progress


def _expert_of(key: str) -> int:
    return int(key.split(".experts.")[1].split(".")[0])


@pytest.mark.sampled(every=2)
@on_linux
@pytest.mark.parametrize(("ranks", "compiles"), [(2, False), (3, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_each_rank_reads_its_own_experts_alone(checkpoint: Path, ranks: int, compiles: bool) -> None:
    bounds = shard_bounds(8, ranks)
    outcomes = run_ranks(ranks, _load_on_a_rank, checkpoint, compiles)
    stored = {tensor.key: tensor.nbytes for tensor in CheckpointFiles(sorted(checkpoint.glob("*.safetensors")))}
    dense = {key for key in stored if ".experts." not in key}
    for rank, (counts, shard_bytes, progress) in enumerate(outcomes):
        shard_keys = {key for key in stored if key not in dense and bounds[rank] <= _expert_of(key) < bounds[rank + 1]}
        assert set(counts) == shard_keys | dense
        assert all(counts[key] == stored[key] for key in shard_keys)
        assert sum(stored[key] for key in shard_keys) == shard_bytes
        total = shard_bytes + sum(stored[key] for key in dense)
        assert progress[-1] == (total, total)
        assert progress == sorted(progress)


def _first_layer_stays(folder: Path, layer_bytes: int) -> tuple[tuple[str, ...], int]:
    progress: list[tuple[int, int]] = []
    model = moepass.load_pretrained(
        folder, home=moepass.Peer(timeout_s=50), resident_bytes=layer_bytes, progress=lambda *now: progress.append(now)
    )
    report = moepass.offload_report(model)
    with torch.no_grad():
        inputs = tiny_inputs(model)
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager"})
        assert torch.equal(compiled(**inputs).logits, _reference(folder)[0](**inputs).logits)
    assert progress[-1][0] == progress[-1][1]
    return report.layers, report.home_bytes


@pytest.mark.slow
def test_the_first_layer_is_read_by_every_rank_where_it_stays(checkpoint: Path) -> None:
    report = _reference(checkpoint)[1]
    layer_bytes = report.store.banks[0].spec.format.slot_bytes
    for layers, _ in run_ranks(2, _first_layer_stays, checkpoint, layer_bytes):
        assert layers == report.layers[1:]


def _stacked_on_a_rank(folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patched:
        counts = _count_reads(patched)
        model = moepass.load_pretrained(folder, home=moepass.Peer(timeout_s=50))
    with torch.no_grad():
        inputs = tiny_inputs(model)
        # The reference is offloaded too: a file may have matrices at unaligned addresses, where products round
        # differently.
        assert torch.equal(model(**inputs).logits, _reference(folder)[0](**inputs).logits)
    return sum(nbytes for key, nbytes in counts.items() if "block_sparse_moe" in key and "router" not in key)


@pytest.mark.slow
@on_linux
def test_stacked_experts_are_cut(tmp_path: Path) -> None:
    _save(tmp_path, "granitemoe")
    files = CheckpointFiles([tmp_path / "model.safetensors"])
    stacked = sum(t.nbytes for t in files if "block_sparse_moe" in t.key and "router" not in t.key)
    assert run_ranks(3, _stacked_on_a_rank, tmp_path) == [stacked * count // 8 for count in (2, 3, 3)]


def _differs(folders: list[Path]) -> str:
    try:
        moepass.load_pretrained(folders[dist.get_rank()], home=moepass.Peer(timeout_s=50))
    except moepass.MoepassError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was wrong"


def _scale(name: str) -> Callable[[Path], None]:
    return edit_weights(lambda weights: weights[name].mul_(2.0))


@on_linux
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            edit_config(rms_norm_eps=1e-3),
            r"DisagreementError: ranks disagree on config.json \(a digest\): \w+ on rank 0, \w+",
        ),
        (_scale("model.layers.1.self_attn.q_proj.weight"), "DisagreementError: ranks disagree on the dense weights"),
        (edit_weights(lambda all_: all_.update({key: value.bfloat16() for key, value in all_.items()})), "the tensors"),
    ],
    ids=["config", "weights", "tensors"],
)
def test_ranks_with_different_checkpoints_get_one_error(
    whole: Path, tmp_path: Path, edit: Callable[[Path], None], message: str
) -> None:
    texts = run_ranks(2, _differs, [whole, broken_copy(whole, tmp_path / "other", edit)])
    assert texts[0] == texts[1]
    assert re.search(message, texts[0])
    assert texts[0].endswith("give every rank the same checkpoint")


def _keeps_other_layers(folder: Path) -> str:
    with pytest.raises(PeerError) as caught:
        moepass.load_pretrained(folder, home=moepass.Peer(timeout_s=50), resident_bytes=1_000_000 * dist.get_rank())
    return str(caught.value)


@on_linux
def test_ranks_with_different_resident_layers_get_an_error(whole: Path) -> None:
    (text,) = set(run_ranks(2, _keeps_other_layers, whole))
    assert (
        text
        == "ranks disagree on resident_bytes: 0 on rank 0, 1000000 on rank 1; give every rank the same resident_bytes"
    )


@on_linux
def test_missing_files_on_one_rank_are_an_error_on_the_others(whole: Path, tmp_path: Path) -> None:
    texts = run_ranks(2, _differs, [whole, tmp_path / "nowhere"])
    assert texts[1].startswith(f"CheckpointError: {tmp_path / 'nowhere'} does not exist")
    assert texts[0].startswith(f"PeerError: rank 1 failed: CheckpointError: {tmp_path / 'nowhere'} does not exist")


def _alone(folder: Path) -> str:
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(PeerError) as caught:
        moepass.load_pretrained(folder, home=moepass.Peer(timeout_s=0.5))
    return str(caught.value)


@on_linux
def test_a_rank_that_does_not_come_is_named(whole: Path) -> None:
    text = run_ranks(2, _alone, whole)[0]
    assert text.startswith("rank 1 did not publish a description of its checkpoint within 0.5 s; every rank")
    assert "load_pretrained" in text


def test_peers_need_a_process_group(whole: Path) -> None:
    with pytest.raises(moepass.InputError, match=r"torch\.distributed, which is not initialised"):
        moepass.load_pretrained(whole, home="peer")


EXPERT = "model.layers.0.mlp.experts.3.{}_proj.weight"


def _without_an_expert(weights: dict[str, torch.Tensor]) -> None:
    for projection in ("gate", "up", "down"):
        del weights[EXPERT.format(projection)]


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
        r"model.safetensors \(\d+ bytes\) is truncated",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "is not a checkpoint: it has no config.json"),
    "missing projection": (
        edit_weights(lambda weights: weights.pop(EXPERT.format("gate"))),
        "the weights of single experts do not merge",
    ),
    "missing expert": (edit_weights(_without_an_expert), r"experts\.\w+ has shape \[7, .*asks for \[8, .*and 1 more"),
    "narrow expert": (
        edit_weights(lambda weights: weights.update({EXPERT.format("up"): torch.zeros(31, 64)})),
        "the weights of single experts do not merge",
    ),
    "missing norm": (edit_weights(lambda weights: weights.pop("model.norm.weight")), "lacks .*: model.norm.weight"),
    "left over": (edit_weights(lambda weights: weights.update(extra=torch.zeros(2))), "does not use: extra"),
    "fewer experts": (edit_config(num_local_experts=4, num_experts=4), r"experts.* has shape \[8, .*asks for \[4, "),
    "more layers": (edit_config(num_hidden_layers=9), "lacks weights that the config asks for: model.layers"),
    "quantised": (
        edit_config(quantization_config={"quant_method": "aqlm"}),
        "quant_method is 'aqlm', which moepass cannot decode; it decodes awq, compressed-tensors, fp8",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_checkpoints_are_one_clear_line(whole: Path, tmp_path: Path, how: str) -> None:
    edit, message = BROKEN[how]
    folder = broken_copy(whole, tmp_path / "broken", edit)
    with pytest.raises((moepass.CheckpointError, moepass.InputError), match=message) as caught:
        moepass.load_pretrained(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_of_another_size_is_not_guessed(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folders, "_MADE_UP_NUMBERS", 0)
    folder = broken_copy(whole, tmp_path / "large", edit_config(num_local_experts=10_000, num_experts=10_000))
    with pytest.raises(moepass.CheckpointError, match=r"its files hold \d+ numbers, but the model has \d+"):
        moepass.load_pretrained(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"home": "tape"}, "home is 'tape'; it must be one of device, disk, host, hybrid, peer"),
        ({"slots": 0}, "slots is 0"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'; it must be a floating point type"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"progress": 3}, "progress is 3; it must be a function"),
    ],
)
def test_wrong_options_are_named(whole: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(moepass.OptionError, match=message):
        moepass.load_pretrained(whole, **options)


def test_models_without_experts_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(moepass.InputError, match="LlamaForCausalLM has no expert weights to offload"):
        moepass.load_pretrained(tmp_path)
    with pytest.raises(moepass.InputError, match="LlamaForCausalLM has no offloaded experts"):
        moepass.offload_report(load_model(tmp_path))


def test_a_conversion_that_mixes_experts_is_refused(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def conversions(model_type: str) -> list[WeightConverter] | None:
        converters = original(model_type)
        if converters is None:
            return None
        # Experts are concatenated before they become the first dimension, so no expert is a row in between.
        down = WeightConverter(
            source_patterns=["mlp.experts.*.down_proj.weight"],
            target_patterns="mlp.experts.down_proj",
            operations=[MergeModulelist(dim=1), Transpose(0, 1)],
        )
        return [down] + [item for item in converters if "down" not in str(item.source_patterns)]

    original = conversion_mapping.get_checkpoint_conversion_mapping
    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", conversions)
    with pytest.raises(
        moepass.InputError,
        match=r"experts.down_proj of family 'qwen3_moe' is computed by transpose.*from_pretrained, then moepass",
    ):
        moepass.load_pretrained(whole)


def test_a_file_that_vanishes_is_an_error(whole: Path, tmp_path: Path) -> None:
    folder = broken_copy(whole, tmp_path / "gone", lambda _: None)
    files = CheckpointFiles([folder / "model.safetensors"])
    (folder / "model.safetensors").unlink()
    tensor = next(iter(files))
    assert isinstance(tensor, StoredTensor)
    with pytest.raises(
        moepass.CheckpointError, match=r"model.safetensors changed while it was being read: .* is not there"
    ):
        files.read(tensor)


def _replace(file: Path) -> None:
    """Replace `file` by one of another checkpoint with the same tensors, size and time."""
    replacement = file.with_name("other")
    save_file({name: weight + 1 for name, weight in load_file(file).items()}, replacement, metadata={"format": "pt"})
    os.utime(replacement, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    os.replace(replacement, file)


def _touch(file: Path) -> None:
    os.utime(file, (1, 1))


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("home", ["host", pytest.param("disk", marks=on_linux)])
@pytest.mark.parametrize(
    ("step", "file", "change"),
    [
        ("check_numbers", "model.safetensors", _replace),
        ("move_experts", "model.safetensors", _replace),
        ("read_weights", "model.safetensors", _replace),
        ("read_weights", "model.safetensors", Path.touch),
        ("move_experts", "config.json", _touch),
        ("move_experts", "model.safetensors.index.json", Path.touch),
    ],
)
def test_a_checkpoint_that_changes_while_it_is_read_is_an_error(
    home: str, step: str, file: str, change: Callable[[Path], None], whole: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = broken_copy(whole, tmp_path / "changing", lambda _: None)
    module = LOAD_MODEL if step == "check_numbers" else loading
    proceed = getattr(module, step)

    def change_first(*arguments: Any, **keywords: Any) -> Any:
        change(folder / file)
        return proceed(*arguments, **keywords)

    monkeypatch.setattr(module, step, change_first)
    with pytest.raises(moepass.CheckpointError, match=rf"{file} (changed while it was|was changed or replaced)"):
        moepass.load_pretrained(folder, home=home)


def test_a_file_that_changes_after_it_was_read_last_is_an_error(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = broken_copy(whole, tmp_path / "changing", lambda _: None)
    check = LOAD_MODEL.check_loading

    def check_and_change(*arguments: Any) -> None:
        check(*arguments)
        _touch(folder / "model.safetensors")

    monkeypatch.setattr(LOAD_MODEL, "check_loading", check_and_change)
    with pytest.raises(moepass.CheckpointError, match=r"model\.safetensors changed while it was being read"):
        load_model(folder)


def test_types_that_torch_lacks_are_named(tmp_path: Path) -> None:
    header = json.dumps({"scale": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    file = tmp_path / "odd.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(moepass.InputError, match=r"scale in .* is stored as F6_E2M3; moepass reads BF16, BOOL"):
        CheckpointFiles([file])


@pytest.mark.parametrize(
    ("is_first", "is_terminal", "shows"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_bar_is_shown_on_the_first_rank_of_a_terminal(
    is_first: bool, is_terminal: bool, shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    with shown_progress(None, is_first, 100) as on_read:
        assert (on_read is not None) == shows
        if on_read is not None:
            on_read(60)
