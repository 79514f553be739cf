"""Random float matrices packed by moepass, and a check of their decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from hypothesis import strategies as st

from moepass.models.layouts.elf import ElfFormula
from moepass.models.layouts.layout import Role
from moepass.models.layouts.lossless import LosslessFormula
from moepass.models.layouts.packed_floats import FLOAT_TYPES
from moepass.models.layouts.published import PACKED_NUMBERS

Formula = LosslessFormula | ElfFormula
FORMULAS: tuple[Formula, ...] = (
    *(LosslessFormula(number) for number in PACKED_NUMBERS["lossless"]),
    *(ElfFormula(number) for number in PACKED_NUMBERS["elf"]),
)


@st.composite
def float_matrices(draw: st.DrawFn) -> tuple[Formula, torch.Tensor]:
    """Draw a formula and matrices [experts, rows, columns]: random bits, weights, or special values between weights."""
    plain = draw(st.sampled_from(FORMULAS))
    formula = type(plain)(plain.number, draw(st.booleans()))
    dtype = formula.type.dtype
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 70)), draw(st.integers(1, 90)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)[..., 0]
    weights = (torch.randn(shape, generator=generator) * draw(st.sampled_from([1e-30, 1e-3, 0.02, 5.0]))).to(dtype)
    kind = draw(st.sampled_from(["bits", "weights", "mixture", "zeros", "rows of other sizes"]))
    if kind == "bits":
        return formula, bits
    if kind == "mixture":
        # In integers, because a choice between floats would make signalling NaNs quiet.
        integer, is_special = formula.type.integer, torch.rand(shape, generator=generator) < 0.1
        return formula, torch.where(is_special, bits.view(integer), weights.view(integer)).view(dtype)
    if kind == "rows of other sizes":
        return formula, weights * torch.logspace(-6, 3, shape[1]).to(dtype)[:, None]
    return formula, torch.zeros(shape, dtype=dtype) if kind == "zeros" else weights


def every_float() -> list[tuple[Formula, torch.Tensor]]:
    """Return all numbers of 16 bits, and of 32 bits all exponents with many mantissas, in order and mixed."""
    words = torch.arange(1 << 16, dtype=torch.int32)
    wide = (words << 16) | (words * 0x9E37 & 0xFFFF)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    cases: list[tuple[Formula, torch.Tensor]] = []
    for formula in FORMULAS:
        float_type = FLOAT_TYPES[formula.number]
        integers = wide if float_type.dtype.itemsize == 4 else words.to(float_type.integer)
        for numbers in (integers, integers[order]):
            cases.append((formula, numbers.view(float_type.dtype).view(1, 64, 1024)))
    return cases


def packed(formula: Formula, matrices: torch.Tensor) -> dict[Role, torch.Tensor]:
    """Return the stored tensors of `matrices`, stacked."""
    encoded = [formula.encode(matrix) for matrix in matrices]
    longest = max(len(matrix[Role.SECTIONS]) for matrix in encoded)
    padded = [formula.padded(matrix, longest) for matrix in encoded]
    return {role: torch.stack([matrix[role] for matrix in padded]) for role in padded[0]}


def assert_numbers_are_kept(formula: Formula, decoded: torch.Tensor, matrices: torch.Tensor) -> None:
    """Check that `decoded` has the bits of `matrices`, or for ELF numbers within its bound."""
    bits = [tensor.contiguous().view(formula.type.integer) for tensor in (decoded, matrices)]
    is_equal = bits[0] == bits[1]
    if isinstance(formula, ElfFormula):
        is_equal |= (decoded.double() - matrices.double()).abs() <= formula.bound
        assert torch.equal(decoded.signbit(), matrices.signbit())
    assert is_equal.all()


def assert_bits_of_torch(
    decode: Callable[[Formula, Mapping[Role, torch.Tensor], torch.Tensor], None],
    case: tuple[Formula, torch.Tensor],
    is_part: bool = False,
    device: str = "cpu",
) -> None:
    """Check that `decode` writes the bits of the formula's `decode`; with `is_part` into a part of larger matrices."""
    formula, matrices = case
    integer = formula.type.integer
    stored = {role: values.to(device) for role, values in packed(formula, matrices).items()}
    expected = formula.decode(stored, matrices.dtype).contiguous().view(integer)
    shape = expected.shape
    memory = torch.full([shape[0], *(size + 8 * is_part for size in shape[1:])], 77, dtype=integer, device=device)
    decode(formula, stored, memory.view(matrices.dtype)[:, : shape[1], : shape[2]])
    assert torch.equal(memory[:, : shape[1], : shape[2]], expected)
    # Nothing is written beside the target.
    memory[:, : shape[1], : shape[2]] = 77
    assert (memory == 77).all()
