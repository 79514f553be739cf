"""Lossless packing keeps every bit, ELF its bound; checksums notice every changed byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from moepass.models.demo import demo_folder
from moepass.models.errors import CheckpointError
from moepass.models.layouts.elf import ElfFormula
from moepass.models.layouts.layout import Role
from moepass.models.layouts.packed_floats import FLOAT_TYPES, _checksum
from moepass.models.sizes.weight_formats import packed_format
from tests.helpers.kernels.packed_floats import (
    FORMULAS,
    Formula,
    assert_numbers_are_kept,
    every_float,
    float_matrices,
    packed,
)


def _name(formula: Formula) -> str:
    return f"{type(formula).__name__}-{formula.number}"


@settings(max_examples=250)
@given(float_matrices())
def test_numbers_are_kept(case: tuple[Formula, torch.Tensor]) -> None:
    formula, matrices = case
    stored = packed(formula, matrices)
    formula.check(stored)
    decoded = formula.decode(stored, matrices.dtype)
    assert_numbers_are_kept(formula, decoded.mT if formula.is_transposed else decoded, matrices)


def test_every_number_is_kept() -> None:
    for formula, matrices in every_float():
        assert_numbers_are_kept(formula, formula.decode(packed(formula, matrices), matrices.dtype), matrices)


def test_trained_weights_are_kept() -> None:
    weights = load_file(Path(demo_folder()) / "model.safetensors")
    experts = [value for key, value in weights.items() if ".experts." in key and value.dim() == 2]
    assert len(experts) == 4 * 16 * 3
    for formula in FORMULAS:
        for expert in experts[::5]:
            matrix = expert.to(formula.type.dtype)
            assert_numbers_are_kept(formula, formula.decode(formula.encode(matrix), matrix.dtype), matrix)


@pytest.mark.parametrize("formula", FORMULAS, ids=_name)
def test_normally_distributed_weights_take_few_bytes_as_explain_counts_them(formula: Formula) -> None:
    matrix = (torch.randn(512, 2048) * 0.02).to(formula.type.dtype)
    nbytes = sum(values.nbytes for values in formula.encode(matrix).values())
    is_elf = isinstance(formula, ElfFormula)
    most = {"bf16": 0.702, "fp16": 0.688, "fp32": 0.751} if is_elf else {"bf16": 0.702, "fp16": 0.890, "fp32": 0.852}
    assert nbytes <= most[formula.number] * matrix.nbytes
    estimate = packed_format(formula.number, "elf" if is_elf else "lossless")
    assert estimate is not None
    assert estimate.matrix_bytes(512, 2048) == pytest.approx(nbytes, rel=0.005)


def test_the_bounds_of_elf() -> None:
    assert ElfFormula("fp32").bound == 2**-24
    assert ElfFormula("fp16").bound == 2**-11
    assert packed_format("bf16", "elf") is None
    assert set(FLOAT_TYPES) == {"bf16", "fp16", "fp32"}


@settings(max_examples=150)
@given(float_matrices(), st.data())
def test_a_changed_byte_is_noticed(case: tuple[Formula, torch.Tensor], data: st.DataObject) -> None:
    formula, matrices = case
    stored = packed(formula, matrices)
    role = data.draw(st.sampled_from(sorted(stored)))
    changed = stored[role].flatten(1)
    expert = data.draw(st.integers(0, len(matrices) - 1))
    changed[expert, data.draw(st.integers(0, changed.shape[1] - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointError, match=f"^matrix {expert} of packed weights does not have its checksum"):
        formula.check(stored)


@settings(max_examples=200)
@given(float_matrices(), st.integers(0, 63), st.integers(2, 16), st.integers(0, 1 << 30))
def test_the_same_bit_of_several_words_is_noticed(
    case: tuple[Formula, torch.Tensor], bit: int, words: int, seed: int
) -> None:
    formula, matrices = case
    stored = packed(formula, matrices[:1])
    values = torch.nn.functional.pad(stored[Role.VALUES].flatten(), (0, 8))
    values = values[: len(values) // 8 * 8].clone().view(torch.int64)
    before = _checksum(values.view(torch.uint8))
    changed = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))[:words]
    values[changed] ^= 1 << bit if bit < 63 else -(1 << 63)
    assert _checksum(values.view(torch.uint8)) != before


def test_zeros_do_not_have_their_checksum() -> None:
    for formula in FORMULAS:
        stored = formula.encode(torch.randn(8, 16).to(formula.type.dtype))
        with pytest.raises(CheckpointError, match="does not have its checksum"):
            formula.check({role: torch.zeros_like(values) for role, values in stored.items()})
