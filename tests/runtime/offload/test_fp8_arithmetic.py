"""Models whose experts multiply in FP8. Triton's interpreter runs the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import moepass
from moepass.compilations import record_compilations
from moepass.models.errors import InputError, OptionError
from moepass.options import parse_options
from moepass.passes.ir.segment import TRITON
from moepass.passes.ir.shards import slot_layout
from tests.helpers.graphs.error_fields import refused
from tests.helpers.models.fp8_experts import fp8_folder, interpret_kernels
from tests.helpers.models.tiny import main_result, tiny_inputs, tiny_model

FP8: dict[str, Any] = {"experts_compute": "fp8"}


def _run(model: nn.Module, **options: Any) -> torch.Tensor:
    compiled = torch.compile(model, backend="asyncep", options=options)
    with torch.no_grad():
        return main_result(compiled(**tiny_inputs(model, batch=1))).float()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_kernels(monkeypatch)


@pytest.mark.parametrize("home", ["host", pytest.param("disk", marks=pytest.mark.slow)])
def test_slots_stay_fp8_and_results_are_close(home: str, tmp_path: Path, interpreted: None) -> None:
    folder = fp8_folder(tmp_path)
    exact = _run(moepass.load_pretrained(folder))
    model = moepass.load_pretrained(folder, home=home)
    with record_compilations() as compilations:
        result = _run(model, **FP8, debug=True)
    (plan,) = {compilation.plan for compilation in compilations if compilation.plan.slot_stays}
    (sizes,) = moepass.offload_report(model).formats.values()
    for bank in plan.banks:
        assert bank.fp8 == (0, 1)
        assert bank.format.slot_bytes == slot_layout(bank).nbytes
        assert bank.format.slot_bytes < 0.52 * sizes.slot_bytes / len(plan.banks)
    assert plan.slot_bytes == plan.banks[0].format.slot_bytes
    lowerings = {segment.lowering.how for segment in plan.segments if segment.role == "experts" and segment.lowering}
    assert lowerings == {TRITON}
    error = (result - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.05


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("form", "sizes", "message"),
    [
        (
            "fp8 per channel",
            {},
            "rest as 'fp8 per channel'; it needs a checkpoint whose experts are stored as 'fp8 blocks'",
        ),
        ("fp8 blocks", {}, "has scales for blocks of 32 x 24; it needs"),
        ("blocks of 128", {"moe_intermediate_size": 96}, "meet at 96, within a block; it needs e4m3 values"),
    ],
)
def test_other_checkpoints_are_refused(
    form: str, sizes: dict[str, int], message: str, tmp_path: Path, interpreted: None
) -> None:
    with pytest.raises(InputError, match=message):
        _run(moepass.load_pretrained(fp8_folder(tmp_path, form, **sizes)), **FP8)


def test_plain_experts_are_refused(interpreted: None) -> None:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1)
    moepass.offload_experts(model)
    with pytest.raises(InputError, match="rest unquantised; it needs a checkpoint"):
        _run(model, **FP8)


def test_experts_without_kernels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moepass.options._check_multiplies_in_fp8", lambda device: None)
    message = r"cannot stay FP8: .* is not lowered to Triton kernels: its experts run as expert_loop"
    with pytest.raises(InputError, match=message):
        _run(moepass.load_pretrained(fp8_folder(tmp_path)), **FP8)


def test_a_cpu_does_not_multiply_in_fp8(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'fp8', but the graph computes on cpu: kernels in FP8 are for NVIDIA GPUs"):
        _run(moepass.load_pretrained(fp8_folder(tmp_path)), **FP8)


def test_the_model_s_own_operators_do_not_multiply_in_fp8() -> None:
    with pytest.raises(OptionError, match="lower='eager' runs the model's own operators"):
        parse_options({**FP8, "lower": "eager"})


def least_budget(folder: Path, **wishes: Any) -> int:
    """Return the smallest memory budget, as the error for a smaller one names it."""
    with pytest.raises(InputError, match="which is too small") as caught:
        moepass.load_pretrained(folder, memory_budget=1000, tokens=8, **wishes)
    assert isinstance(caught.value.expected, int)
    return caught.value.expected


@pytest.mark.slow
def test_the_ring_takes_as_much_as_reported(tmp_path: Path, interpreted: None) -> None:
    model = moepass.load_pretrained(fp8_folder(tmp_path), **FP8)
    report = moepass.offload_report(model)
    _run(model, **FP8)
    ring = report.store.current_ring
    assert ring is not None
    assert ring.device_bytes == report.ring_bytes


def test_slots_and_budgets_are_those_of_fp8(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path, num_hidden_layers=3)
    plain, report = (moepass.offload_report(moepass.load_pretrained(folder, **wishes)) for wishes in ({}, FP8))
    assert report.ring_bytes < 0.76 * plain.ring_bytes, "slots take half, and buffers of encoded experts as much"
    least, least_plain = least_budget(folder, **FP8), least_budget(folder)
    assert least_plain - least == plain.store.slot_bytes - report.store.slot_bytes


@pytest.mark.parametrize(("budget_slots", "slots"), [(1, 1), (2, 2), (100, 2)])
def test_all_layers_stream_whatever_the_budget(budget_slots: int, slots: int, tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path, num_hidden_layers=3)
    slot_bytes = moepass.offload_report(moepass.load_pretrained(folder, **FP8)).store.slot_bytes
    budget = least_budget(folder, **FP8) + (budget_slots - 1) * slot_bytes
    report = moepass.offload_report(moepass.load_pretrained(folder, memory_budget=budget, tokens=8, **FP8))
    assert (len(report.layers), report.store.slots) == (3, slots)
    assert report.store.placed is not None
    memory = report.store.placed.decisions.memory
    assert memory is not None
    assert memory.slot_bytes == report.ring_bytes
    assert memory.peak_bytes <= budget


def test_resident_layers_do_not_multiply_in_fp8(tmp_path: Path, interpreted: None) -> None:
    folder = fp8_folder(tmp_path, num_hidden_layers=2)
    with refused(OptionError, name="experts_compute", value="fp8"):
        moepass.load_pretrained(folder, resident_layers=[0], **FP8)
    model = moepass.load_pretrained(folder, resident_layers=[0])
    with pytest.raises(OptionError, match=r"the experts of layers \[0\] are resident"):
        _run(model, **FP8)


def test_slots_for_fp8_hold_no_other_experts(tmp_path: Path) -> None:
    model = moepass.load_pretrained(fp8_folder(tmp_path), **FP8)
    with pytest.raises(OptionError, match="the model was placed for 'fp8', whose slots are too small for it"):
        _run(model)


def test_another_arithmetic_is_refused() -> None:
    with refused(OptionError, name="experts_compute", value="int8"):
        moepass.offload_experts(tiny_model("qwen3_moe"), experts_compute="int8")
