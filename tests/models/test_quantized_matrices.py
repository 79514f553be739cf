"""Stored tensors of quantised matrices are found by names, dtypes and shapes, as published checkpoints have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from moepass.models.errors import CheckpointError
from moepass.models.layouts.layout import Role
from moepass.models.layouts.published import read_quantization
from moepass.models.layouts.quantized_matrices import QuantizedMatrix, quantized_matrices
from moepass.models.layouts.weight_layout import WeightLayout
from tests.helpers.models.quantized_checkpoints import FORMS

E4M3, FP32, BF16, U8, I32 = torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.uint8, torch.int32


@dataclasses.dataclass(frozen=True)
class Described:
    dtype: torch.dtype
    shape: tuple[int, ...]


def matrices_of(
    config: Mapping[str, Any], tensors: Mapping[str, Described], model_type: str = "qwen3_moe"
) -> dict[str, QuantizedMatrix]:
    quantization = read_quantization(config, model_type, "config.json")
    matrices, _ = quantized_matrices(quantization, tensors, "checkpoint")
    return matrices


def group(format: str, **weights: Any) -> dict[str, Any]:
    return {"format": format, "targets": ["Linear"], "weights": {"type": "float", **weights}}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"]}
INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}

# A configuration, the tensors beside it, and the layout of the matrix `x.weight`.
FOUND: dict[str, tuple[dict[str, Any], dict[str, Described], str]] = {
    "DeepSeek-V4, whose own scales are weights": (
        {**FP8, "expert_dtype": "fp4"},
        {
            "x.weight": Described(torch.int8, (256, 64)),
            "x.scale": Described(torch.float8_e8m0fnu, (256, 4)),
            "hc_attn_scale": Described(FP32, (3,)),
        },
        "fp4 blocks",
    ),
    "NVIDIA's DeepSeek-V4, with FP8 attention": (
        {**FP8, "moe_quant_algo": "NVFP4"},
        {
            "x.weight": Described(U8, (256, 64)),
            "x.weight_scale": Described(E4M3, (256, 8)),
            "x.weight_scale_2": Described(FP32, ()),
        },
        "nvfp4",
    ),
    "AutoFP8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        {
            "x.weight": Described(E4M3, (256, 128)),
            "x.weight_scale": Described(FP32, (1,)),
            "x.input_scale": Described(FP32, (1,)),
        },
        "fp8 per tensor",
    ),
    "Gemma-4's router has a scale of its own": (
        {**COMPRESSED, "config_groups": {"0": group("float-quantized", num_bits=8, strategy="channel")}},
        {
            "x.weight": Described(E4M3, (256, 128)),
            "x.weight_scale": Described(BF16, (256, 1)),
            "router.per_expert_scale": Described(BF16, (8,)),
        },
        "fp8 per channel",
    ),
    "channels or blocks": (
        {
            **COMPRESSED,
            "config_groups": {
                "0": group("float-quantized", num_bits=8, strategy="channel"),
                "1": group("float-quantized", num_bits=8, strategy="block", block_structure="128x128"),
            },
        },
        {"x.weight": Described(E4M3, (256, 128)), "x.weight_scale": Described(FP32, (2, 1))},
        "fp8 blocks",
    ),
    "zero points in one of two groups": (
        {
            **COMPRESSED,
            "config_groups": {
                "0": group("pack-quantized", **INT4),
                "1": group("pack-quantized", **{**INT4, "symmetric": False}),
                "2": {"targets": ["Attention"], "weights": None},
            },
        },
        {
            "x.weight_packed": Described(I32, (256, 16)),
            "x.weight_scale": Described(BF16, (256, 4)),
            "x.weight_zero_point": Described(I32, (32, 4)),
            "x.weight_shape": Described(torch.int64, (2,)),
        },
        "int4 packed",
    ),
    "ModelOpt with several algorithms": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"x": {"quant_algo": "W4A16_NVFP4", "group_size": 16}, "y": {"quant_algo": "FP8"}},
        },
        {
            "x.weight": Described(U8, (256, 64)),
            "x.weight_scale": Described(E4M3, (256, 8)),
            "x.weight_scale_2": Described(FP32, ()),
            "y.k_scale": Described(FP32, ()),
        },
        "nvfp4",
    ),
    "Qwen3.5 in GPTQ": (
        {
            "quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": None,
            "dynamic": {"lm_head": {}, "-:.*attn.*": {}},
        },
        {
            "x.qweight": Described(I32, (32, 128)),
            "x.qzeros": Described(I32, (2, 16)),
            "x.scales": Described(torch.float16, (2, 128)),
            "x.g_idx": Described(I32, (256,)),
        },
        "gptq int4",
    ),
    "GPTQ with a partial group": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {
            "x.qweight": Described(I32, (20, 128)),
            "x.qzeros": Described(I32, (2, 16)),
            "x.scales": Described(torch.float16, (2, 128)),
        },
        "gptq int4",
    ),
    "AWQ in capitals": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM"},
        {
            "x.qweight": Described(I32, (256, 16)),
            "x.qzeros": Described(I32, (2, 16)),
            "x.scales": Described(torch.float16, (2, 128)),
        },
        "awq int4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_matrices_of_published_checkpoints_are_found(case: str) -> None:
    config, tensors, layout = FOUND[case]
    matrices = matrices_of(config, tensors)
    assert {key: matrix.layout.name for key, matrix in matrices.items()} == {"x.weight": layout}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Described], str]] = {
    "a matrix stored twice": (
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        {**FOUND["AWQ in capitals"][1], "x.weight": Described(BF16, (128, 256))},
        "both contain the weight x.weight",
    ),
    "integers that look like weights": (
        FP8, {"x.weight": Described(torch.int8, (256, 128))}, "int8, quantised by 'fp8', but no quantised matrix"
    ),
    "an empty matrix": (
        FP8, {"x.weight": Described(E4M3, (0, 128)), "x.weight_scale_inv": Described(FP32, (0, 1))}, "none .* empty"
    ),
    "MXFP4 of another family": (
        {"quant_method": "mxfp4"}, {}, "model_type of the 'mxfp4' weights is 'qwen3_moe'; moepass decodes this"
    ),
    "weights that were rotated": (
        {**COMPRESSED, "config_groups": {}, "transform_config": {"config_groups": {"u": {}}}}, {}, "without transforms"
    ),
    "no groups": ({**COMPRESSED, "config_groups": None}, {}, "malformed or unknown: Expected `object`, got `null`"),
    "a group that is a list": ({**COMPRESSED, "config_groups": {"a": ["Linear"]}}, {}, "malformed or unknown"),
    "patterns that are no list": ({**COMPRESSED, "config_groups": {}, "ignore": 5}, {}, "malformed or unknown"),
    "a string": ("fp8", {}, "quant_method is None"),  # type: ignore[dict-item]
    "a method that is a list": ({"quant_method": ["fp8"]}, {}, r"quant_method is \['fp8'\]"),
    "other bits in some modules": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*gate.*": {"bits": 8}}}, {}, "the same bits and group_size"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_checkpoints_are_one_clear_error(case: str) -> None:
    config, tensors, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        matrices_of(config, tensors)


@pytest.mark.parametrize(
    ("pattern", "excludes"),
    [
        ("model.layers.0.mlp.experts.1", True),
        ("down_proj", True),
        ("model.layers.*.mlp", True),
        (r"re:.*mlp\.experts\.\d+\.down_proj$", True),
        (r"re:model\.layers\.\d+\.mlp", True),
        ("proj", False),
        ("model.layers.0.mlp.experts.1.down", False),
        (r"re:.*experts$", False),
        (r"re:.*mlp\.(gate|up)_proj.*", False),
        (r"re:(a*)*b", False),
        ("re:*x", False),
    ],
)
def test_a_quantised_module_must_not_be_excluded(pattern: str, excludes: bool) -> None:
    key = "model.layers.0.mlp.experts.1.down_proj.weight"
    tensors = {key: Described(E4M3, (128, 128)), f"{key}_scale_inv": Described(FP32, (1, 1))}
    config = {**FP8, "modules_to_not_convert": [pattern]}
    if excludes:
        with pytest.raises(CheckpointError, match="says that it is not quantised"):
            matrices_of(config, tensors)
    else:
        assert list(matrices_of(config, tensors)) == [key]


def test_small_numbers_survive_a_process_that_flushes_denormals() -> None:
    layout: WeightLayout = read_quantization(FORMS["nvfp4"].config, "qwen3_moe", "").layouts[0]
    stored = {
        Role.VALUES: torch.full((1, 8), 0x11, dtype=U8),
        Role.SCALES: torch.full((1, 1), 2.0**-9).to(E4M3),
        Role.GLOBAL_SCALE: torch.tensor(512.0),
    }
    assert torch.set_flush_denormal(True)
    try:
        assert torch.equal(layout.formula.decode(stored, FP32), torch.full((1, 16), 0.5))
    finally:
        torch.set_flush_denormal(False)
