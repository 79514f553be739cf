"""Random float matrices packed without loss, and a check of their decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from hypothesis import strategies as st

from moepass.models.layouts.layout import Role
from moepass.models.layouts.lossless import FLOAT_TYPES, LosslessFormula


@st.composite
def float_matrices(draw: st.DrawFn) -> tuple[LosslessFormula, torch.Tensor]:
    """Draw a formula and matrices [experts, rows, columns]: random bits, weights, or special values between weights."""
    formula = LosslessFormula(draw(st.sampled_from(list(FLOAT_TYPES))), draw(st.booleans()))
    dtype = formula.type.dtype
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 70)), draw(st.integers(1, 90)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)[..., 0]
    weights = (torch.randn(shape, generator=generator) * draw(st.sampled_from([1e-30, 1e-3, 0.02, 5.0]))).to(dtype)
    kind = draw(st.sampled_from(["bits", "weights", "mixture", "zeros", "rows of other sizes"]))
    if kind == "bits":
        return formula, bits
    if kind == "mixture":
        return formula, torch.where(torch.rand(shape, generator=generator) < 0.1, bits, weights)
    if kind == "rows of other sizes":
        return formula, weights * torch.logspace(-6, 3, shape[1]).to(dtype)[:, None]
    return formula, torch.zeros(shape, dtype=dtype) if kind == "zeros" else weights


def every_float() -> list[tuple[LosslessFormula, torch.Tensor]]:
    """Return all numbers of 16 bits, and of 32 bits all exponents with many mantissas, in order and mixed."""
    words = torch.arange(1 << 16, dtype=torch.int32)
    wide = (words << 16) | (words * 0x9E37 & 0xFFFF)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    cases = []
    for number, float_type in FLOAT_TYPES.items():
        integers = wide if float_type.dtype.itemsize == 4 else words.to(float_type.integer)
        for numbers in (integers, integers[order]):
            cases.append((LosslessFormula(number), numbers.view(float_type.dtype).view(1, 64, 1024)))
    return cases


def packed(formula: LosslessFormula, matrices: torch.Tensor) -> dict[Role, torch.Tensor]:
    """Return the stored tensors of `matrices`, stacked."""
    encoded = [formula.encode(matrix) for matrix in matrices]
    longest = max(len(matrix[Role.EXPONENTS]) for matrix in encoded)
    padded = [formula.padded(matrix, longest) for matrix in encoded]
    return {role: torch.stack([matrix[role] for matrix in padded]) for role in padded[0]}


def assert_bits_are_kept(
    decode: Callable[[LosslessFormula, Mapping[Role, torch.Tensor], torch.Tensor], None],
    case: tuple[LosslessFormula, torch.Tensor],
    is_part: bool = False,
    device: str = "cpu",
) -> None:
    """Check that `decode` writes the packed bits; with `is_part` into a part of larger matrices."""
    formula, matrices = case
    stored = {role: values.to(device) for role, values in packed(formula, matrices).items()}
    expected = matrices.mT if formula.is_transposed else matrices
    shape = expected.shape
    integer = formula.type.integer
    memory = torch.full([shape[0], *(size + 8 * is_part for size in shape[1:])], 77, dtype=integer, device=device)
    target = memory.view(matrices.dtype)[:, : shape[1], : shape[2]]
    decode(formula, stored, target)
    assert torch.equal(memory[:, : shape[1], : shape[2]].cpu(), expected.contiguous().view(integer))
    memory[:, : shape[1], : shape[2]] = 77
    assert (memory == 77).all()
