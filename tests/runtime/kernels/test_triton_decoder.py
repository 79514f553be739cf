"""Decoding by Triton gives the same bits as the formula in torch, and compiles for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models.layouts.layout import MatrixFormula, Role
from moepass.runtime.kernels.triton_decoder import decode_by_triton, decode_floats_by_triton
from tests.helpers.kernels.packed_floats import Formula, every_float, float_matrices
from tests.helpers.kernels.packed_floats import assert_bits_of_torch as assert_packed_bits_of_torch
from tests.helpers.kernels.stored_matrices import assert_bits_of_torch, every_code, stored_matrices


# Triton's interpreter truncates to bfloat16, where a GPU rounds; test_gpu_kernels.py checks that.
@settings(max_examples=60, deadline=None)
@given(stored_matrices(), st.sampled_from([torch.float32, torch.float16]), st.booleans())
def test_the_bits_are_those_of_torch(
    case: tuple[MatrixFormula, dict[Role, torch.Tensor]], dtype: torch.dtype, is_part: bool
) -> None:
    assert_bits_of_torch(decode_by_triton, case, dtype, is_part)


def test_every_code_is_decoded() -> None:
    for case in every_code():
        assert_bits_of_torch(decode_by_triton, case, torch.float32, False)


@settings(max_examples=12, deadline=None)
@given(float_matrices(), st.booleans())
def test_packed_floats_are_decoded(case: tuple[Formula, torch.Tensor], is_part: bool) -> None:
    assert_packed_bits_of_torch(decode_floats_by_triton, case, is_part)


@pytest.mark.slow
def test_every_packed_float_is_decoded() -> None:
    for case in every_float():
        assert_packed_bits_of_torch(decode_floats_by_triton, case)


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_without_spills() -> None:
    words = [sys.executable, "-m", "tests.helpers.kernels.static_decoder"]
    done = subprocess.run(words, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    assert {(code["capability"], code["layout"]) for code in codes} == {
        (capability, layout)
        for capability in (80, 90, 100)
        for layout in (
            "fp8 blocks",
            "mxfp4, transposed",
            "gptq",
            "awq",
            "lossless bf16",
            "lossless fp16",
            "lossless fp32",
            "elf fp16",
            "elf fp32",
            "rows to fp8",
        )
    }
    for code in codes:
        assert code["spilled_bytes"] == 0, code
        # At least a quarter of a multiprocessor's threads hide the latency of memory.
        assert code["blocks_per_processor"] * code["threads"] >= 512, code
