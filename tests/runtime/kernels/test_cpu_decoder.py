"""Decoding in C++ gives the same bits as the formulas in torch."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models.errors import CheckpointError
from moepass.models.layouts.layout import MatrixFormula, Number, Role
from moepass.runtime.kernels import cpu_decoder
from moepass.runtime.kernels.cpu_decoder import (
    can_decode,
    check_floats_on_cpu,
    decode_floats_on_cpu,
    decode_on_cpu,
)
from tests.helpers.kernels.packed_floats import Formula, every_float, float_matrices, packed
from tests.helpers.kernels.packed_floats import assert_bits_of_torch as assert_packed_bits_of_torch
from tests.helpers.kernels.stored_matrices import (
    DTYPES,
    INTERLEAVED,
    assert_bits_of_torch,
    every_code,
    stored_matrices,
)


@settings(max_examples=150, deadline=None)
@given(stored_matrices(), DTYPES, st.booleans())
def test_the_bits_are_those_of_torch(
    case: tuple[MatrixFormula, dict[Role, torch.Tensor]], dtype: torch.dtype, is_part: bool
) -> None:
    assert_bits_of_torch(decode_on_cpu, case, dtype, is_part)


def test_every_code_is_decoded() -> None:
    for case in every_code():
        assert_bits_of_torch(decode_on_cpu, case, torch.float32, False)


@settings(max_examples=150, deadline=None)
@given(float_matrices(), st.booleans())
def test_packed_floats_are_decoded(case: tuple[Formula, torch.Tensor], is_part: bool) -> None:
    assert_packed_bits_of_torch(decode_floats_on_cpu, case, is_part)


def test_every_packed_float_is_decoded() -> None:
    for case in every_float():
        assert_packed_bits_of_torch(decode_floats_on_cpu, case)


@settings(max_examples=100, deadline=None)
@given(float_matrices(), st.data())
def test_a_changed_byte_of_packed_floats_is_an_error(case: tuple[Formula, torch.Tensor], data: st.DataObject) -> None:
    formula, matrices = case
    stored = packed(formula, matrices)
    check_floats_on_cpu(stored)
    changed = stored[data.draw(st.sampled_from(sorted(stored)))].flatten()
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointError, match="does not have its checksum"):
        check_floats_on_cpu(stored)
    with pytest.raises(CheckpointError, match="does not have its checksum"):
        decode_floats_on_cpu(formula, stored, torch.empty_like(matrices.mT if formula.is_transposed else matrices))


def test_another_default_device_changes_nothing() -> None:
    packing = INTERLEAVED
    formula = MatrixFormula(packing, Number.INT, (1, None))
    words = torch.arange(16, dtype=torch.int32).view(1, 8, 2) * 0x01234567
    stored = {Role.VALUES: words, Role.SCALES: torch.ones(1, 1, 16)}
    expected, target = formula.decode(stored, torch.float32), torch.zeros(1, 16, 8)
    with torch.device("meta"):
        decode_on_cpu(formula, stored, target)
    assert torch.equal(target, expected)


def test_targets_that_cxx_cannot_write() -> None:
    assert not can_decode(torch.empty(2, 4, 4, dtype=torch.float64))
    assert not can_decode(torch.empty(2, 4, 4, device="meta"))
    assert not can_decode(torch.empty(2, 8, 8)[:, ::2, ::2])


def test_without_a_compiler_a_warning_says_that_torch_decodes(caplog: pytest.LogCaptureFixture) -> None:
    cpu_decoder.library.cache_clear()
    try:
        with (
            mock.patch("torch._inductor.codecache.CppCodeCache.load", side_effect=RuntimeError("no g++")),
            caplog.at_level(logging.WARNING, "moepass"),
        ):
            assert not can_decode(torch.empty(2, 4, 4))
            assert not can_decode(torch.empty(2, 4, 4))
    finally:
        cpu_decoder.library.cache_clear()
    (record,) = caplog.records
    assert record.getMessage().endswith("the C++ compiler fails: no g++")
