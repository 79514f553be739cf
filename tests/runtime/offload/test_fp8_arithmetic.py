"""Models whose experts multiply in FP8. Triton's interpreter runs the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import moepass
from moepass.compilations import record_compilations
from moepass.models.errors import InputError, OptionError
from moepass.options import parse_options
from moepass.passes.ir.segment import TRITON
from moepass.passes.ir.shards import slot_layout
from moepass.runtime.lowering import lower_segments
from moepass.runtime.lowering.lower_triton_experts import lower_to_triton
from tests.helpers.models.quantized_checkpoints import FORMS, PublishedForm, fp8, save_quantized
from tests.helpers.models.tiny import main_result, tiny_inputs, tiny_model

FP8 = {"experts_compute": "fp8"}


FORMS_OF_TESTS = {
    **FORMS,
    "blocks of 128": PublishedForm(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda matrix: fp8(matrix, (128, 128), torch.float32, "_scale_inv"),
    ),
}


def _folder(tmp_path: Path, form: str = "blocks of 128", **sizes: Any) -> Path:
    sizes = {"hidden_size": 192, "moe_intermediate_size": 128, "num_hidden_layers": 1} | sizes
    return save_quantized(tiny_model("qwen3_moe", dtype=torch.bfloat16, **sizes), FORMS_OF_TESTS[form], tmp_path)[0]


def _run(model: nn.Module, **options: Any) -> torch.Tensor:
    compiled = torch.compile(model, backend="asyncep", options=options)
    with torch.no_grad():
        return main_result(compiled(**tiny_inputs(model, batch=1))).float()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower experts on the CPU to Triton kernels, which the interpreter runs."""

    def by_kernels(segment: GraphModule) -> Any:
        return lower_to_triton(segment, lambda graph: lambda inputs: graph(*inputs))

    monkeypatch.setattr(lower_segments, "_by_expert", by_kernels)
    monkeypatch.setattr("moepass.options._check_multiplies_in_fp8", lambda device: None)


@pytest.mark.parametrize("home", ["host", pytest.param("disk", marks=pytest.mark.slow)])
def test_slots_stay_fp8_and_results_are_close(home: str, tmp_path: Path, interpreted: None) -> None:
    folder = _folder(tmp_path)
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
        _run(moepass.load_pretrained(_folder(tmp_path, form, **sizes)), **FP8)


def test_plain_experts_are_refused(interpreted: None) -> None:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1)
    moepass.offload_experts(model)
    with pytest.raises(InputError, match="rest unquantised; it needs a checkpoint"):
        _run(model, **FP8)


def test_experts_without_kernels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moepass.options._check_multiplies_in_fp8", lambda device: None)
    message = r"cannot stay FP8: .* is not lowered to Triton kernels: its experts run as expert_loop"
    with pytest.raises(InputError, match=message):
        _run(moepass.load_pretrained(_folder(tmp_path)), **FP8)


def test_a_cpu_does_not_multiply_in_fp8(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'fp8', but the graph computes on cpu: kernels in FP8 are for NVIDIA GPUs"):
        _run(moepass.load_pretrained(_folder(tmp_path)), **FP8)


def test_the_model_s_own_operators_do_not_multiply_in_fp8() -> None:
    with pytest.raises(OptionError, match="lower='eager' runs the model's own operators"):
        parse_options({**FP8, "lower": "eager"})
