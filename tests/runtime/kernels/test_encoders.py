"""Packing in C++ and in threads gives the same bytes as the formulas in torch."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models.layouts.layout import Role
from moepass.models.layouts.lossless import LosslessFormula
from moepass.runtime.kernels import cpu_decoder, encoders
from moepass.runtime.kernels.encoders import EncodedMatrices, encode_matrices
from tests.helpers.kernels.packed_floats import Formula, every_float, float_matrices, packed


def _encoded(formula: Formula, matrices: torch.Tensor) -> EncodedMatrices:
    experts, rows, columns = matrices.shape
    return encode_matrices(formula, matrices, (experts, rows, columns))


def _assert_bytes_of_torch(formula: Formula, matrices: torch.Tensor, more_bytes: int = 0) -> None:
    encoded = _encoded(formula, matrices)
    longest = encoded.section_bytes + more_bytes
    expected = [formula.padded(formula.encode(matrix), longest) for matrix in matrices]
    for role, values in encoded.stored(longest).items():
        assert torch.equal(values, torch.stack([matrix[role] for matrix in expected])), role


@settings(max_examples=300, deadline=None)
@given(float_matrices(), st.sampled_from([0, 8, 80]))
def test_the_bytes_are_those_of_torch(case: tuple[Formula, torch.Tensor], more_bytes: int) -> None:
    _assert_bytes_of_torch(*case, more_bytes)


def test_every_float_is_packed() -> None:
    for case in every_float():
        _assert_bytes_of_torch(*case)


@settings(max_examples=30, deadline=None)
@given(float_matrices())
def test_without_a_compiler_torch_packs_the_same_bytes(case: tuple[Formula, torch.Tensor]) -> None:
    with mock.patch.object(encoders, "can_encode", return_value=False):
        _assert_bytes_of_torch(*case, more_bytes=16)


@pytest.mark.parametrize("threads", [1, 3])
def test_matrices_of_several_threads_keep_their_order(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # Rows of other sizes have other numbers of escapes.
    sizes = torch.logspace(-3, 3, 40)[:, None, None].clamp(min=0.1)
    matrices = (torch.randn(40, 16, 24, generator=generator) ** sizes.round()).bfloat16()
    formula, before = LosslessFormula("bf16"), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        encoded = _encoded(formula, matrices)
    finally:
        torch.set_num_threads(before)
    assert len({len(sections) for sections in encoded.sections}) > 1
    stored = encoded.stored(encoded.section_bytes)
    assert all(torch.equal(values, expected) for values, expected in zip(
        stored.values(), packed(formula, matrices).values(), strict=True))  # fmt: skip
    assert torch.equal(formula.decode(stored, torch.bfloat16).view(torch.int16), matrices.view(torch.int16))


def test_no_matrices_have_sections_of_any_length() -> None:
    encoded = encode_matrices(LosslessFormula("bf16"), [], (0, 4, 8))
    assert encoded.section_bytes == 0
    stored = encoded.stored(80)
    assert (stored[Role.VALUES].shape, stored[Role.SECTIONS].shape) == ((0, 4, 8), (0, 80))
    cpu_decoder.check_floats_on_cpu(stored)


def test_a_matrix_that_cannot_be_read_is_an_error() -> None:
    def matrices():  # type: ignore[no-untyped-def]
        yield torch.ones(4, 8, dtype=torch.bfloat16)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        encode_matrices(LosslessFormula("bf16"), matrices(), (2, 4, 8))
