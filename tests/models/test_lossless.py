"""Lossless packing keeps every bit, and its checksums notice every changed byte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from moepass.models.demo import demo_folder
from moepass.models.errors import CheckpointError
from moepass.models.layouts.layout import Role
from moepass.models.layouts.lossless import FLOAT_TYPES, FloatName, LosslessFormula
from moepass.models.sizes.weight_formats import packed_format
from tests.helpers.kernels.packed_floats import assert_bits_are_kept, every_float, float_matrices, packed


def _decode(formula: LosslessFormula, stored: Mapping[Role, torch.Tensor], target: torch.Tensor) -> None:
    formula.check(stored)
    target.copy_(formula.decode(stored, target.dtype))


def _bits(formula: LosslessFormula, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(formula.type.integer)


@settings(max_examples=150)
@given(float_matrices())
def test_every_bit_is_kept(case: tuple[LosslessFormula, torch.Tensor]) -> None:
    formula, matrices = case
    stored = packed(formula, matrices)
    formula.check(stored)
    decoded = formula.decode(stored, matrices.dtype)
    assert torch.equal(_bits(formula, decoded.mT if formula.is_transposed else decoded), _bits(formula, matrices))


def test_every_number_is_kept() -> None:
    for formula, matrices in every_float():
        decoded = formula.decode(packed(formula, matrices), matrices.dtype)
        assert torch.equal(_bits(formula, decoded), _bits(formula, matrices))


def test_trained_weights_are_kept() -> None:
    weights = load_file(Path(demo_folder()) / "model.safetensors")
    experts = [value for key, value in weights.items() if ".experts." in key and value.dim() == 2]
    assert len(experts) == 4 * 16 * 3
    for number, float_type in FLOAT_TYPES.items():
        formula = LosslessFormula(number)
        for matrix in experts:
            matrix = matrix.to(float_type.dtype)
            assert torch.equal(
                _bits(formula, formula.decode(formula.encode(matrix), matrix.dtype)), _bits(formula, matrix)
            )


@pytest.mark.parametrize(("number", "most"), [("bf16", 0.702), ("fp16", 0.890), ("fp32", 0.852)])
def test_normally_distributed_weights_take_few_bytes(number: FloatName, most: float) -> None:
    formula = LosslessFormula(number)
    matrix = (torch.randn(256, 2048) * 0.02).to(formula.type.dtype)
    assert sum(values.nbytes for values in formula.encode(matrix).values()) <= most * matrix.nbytes


@settings(max_examples=150)
@given(float_matrices(), st.data())
def test_a_changed_byte_is_noticed(case: tuple[LosslessFormula, torch.Tensor], data: st.DataObject) -> None:
    formula, matrices = case
    stored = packed(formula, matrices)
    role = data.draw(st.sampled_from(sorted(stored)))
    changed = stored[role].flatten(1)
    expert = data.draw(st.integers(0, len(matrices) - 1))
    changed[expert, data.draw(st.integers(0, changed.shape[1] - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointError, match=f"^matrix {expert} of packed weights does not have its checksum"):
        formula.check(stored)


def test_parts_of_larger_matrices_are_decoded() -> None:
    assert_bits_are_kept(_decode, (LosslessFormula("bf16"), torch.randn(2, 9, 17).bfloat16()), is_part=True)


@pytest.mark.parametrize("number", FLOAT_TYPES)
def test_the_sizes_that_explain_counts_are_those_of_normally_distributed_weights(number: FloatName) -> None:
    formula, estimate = LosslessFormula(number), packed_format(number)
    assert estimate is not None
    matrix = (torch.randn(512, 2048) * 0.02).to(formula.type.dtype)
    nbytes = sum(values.nbytes for values in formula.encode(matrix).values())
    assert estimate.matrix_bytes(512, 2048) == pytest.approx(nbytes, rel=0.005)
