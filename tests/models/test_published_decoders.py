"""Decoding gives the bits of transformers' own dequantisation, where transformers has one that runs on a CPU."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from moepass.models.layouts.layout import MatrixFormula, Role
from moepass.models.layouts.published import read_quantization


def _formula(config: dict[str, object], model_type: str, name: str) -> MatrixFormula:
    layouts = read_quantization(config, model_type, "").layouts
    formula = next(layout.formula for layout in layouts if layout.name == name)
    assert isinstance(formula, MatrixFormula)
    return formula


def _random_bytes(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e8m0fnu]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_fp8_blocks(seed: int, scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
    values = _random_bytes(256, 384, seed=seed)
    values[values & 127 == 127] = 0  # NaN
    scales = (torch.rand(2, 3, generator=torch.Generator().manual_seed(seed)) * 0.01 + 1e-4).to(scale_dtype)
    stored = {Role.VALUES: values.view(torch.float8_e4m3fn), Role.SCALES: scales}
    expected = Fp8Dequantize(None)._dequantize_one(stored[Role.VALUES], scales, dtype)
    assert torch.equal(_formula({"quant_method": "fp8"}, "deepseek_v3", "fp8 blocks").decode(stored, dtype), expected)


@settings(max_examples=40)
@given(st.integers(0, 1 << 30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_fp4_blocks(seed: int, dtype: torch.dtype) -> None:
    values = _random_bytes(64, 48, seed=seed).view(torch.int8)
    scales = (_random_bytes(64, 3, seed=seed + 1) // 16 + 119).view(torch.float8_e8m0fnu)
    expected = Fp8Dequantize(None)._dequantize_one(values, scales, dtype)
    formula = _formula({"quant_method": "fp8", "expert_dtype": "fp4"}, "deepseek_v4", "fp4 blocks")
    assert torch.equal(formula.decode({Role.VALUES: values, Role.SCALES: scales}, dtype), expected)


@settings(max_examples=40)
@given(st.integers(0, 1 << 30))
def test_mxfp4(seed: int) -> None:
    blocks = _random_bytes(3, 32, 2, 16, seed=seed)
    scales = _random_bytes(3, 32, 2, seed=seed + 1) // 16 + 119
    expected = _convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    formula = _formula({"quant_method": "mxfp4"}, "gpt_oss", "mxfp4")
    decoded = formula.decode({Role.VALUES: blocks, Role.SCALES: scales}, torch.bfloat16)
    assert torch.equal(decoded, expected)
