"""Tiny checkpoints with experts in blocks of FP8, and models on the CPU whose experts multiply in FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from moepass.runtime.lowering import lower_segments
from moepass.runtime.lowering.lower_triton_experts import lower_to_triton
from tests.helpers.models.quantized_checkpoints import FORMS, PublishedForm, fp8, save_quantized
from tests.helpers.models.tiny import tiny_model

BLOCKS = "blocks of 128"
FORMS_OF_FP8 = {
    **FORMS,
    BLOCKS: PublishedForm(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda matrix: fp8(matrix, (128, 128), torch.float32, "_scale_inv"),
    ),
}


def fp8_folder(folder: Path, form: str = BLOCKS, **sizes: Any) -> Path:
    """Write a tiny checkpoint with quantised experts, and return its folder."""
    sizes = {"hidden_size": 192, "moe_intermediate_size": 128, "num_hidden_layers": 1} | sizes
    return save_quantized(tiny_model("qwen3_moe", dtype=torch.bfloat16, **sizes), FORMS_OF_FP8[form], folder)[0]


def interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower experts on the CPU to Triton kernels, which the interpreter runs."""

    def by_kernels(segment: GraphModule) -> Any:
        return lower_to_triton(segment, lambda graph: lambda inputs: graph(*inputs))

    monkeypatch.setattr(lower_segments, "_by_expert", by_kernels)
    monkeypatch.setattr("moepass.options._check_multiplies_in_fp8", lambda device: None)
