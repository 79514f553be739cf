"""Experts that multiply in FP8, in Triton's interpreter, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.passes.ir.shards import FP8_BLOCK
from moepass.passes.segments.expert_kernels import read_kernels
from moepass.passes.segments.expert_program import read_program
from moepass.runtime.kernels.fp8_rows import BlockScaledWeights, quantize_rows
from moepass.runtime.kernels.grouped_gemm.launch import GeneratedGemm
from moepass.runtime.kernels.grouped_gemm.tile_sizes import TileSizes
from moepass.runtime.lowering.lower_triton_experts import TritonExperts, lower_to_triton
from tests.helpers.kernels.fp8_matrices import by_expert, exact_rows, in_blocks
from tests.helpers.models.expert_segments import ExpertInputs, ExpertSizes, expert_inputs, expert_segment

# Neither width nor hidden is a multiple of a block or of a tile.
SIZES = ExpertSizes(tokens=24, pairs=60, experts=4, hidden=200, width=88, dtype=torch.bfloat16)
SHARES = torch.tensor([6.0, 0.0, 1.0, 1.0])


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 300),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.integers(-110, 100),  # the interpreter converts denormal numbers of bfloat16 wrongly
    st.randoms(use_true_random=False),
)
def test_rows_are_rounded_to_the_nearest(count: int, width: int, dtype: torch.dtype, exponent: int, random) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    rows = (torch.randn(count, width, generator=generator) * 2.0**exponent).to(dtype).nan_to_num(posinf=1.0, neginf=1.0)
    rows[torch.rand(count, width, generator=generator) < 0.1] = 0
    scaled = quantize_rows(rows)
    held = scaled.values.double() * scaled.scales.repeat_interleave(FP8_BLOCK, 1)[:, :width].double()
    torch.testing.assert_close(held, exact_rows(rows), rtol=0, atol=0)


def test_a_number_that_is_none_stays_none() -> None:
    rows = torch.ones(2, 2 * FP8_BLOCK)
    rows[0, 3] = float("nan")
    scaled = quantize_rows(rows)
    assert scaled.values.float().isnan().nonzero().tolist() == [[0, 3]]
    assert scaled.scales.isfinite().all()


def _run(activation: str, form: str, inputs: ExpertInputs) -> torch.Tensor:
    lowered = lower_to_triton(expert_segment(activation, form, inputs), lambda graph: lambda inputs: graph(*inputs))
    assert isinstance(lowered, TritonExperts), lowered
    in_fp8 = dataclasses.replace(inputs, up=in_blocks(inputs.up), down=in_blocks(inputs.down))
    (result,) = lowered(in_fp8.tensors())
    return result


@pytest.mark.parametrize(
    ("activation", "form"), [("swiglu", "returned"), ("clamped, interleaved", "biases"), ("squared relu", "plain")]
)
def test_experts_in_fp8(activation: str, form: str) -> None:
    inputs = expert_inputs(SIZES, SHARES)
    result = _run(activation, form, inputs)
    in_bf16 = ExpertInputs(*(value.double() if value.is_floating_point() else value for value in inputs.tensors()))
    (expected,) = expert_segment(activation, form, in_bf16)(*in_bf16.tensors())
    error = (result.double() - expected).norm() / expected.norm()
    # Three bits of mantissa are an error of 2.6 % of each number: of weights and rows, in gate, up and down.
    assert 0.03 < error < 0.08


def test_rows_between_the_gemms_are_quantised_once_more() -> None:
    # The interpreter truncates numbers to bfloat16, and rounds them to float16.
    inputs = expert_inputs(dataclasses.replace(SIZES, dtype=torch.float16), SHARES)
    result = _run("swiglu", "plain", inputs)
    both = by_expert(inputs.x[inputs.token], in_blocks(inputs.up), inputs.ends)
    gate, up = both.chunk(2, dim=1)
    between = (torch.nn.functional.silu(gate) * up).to(torch.float16)
    expected = by_expert(between, in_blocks(inputs.down), inputs.ends)
    # Few numbers between the GEMMs are rounded to a neighbour, because float32 sums differ.
    assert (result.double() - expected).norm() / expected.norm() < 4e-3


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("hidden", [256, 208])
def test_one_gemm_is_exact(hidden: int, descriptors: bool) -> None:
    sizes = dataclasses.replace(SIZES, hidden=hidden, dtype=torch.float32)
    inputs = expert_inputs(sizes, SHARES)
    segment = expert_segment("swiglu", "plain", inputs)
    kernel = read_kernels(read_program(segment)).kernels[1]
    weights = in_blocks(inputs.down)
    rows = torch.randn(sizes.pairs, sizes.width, generator=torch.Generator().manual_seed(1))
    turned = BlockScaledWeights(*(tensor.transpose(1, 2) for tensor in weights))
    (result,) = GeneratedGemm(kernel)(
        [rows for _ in kernel.operands],
        turned,
        inputs.ends,
        len(rows),
        TileSizes(16, 32, FP8_BLOCK, 4, 2, 8, descriptors=descriptors),
    )
    expected = by_expert(rows, weights, inputs.ends)
    error = (result.double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-6
