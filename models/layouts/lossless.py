"""Lossless packing: signs and mantissas as they are, exponents in three bits.

The exponents of a row of trained weights are close together: of normally distributed weights, seven successive
exponents are those of 97.5 %. Each row chooses the seven that most of its elements have.

    code 0 to 6    the exponent is the `base` of the row plus the code
    code 7         the exponent is the next byte of the escapes

Sections (see packed_floats.py):

    base and index of the first escape of each row, int32 [rows, 2]
    bit planes [rows, planes, ceil(columns / 8)]: three of codes, then those of further bits of sign and mantissa
    escapes, by row and column, then zeros

bf16 takes 8 + 3 bits and one byte for each escape, which is 0.70 of its bytes; fp32 takes 0.85 and fp16 0.89.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from moepass.models.layouts.layout import Role
from moepass.models.layouts.packed_floats import CHECKSUM_BYTES, PackedFormula, bit_planes, sealed

_CODE_PLANES = 3
_ESCAPE = (1 << _CODE_PLANES) - 1


class LosslessFormula(PackedFormula, frozen=True, tag="lossless"):
    """The formula that decodes matrices to the bits that were packed."""

    code_planes: ClassVar[int] = _CODE_PLANES
    row_bytes: ClassVar[int] = 8
    exception_bytes: ClassVar[int] = 1

    @property
    def suffixes(self) -> dict[Role, str]:
        """Suffixes of the keys of stored tensors."""
        return {Role.VALUES: f"_{self.number}_fractions", Role.SECTIONS: f"_{self.number}_exponents"}

    def least_bytes(self, rows: int, columns: int) -> int:
        """Return the least bytes of the sections of a matrix."""
        return self.planes_end(rows, columns) + 8

    def encode(self, matrix: torch.Tensor) -> dict[Role, torch.Tensor]:
        """Return the stored tensors of `matrix` [rows, columns]."""
        number = self.type
        rows, columns = matrix.shape
        bits = matrix.contiguous().view(number.integer)
        exponent_range = 1 << number.exponent_bits
        exponents = (bits >> number.mantissa_bits & (exponent_range - 1)).short()
        # The sign bit, where a negative number has its sign, follows the mantissa.
        values, high = self.split(bits & number.mantissa_mask | (bits < 0).to(bits.dtype) << number.mantissa_bits)

        counts = torch.zeros(rows, exponent_range, dtype=torch.int32)
        counts.scatter_add_(1, exponents.long(), torch.ones(1, dtype=torch.int32).expand(rows, columns))
        base = counts.unfold(1, _ESCAPE, 1).sum(-1).argmax(1, keepdim=True).short()
        codes = exponents - base
        is_escape = (codes < 0) | (codes >= _ESCAPE)
        planes = torch.cat([bit_planes(codes.masked_fill_(is_escape, _ESCAPE).byte(), _CODE_PLANES), high], 1)
        per_row = is_escape.sum(1, dtype=torch.int32)
        row_values = torch.stack([base.squeeze(1).int(), per_row.cumsum(0, dtype=torch.int32) - per_row], 1)
        sections = [row_values.view(torch.uint8).flatten(), planes.flatten(), exponents[is_escape].byte()]
        return self.padded(sealed(values, torch.cat(sections)), self.least_bytes(rows, columns))

    def decode(self, stored: Mapping[Role, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix in `dtype`: [..., out, in], or [..., in, out] if it is transposed."""
        number = self.type
        *leading, rows, columns = self.shape(tuple(stored[Role.VALUES].shape))
        sections = stored[Role.SECTIONS].reshape(*leading, -1)
        row_values = sections[..., CHECKSUM_BYTES : CHECKSUM_BYTES + rows * self.row_bytes].contiguous()
        planes = self.planes_of(stored)
        codes = planes[..., 0, :] | planes[..., 1, :] << 1 | planes[..., 2, :] << 2
        is_escape = codes == _ESCAPE
        escapes = sections[..., self.planes_end(rows, columns) :]
        index = (is_escape.flatten(-2).cumsum(-1) - 1).clamp_(0, escapes.shape[-1] - 1)
        base = row_values.view(torch.int32).view(*leading, rows, 2)[..., :1]
        exponents = torch.where(is_escape, escapes.gather(-1, index).view_as(codes).int(), codes + base)
        fractions = self.fractions_of(stored, planes)
        bits = exponents << number.mantissa_bits | fractions & number.mantissa_mask
        bits |= fractions >> number.mantissa_bits << number.mantissa_bits + number.exponent_bits
        matrix = bits.to(number.integer).view(number.dtype).to(dtype)
        return matrix.transpose(-1, -2) if self.is_transposed else matrix
