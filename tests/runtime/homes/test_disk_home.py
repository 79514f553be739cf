"""Experts that stay in files: the same results as from memory, with every layout of the checkpoint."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moepass
from moepass.models.checkpoint.load_model import load_model
from moepass.runtime.homes.disk.bank_files import BankFolder
from moepass.runtime.homes.disk.disk_files import FileSource
from moepass.runtime.homes.disk.disk_home import DiskHome
from tests.helpers.graphs.backend_helper import BLOCKS, Stack, tokens
from tests.helpers.graphs.tiny_checkpoint import save_tiny_checkpoint
from tests.helpers.models.tiny import (
    EXPERT_KINDS,
    main_result,
    tiny_inputs,
    tiny_model,
)
from tests.helpers.processes.ranks import run_ranks

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.skipif(sys.platform != "linux", reason="home disk advises the Linux kernel"),
]
OPTIONS = {"lower": "eager", "debug": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two layers, with one stored tensor per expert and projection, in one file."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "whole")


def _home(model: torch.nn.Module) -> DiskHome:
    home = moepass.offload_report(model).store.home
    assert isinstance(home, DiskHome)
    return home


def _reference(folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    # The reference is offloaded too: a mapped file may have matrices at unaligned addresses, where products round
    # differently.
    model = load_model(folder, dtype=dtype)
    moepass.offload_experts(model)
    return model


def _check_same(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    inputs = tiny_inputs(model)
    expected = main_result(reference(**inputs))
    for _ in range(2):
        assert torch.equal(main_result(model(**inputs)), expected)


# test_loading streams every family of transformers from its files.
@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("family", EXPERT_KINDS)
def test_families_are_the_same_in_bfloat16_and_in_parts(family: str, tmp_path: Path) -> None:
    tiny_model(family, dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    model = moepass.load_pretrained(tmp_path, home="disk")
    _check_same(model, _reference(tmp_path))
    report = moepass.offload_report(model)
    assert report.home == "disk"
    assert report.home_bytes == sum(bank.spec.format.home_bytes for bank in report.store.banks)


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPERT_KINDS)
def test_families_compile_to_the_same(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    model = moepass.load_pretrained(tmp_path, home="disk")
    inputs = tiny_inputs(model)
    expected = torch.compile(_reference(tmp_path), backend="asyncep", options=OPTIONS)(**inputs).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="asyncep", options=OPTIONS)
    for _ in range(3):
        assert torch.equal(compiled(**inputs).logits, expected)


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_compiled_model_streams_from_its_files(checkpoint: Path, slots: int) -> None:
    model = moepass.load_pretrained(checkpoint, home="disk", slots=slots)
    inputs = tiny_inputs(model)
    expected = _reference(checkpoint)(**inputs).logits
    with moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", options=OPTIONS)
        for _ in range(3):
            assert torch.equal(compiled(**inputs).logits, expected)
    (plan,) = (item.plan for item in compilations)
    assert not plan.refusals
    assert [bank.home for bank in plan.banks] == ["disk", "disk"]
    assert "2 banks rest in files" in plan.reason
    assert moepass.offload_report(model).store.ring().statistics.ahead_used == slots


@pytest.mark.slow
def test_a_refused_block_reads_its_experts_from_the_files(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", experts_implementation="eager", num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    inputs = tiny_inputs(model)
    streamed = moepass.load_pretrained(tmp_path, home="disk", experts_implementation="eager")
    expected = _reference(tmp_path)
    expected.set_experts_implementation("eager")
    with moepass.record_compilations() as compilations:
        compiled = torch.compile(streamed, backend="asyncep", options=OPTIONS)
        assert torch.equal(compiled(**inputs).logits, expected(**inputs).logits)
    assert any(item.plan.refusals for item in compilations)


def test_another_backend_says_that_it_cannot_read_files(tmp_path: Path) -> None:
    model = Stack("dense_bmm", depth=1)
    moepass.offload_experts(model, home=moepass.Disk(folder=tmp_path))
    with pytest.raises(moepass.MoepassError, match=r"bank blocks.0 rests in files, .* compile with backend='asyncep'"):
        torch.compile(model, backend="eager")(tokens())


class _Recorded:
    """A stand-in for the thread that announces files."""

    def __init__(self, home: DiskHome) -> None:
        self.home, self.banks = home, []
        home._read_ahead = self  # type: ignore[assignment]

    banks: list[int]

    def announce(self, sources: tuple[FileSource, ...]) -> None:
        (bank,) = (index for index, announced in self.home._sources.items() if announced is sources)
        self.banks.append(bank)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_bank_that_follows_is_announced(is_compiled: bool, tmp_path: Path) -> None:
    model = Stack("dense_bmm", depth=4)
    expected = model(tokens())
    moepass.offload_experts(model, home=moepass.Disk(folder=tmp_path))
    recorded = _Recorded(_home(model))
    run: Any = torch.compile(model, backend="asyncep", options=OPTIONS) if is_compiled else model
    for _ in range(3):
        assert torch.equal(run(tokens()), expected)
    # Announced in the order of layers at first, with nothing after the last one, and then in the order of the last run.
    # Each copy announces one bank. In the third run of a ring with two slots the last two copies belong to a fourth
    # run.
    begin = [1, 2, 3]
    assert recorded.banks[:3] == begin
    later_banks = recorded.banks[3:]
    assert later_banks == [(later_banks[0] + step) % 4 for step in range(len(later_banks))]
    assert later_banks[:2] == [1, 2] if not is_compiled else len(later_banks) >= 8


def test_an_order_that_changes_is_learned_again(tmp_path: Path) -> None:
    model = Stack("dense_bmm", depth=3)
    moepass.offload_experts(model, home=moepass.Disk(folder=tmp_path))
    home = _home(model)
    recorded = _Recorded(home)
    banks = [bank.spec for bank in moepass.offload_report(model).store.banks]
    for index in (0, 2, 1, 0, 2, 1, 1, 0, 2):
        home.copying(banks[index])
    # 0 -> 1 and 1 -> 2 are guesses, the successor of 2 is learned, and 1 after itself needs no announcement.
    assert recorded.banks == [1, 2, 2, 1, 0, 2, 1]
    home.announces = False
    home.copying(banks[0])
    assert len(recorded.banks) == 7


CHANGES: dict[str, Callable[[Path], object]] = {
    "written": lambda file: os.utime(file, (1, 1)),
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_is_changed_is_an_error_in_the_next_run(change: str, tmp_path: Path) -> None:
    # Compiled, because eager mode reads dense weights, which are mapped, before any expert.
    tiny_model("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path)
    model = moepass.load_pretrained(tmp_path, home="disk")
    inputs = tiny_inputs(model)
    compiled = torch.compile(model, backend="asyncep", options=OPTIONS)
    compiled(**inputs)
    CHANGES[change](tmp_path / "model.safetensors")
    for _ in range(2):
        with pytest.raises(moepass.CheckpointError, match=r"model\.safetensors was changed while a model streams from"):
            compiled(**inputs)
    with pytest.raises(moepass.CheckpointError, match=r"model\.safetensors was changed while a model streams from it"):
        moepass.offload_report(model).store.gather_now(0)


def test_a_bank_that_is_changed_within_a_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack("dense_bmm", depth=3)
    expected = model(tokens())
    moepass.offload_experts(model, home=moepass.Disk(folder=tmp_path))
    compiled = torch.compile(model, backend="asyncep", options=OPTIONS)
    assert torch.equal(compiled(tokens()), expected)
    status = (tmp_path / "blocks.2.safetensors").stat()
    with monkeypatch.context() as patched:
        patched.setattr(DiskHome, "check", lambda home: None)
        os.truncate(tmp_path / "blocks.2.safetensors", 4096)
        with pytest.raises(moepass.MoepassError, match=r"bank blocks.2 could not be copied .*now it has 4096 bytes"):
            compiled(tokens())
    with pytest.raises(moepass.CheckpointError, match="was changed while a model streams from it"):
        compiled(tokens())
    assert status.st_size > 4096


def test_a_checkpoint_may_be_replaced_and_deleted(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path)
    reference = _reference(tmp_path)
    model = moepass.load_pretrained(tmp_path, home="disk")
    tiny_model("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path / "other")
    os.replace(tmp_path / "other" / "model.safetensors", tmp_path / "model.safetensors")
    _check_same(model, reference)
    (tmp_path / "model.safetensors").unlink()
    _check_same(model, reference)


def test_weights_in_files_are_not_written(checkpoint: Path) -> None:
    model = moepass.load_pretrained(checkpoint, home="disk")
    state = load_model(checkpoint).state_dict()
    message = r"experts of model\.layers\.0\.mlp\.experts rest in files, which moepass only reads.*home='host'"
    with pytest.raises(moepass.InputError, match=message):
        model.load_state_dict(state)
    with pytest.raises(moepass.InputError, match=message):
        model.state_dict()


# ---- Banks that have to be written -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", BLOCKS)
def test_a_model_in_memory_is_written_and_streamed(form: str, tmp_path: Path) -> None:
    model = Stack(form, depth=3, bias=True)
    expected = model(tokens())
    report = moepass.offload_experts(model, home=moepass.Disk(folder=tmp_path / "a" / "b", page_cache="drop"))
    compiled = torch.compile(model, backend="asyncep", options=OPTIONS)
    for run in (model, compiled, compiled):
        assert torch.equal(run(tokens()), expected)
    assert report.layers == ("blocks.0", "blocks.1", "blocks.2")
    written = sorted(path.name for path in (tmp_path / "a" / "b").glob("*.safetensors"))
    assert written == [f"{name}.safetensors" for name in report.layers]


def test_a_conversion_is_written_once(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        moepass.InputError,
        match=r"layers\.0\.mlp\.experts\.gate_up_proj is made by a conversion from torch\.float32 to torch\.bfloat16, "
        r"and home='disk' needs a file that contains its bytes; name a folder with \d+ free bytes",
    ):
        moepass.load_pretrained(checkpoint, home="disk", dtype=torch.bfloat16)
    progress: list[tuple[int, int]] = []

    def load() -> PreTrainedModel:
        progress.clear()
        return moepass.load_pretrained(
            checkpoint,
            home=moepass.Disk(folder=tmp_path),
            dtype=torch.bfloat16,
            progress=lambda done, total: progress.append((done, total)),
        )

    reference = _reference(checkpoint, torch.bfloat16)
    totals = []
    inodes = []
    for _ in range(2):
        _check_same(load(), reference)
        assert progress[-1][0] == progress[-1][1]
        totals.append(progress[-1][1])
        inodes.append([path.stat().st_ino for path in sorted(tmp_path.glob("*.safetensors"))])
    assert totals[0] == totals[1]
    assert inodes[0] == inodes[1]
    assert len(inodes[0]) == 2


def test_nothing_is_written_if_the_checkpoint_suffices(checkpoint: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    model = moepass.load_pretrained(
        checkpoint,
        home=moepass.Disk(folder=tmp_path / "banks"),
        progress=lambda done, total: progress.append((done, total)),
    )
    assert not (tmp_path / "banks").exists()
    # The process read no expert.
    assert progress[-1] == (progress[-1][1],) * 2
    assert progress[-1][1] == sum({value.data_ptr(): value.nbytes for value in model.parameters()}.values())


def _load_on_a_rank(checkpoint: Path, folder: Path) -> tuple[int, float]:
    written: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        write = BankFolder._written

        def counting(self: BankFolder, name: str, made_of: str, tensors: Any) -> Any:
            written.append(name)
            return write(self, name, made_of, tensors)

        patched.setattr(BankFolder, "_written", counting)
        model = moepass.load_pretrained(checkpoint, home=moepass.Disk(folder=folder), dtype=torch.bfloat16)
    return len(written), float(moepass.offload_report(model).store.gather_now(1)[0].double().sum())


@pytest.mark.slow
def test_one_of_many_processes_writes(checkpoint: Path, tmp_path: Path) -> None:
    outcomes = run_ranks(2, _load_on_a_rank, checkpoint, tmp_path)
    expected = moepass.offload_report(_reference(checkpoint, torch.bfloat16)).store.gather_now(1)[0].double().sum()
    assert sorted(outcomes) == [(0, float(expected)), (2, float(expected))]


# ---- Options and memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            {"home": "disk"},
            moepass.InputError,
            r"blocks.0 is in memory, and home='disk' needs it in files; name",
        ),
        (
            {"home": "disk", "device": "meta"},
            moepass.InputError,
            r"device is meta; home='disk' works on cpu and cuda only; use",
        ),
    ],
)
def test_wrong_arguments_name_the_value_and_leave_the_model_alone(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    model = Stack("dense_bmm", depth=2)
    expected = model(tokens())
    with pytest.raises(kind, match=message):
        moepass.offload_experts(model, **arguments)
    assert torch.equal(model(tokens()), expected)
    assert not any("parametrizations" in name for name, _ in model.named_modules())


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _memory_of_a_run(folder: Path) -> tuple[int, int, int]:
    """Return the peak anonymous memory of loading and running, the bytes of the ring, and those of all banks."""
    before = peak = _anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, _anonymous_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    model = moepass.load_pretrained(folder, home="disk")
    report = moepass.offload_report(model)
    with torch.no_grad():
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager"})
        for _ in range(3):
            compiled(torch.zeros(1, 8, dtype=torch.int64))
    done.set()
    watching.join()
    assert report.store.ring().statistics.copies > len(report.layers)
    return peak - before, report.ring_bytes, report.home_bytes


@pytest.mark.slow
def test_a_process_takes_memory_for_its_slots_alone(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=512,
        moe_intermediate_size=512,
        num_experts=16,
        num_experts_per_tok=2,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        use_cache=False,
    )
    Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    ((taken, ring_bytes, home_bytes),) = run_ranks(1, _memory_of_a_run, tmp_path)
    assert home_bytes == 3 * ring_bytes == 6 * 16 * 3 * 512 * 512 * 4
    # Dense weights are views of the file. Compiling takes less than one bank (measured: 30 MB).
    assert taken < ring_bytes + ring_bytes // 2 + 15_000_000
