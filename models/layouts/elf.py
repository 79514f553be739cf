"""Error-bounded packing, after the ELF paper: without exponents.

For |w| < 1, |w| + 1 is in [1, 2), where all floats have the same exponent, so its mantissa of m bits is enough. The
absolute error is at most 2^-(m + 1): 2^-24 for fp32, which takes 24 bits, and 2^-11 for fp16, which takes 11. All other
elements are exceptions, which are stored as they are, as are NaN and infinities.

    element      sign * mantissa * 2^-m, unless it is an exception

Sections (see packed_floats.py):

    bit planes [rows, planes, ceil(columns / 8)] of the bits of sign and mantissa that fill no byte; zeros up to a
        multiple of 8 bytes
    exceptions, 8 bytes each: index of the element in the matrix, int32, and its value, then zeros. Element 0 follows as
        often as it takes for all experts of a stack to have equally many
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch.nn import functional

from moepass.models.layouts.layout import Role
from moepass.models.layouts.packed_floats import PackedFormula, sealed


class ElfFormula(PackedFormula, frozen=True, tag="elf"):
    """The formula that decodes matrices with an absolute error of at most `bound`. Numbers are fp32 or fp16."""

    exception_bytes: ClassVar[int] = 8

    @property
    def suffixes(self) -> dict[Role, str]:
        """Suffixes of the keys of stored tensors."""
        return {Role.VALUES: f"_{self.number}_magnitudes", Role.SECTIONS: f"_{self.number}_exceptions"}

    @property
    def bound(self) -> float:
        """The largest possible absolute error of an element."""
        return 2.0 ** -(self.type.mantissa_bits + 1)

    def least_bytes(self, rows: int, columns: int) -> int:
        """Return the least bytes of the sections of a matrix: the offset of the exceptions."""
        return -(-self.planes_end(rows, columns) // 8) * 8

    def encode(self, matrix: torch.Tensor) -> dict[Role, torch.Tensor]:
        """Return the stored tensors of `matrix` [rows, columns]."""
        number, matrix = self.type, matrix.contiguous()
        mantissas = (matrix.double().abs() * 2**number.mantissa_bits).round()
        is_exception = ~(mantissas <= number.mantissa_mask)
        fractions = mantissas.masked_fill(is_exception, 0).to(number.integer)
        values, planes = self.split(fractions | matrix.signbit().to(number.integer) << number.mantissa_bits)
        exceptions = self._exceptions(matrix, is_exception.flatten().nonzero().flatten())
        return sealed(values, torch.cat([functional.pad(planes.flatten(), (0, -planes.numel() % 8)), exceptions]))

    def padding(self, stored: Mapping[Role, torch.Tensor], nbytes: int) -> torch.Tensor:
        """Return exceptions that repeat the first element."""
        first = self._exceptions(self.decode(stored, self.type.dtype), torch.zeros(1, dtype=torch.int64))
        return first.repeat(nbytes // 8)

    def exceptions(self, stored: Mapping[Role, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices of exceptions, int64 [..., count], and the bits of their values, [..., count].

        Floats would lose bits: some operations make signalling NaNs quiet.
        """
        *leading, rows, columns = self.shape(tuple(stored[Role.VALUES].shape))
        entries = stored[Role.SECTIONS].reshape(*leading, -1)[..., self.least_bytes(rows, columns) :].contiguous()
        indices = entries.view(torch.int32)[..., ::2].long().clamp(0, rows * columns - 1)
        itemsize = self.type.dtype.itemsize
        return indices, entries.view(self.type.integer)[..., 4 // itemsize :: 8 // itemsize]

    def decode(self, stored: Mapping[Role, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix in `dtype`: [..., out, in], or [..., in, out] if it is transposed."""
        number = self.type
        fractions = self.fractions_of(stored, self.planes_of(stored))
        magnitudes = (fractions & number.mantissa_mask).float() * 2.0**-number.mantissa_bits
        signs = torch.where(fractions >> number.mantissa_bits == 0, 1.0, -1.0)
        bits = (magnitudes * signs).to(number.dtype).view(number.integer)
        bits = bits.flatten(-2).scatter(-1, *self.exceptions(stored)).view_as(bits)
        matrix = bits.view(number.dtype).to(dtype)
        return matrix.transpose(-1, -2) if self.is_transposed else matrix

    def _exceptions(self, matrix: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        values = (
            matrix.flatten()
            .view(self.type.integer)[indices]
            .view(torch.uint8)
            .view(len(indices), matrix.dtype.itemsize)
        )
        entries = torch.cat([indices.int().view(torch.uint8).view(len(indices), 4), values], 1)
        return functional.pad(entries, (0, 8 - entries.shape[1])).flatten()
