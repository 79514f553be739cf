"""Expert kernels on a GPU: compiled kernels compute what the interpreter computes."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import moepass
from moepass.models.layouts.layout import MatrixFormula, Role
from moepass.passes.ir.segment import TRITON
from moepass.passes.segments.expert_kernels import read_kernels
from moepass.passes.segments.expert_program import read_program
from moepass.runtime.kernels.fp8_rows import BlockScaledWeights
from moepass.runtime.kernels.grouped_gemm.launch import GeneratedGemm
from moepass.runtime.kernels.grouped_gemm.tile_sizes import candidate_sizes, tile_sizes
from moepass.runtime.kernels.triton_decoder import decode_by_triton
from moepass.runtime.lowering.lower_triton_experts import TritonExperts, lower_to_triton
from tests.helpers.kernels.fp8_matrices import by_expert, in_blocks
from tests.helpers.kernels.stored_matrices import DTYPES, assert_bits_of_torch, stored_matrices
from tests.helpers.models.expert_segments import (
    ACTIVATIONS,
    FORMS,
    ExpertInputs,
    ExpertSizes,
    expert_inputs,
    expert_segment,
)
from tests.helpers.models.tiny import TINY_FAMILIES, tiny_inputs, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
# Sizes that no tile divides; one expert has most of the rows, one has none.
SIZES = ExpertSizes(tokens=333, pairs=777, experts=5, hidden=104, width=72)
SHARES = torch.tensor([8.0, 0.0, 1.0, 1.0, 0.2])
# Experts as in qwen3-30b-a3b: most of them with few rows.
MANY = ExpertSizes(tokens=4096, pairs=8192, experts=128, hidden=2048, width=768, dtype=torch.bfloat16)
# Largest error as a part of the largest value.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@settings(max_examples=100, deadline=None)
@given(stored_matrices(), DTYPES, st.booleans())
def test_quantised_matrices_have_the_bits_of_torch(
    case: tuple[MatrixFormula, dict[Role, torch.Tensor]], dtype: torch.dtype, is_part: bool
) -> None:
    formula, stored = case
    on_device = formula, {role: values.to(DEVICE) for role, values in stored.items()}
    assert_bits_of_torch(decode_by_triton, on_device, dtype, is_part)


def _lowered(activation: str, form: str, inputs: ExpertInputs) -> TritonExperts:
    lowered = lower_to_triton(expert_segment(activation, form, inputs), lambda graph: lambda given: graph(*given))
    assert isinstance(lowered, TritonExperts), lowered
    return lowered


def _in_float64(activation: str, form: str, inputs: ExpertInputs) -> torch.Tensor:
    exact = [value.cpu().double() if value.is_floating_point() else value.cpu() for value in inputs.tensors()]
    (result,) = expert_segment(activation, form, ExpertInputs(*exact))(*exact)
    return result


def _assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.shape == expected.shape
    error = (result.cpu().double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error <= TOLERANCES[result.dtype]


def _assert_right(activation: str, form: str, inputs: ExpertInputs) -> None:
    lowered, expected = _lowered(activation, form, inputs), _in_float64(activation, form, inputs)
    (result,) = lowered(inputs.tensors())
    _assert_close(result, expected)
    # No atomics: every run gives the same.
    (again,) = lowered(inputs.tensors())
    assert torch.equal(result, again)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_row_work_of_every_kind(activation: str, form: str, dtype: torch.dtype) -> None:
    _assert_right(activation, form, expert_inputs(dataclasses.replace(SIZES, dtype=dtype), SHARES, DEVICE))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_layouts_of_weights(dtype: torch.dtype, turned: bool) -> None:
    sizes = dataclasses.replace(SIZES, dtype=dtype)
    for activation, form in (("swiglu", "plain"), ("clamped, interleaved", "biases")):
        _assert_right(activation, form, expert_inputs(sizes, SHARES, DEVICE, turned))


@pytest.mark.parametrize("tokens", [1, 17, 4096])
def test_many_experts(tokens: int) -> None:
    sizes = dataclasses.replace(MANY, tokens=tokens, pairs=2 * tokens)
    _assert_right("swiglu", "weights last", expert_inputs(sizes, 1 / torch.arange(1.0, 129.0), DEVICE))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_all_sizes_of_tiles(dtype: torch.dtype) -> None:
    inputs = expert_inputs(dataclasses.replace(SIZES, dtype=dtype), SHARES, DEVICE)
    kernel, operands = _first_kernel(inputs), [inputs.x, inputs.token]
    sizes = candidate_sizes(kernel.kernel, torch.cuda.get_device_capability()[0], dtype)
    results = [kernel(operands, [inputs.up.mT], inputs.ends, SIZES.pairs, tile)[0] for tile in sizes]
    assert len(results) > 1
    for result in results[1:]:
        _assert_close(result, results[0].cpu().double())


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_tiles_that_the_hardware_copies(dtype: torch.dtype, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older hardware computes the same with pointers."""
    monkeypatch.setattr(
        "moepass.runtime.kernels.grouped_gemm.launch.tile_sizes",
        lambda *asked: dataclasses.replace(tile_sizes(*asked), descriptors=True),
    )
    for activation, form in (("swiglu", "returned"), ("clamped, interleaved", "biases")):
        inputs = expert_inputs(dataclasses.replace(SIZES, dtype=dtype), SHARES, DEVICE, turned)
        _assert_right(activation, form, inputs)


def test_kernels_are_tuned_and_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEPASS_CACHE_DIR", str(tmp_path))
    inputs = expert_inputs(dataclasses.replace(SIZES, dtype=torch.bfloat16), SHARES, DEVICE)
    with moepass.tune_kernels():
        _assert_right("swiglu", "returned", inputs)
    assert len(list(tmp_path.iterdir())) == 2  # one file for each kernel
    _assert_right("swiglu", "returned", inputs)


def _first_kernel(inputs: ExpertInputs) -> GeneratedGemm:
    return GeneratedGemm(read_kernels(read_program(expert_segment("swiglu", "plain", inputs))).kernels[0])


@pytest.mark.parametrize("cuts", [(2,), (1, 3), (0, 5)])
def test_weights_in_parts(cuts: tuple[int, ...]) -> None:
    inputs = expert_inputs(SIZES, SHARES, DEVICE)
    bounds = (0, *cuts, SIZES.experts)
    parts = [inputs.up[low:high].clone().mT for low, high in itertools.pairwise(bounds)]
    kernel, operands = _first_kernel(inputs), [inputs.x, inputs.token]
    (ours,) = kernel(operands, parts, inputs.ends, SIZES.pairs)
    (complete,) = kernel(operands, [inputs.up.mT], inputs.ends, SIZES.pairs)
    assert torch.equal(ours, complete)


def test_offsets_beyond_32_bits() -> None:
    sizes = dataclasses.replace(SIZES, tokens=4, dtype=torch.bfloat16)
    inputs = expert_inputs(sizes, SHARES, DEVICE)
    elements = 3 * (1 << 30) + sizes.hidden
    if torch.cuda.mem_get_info()[0] < 2 * elements:
        pytest.skip("needs 6 GB of free device memory")
    x = torch.empty(elements, dtype=sizes.dtype, device=DEVICE).as_strided((4, sizes.hidden), (1 << 30, 1))
    x.copy_(inputs.x)
    kernel = _first_kernel(inputs)
    (ours,) = kernel([x, inputs.token], [inputs.up.mT], inputs.ends, sizes.pairs)
    (near,) = kernel([inputs.x, inputs.token], [inputs.up.mT], inputs.ends, sizes.pairs)
    assert torch.equal(ours, near)


# llama4 multiplies by batches of experts (bmm), which are no grouped GEMMs.
@pytest.mark.parametrize("family", [name for name in TINY_FAMILIES if name != "llama4"])
def test_families(no_grad: None, family: str) -> None:
    if not hasattr(transformers, TINY_FAMILIES[family].model_class):
        pytest.skip(f"transformers {transformers.__version__} has no {TINY_FAMILIES[family].model_class}")
    model = tiny_model(family).to(DEVICE)
    inputs = {name: value.to(DEVICE) for name, value in tiny_inputs(model).items()}
    expected = model(**inputs).logits
    moepass.offload_experts(model)
    with moepass.record_compilations() as compilations:
        logits = torch.compile(model, backend="asyncep")(**inputs).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    assert TRITON in {
        segment.lowering.how
        for compilation in compilations
        for segment in compilation.plan.segments
        if segment.lowering is not None
    }


@pytest.mark.parametrize("sizes", [SIZES, dataclasses.replace(MANY, pairs=4096)])
def test_experts_multiply_in_fp8(sizes: ExpertSizes) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("kernels in FP8 are for compute capability 9.0 and higher")
    inputs = expert_inputs(dataclasses.replace(sizes, dtype=torch.bfloat16), None if sizes is not SIZES else SHARES)
    kernel = read_kernels(read_program(expert_segment("swiglu", "plain", inputs))).kernels[1]
    weights = in_blocks(inputs.down)
    rows = torch.randn(sizes.pairs, sizes.width, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    on_device = BlockScaledWeights(*(tensor.to(DEVICE).transpose(1, 2) for tensor in weights))
    operands = [rows.to(DEVICE) for _ in kernel.operands]
    expected = by_expert(rows, weights, inputs.ends)
    for tile in candidate_sizes(kernel, torch.cuda.get_device_capability()[0], weights.values.dtype):
        (result,) = GeneratedGemm(kernel)(operands, on_device, inputs.ends.to(DEVICE), sizes.pairs, tile)
        # The device divides rows by their scales less precisely, so a few numbers are rounded to a neighbour.
        assert (result.cpu().double() - expected).norm() / expected.norm() < 5e-3
