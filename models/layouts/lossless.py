"""Lossless layout of float matrices: signs and mantissas as they are, exponents in three bits.

The exponents of a row of trained weights are close together: of normally distributed weights, seven successive
exponents are those of 97.5 %. Each row chooses the seven that most of its elements have.

    code 0 to 6    the exponent is the `base` of the row plus the code
    code 7         the exponent is the next byte of the escapes

A matrix [rows, columns] is stored in two tensors of bytes:

    fractions [rows, columns * bytes]    sign and mantissa of each element: their low 8, or for fp32 24, bits
    exponents [bytes]                    checksum of the fractions, int64
                                         checksum of all bytes that follow, int64
                                         base and index of the first escape of each row, int32 [rows, 2]
                                         bit planes [rows, planes, ceil(columns / 8)]: bit n of a byte is of column
                                             8 * byte + n; three planes of codes, then those of further fraction bits
                                         escapes, by row and column, then zeros: lengths are multiples of 8

bf16 takes 8 + 3 bits and one byte for each escape, which is 0.70 of its bytes; fp32 takes 0.85 and fp16 0.89.
Leading dimensions of all tensors, as of stacked experts, are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import msgspec
import torch
from torch.nn import functional

from moepass.models.errors import CheckpointError
from moepass.models.layouts.layout import Role

_CODE_PLANES = 3
_ESCAPE = (1 << _CODE_PLANES) - 1
_CHECKSUM_BYTES = 16
_ROW_BYTES = 8


FloatName = Literal["bf16", "fp16", "fp32"]


@dataclasses.dataclass(frozen=True)
class FloatType:
    """The bits of a float: sign, exponent, mantissa."""

    dtype: torch.dtype
    integer: torch.dtype
    exponent_bits: int
    mantissa_bits: int

    @property
    def fraction_bytes(self) -> int:
        """Whole bytes of the sign and the mantissa."""
        return (self.mantissa_bits + 1) // 8

    @property
    def planes(self) -> int:
        """Bit planes: those of codes, and of the bits of sign and mantissa that fill no byte."""
        return _CODE_PLANES + (self.mantissa_bits + 1) % 8


FLOAT_TYPES: Mapping[FloatName, FloatType] = {
    "bf16": FloatType(torch.bfloat16, torch.int16, 8, 7),
    "fp16": FloatType(torch.float16, torch.int16, 5, 10),
    "fp32": FloatType(torch.float32, torch.int32, 8, 23),
}


class LosslessFormula(msgspec.Struct, frozen=True, tag="lossless"):
    """The formula that decodes a matrix of `number`s; the decoded matrix is [in, out] if `is_transposed`."""

    number: FloatName
    is_transposed: bool = False

    @property
    def type(self) -> FloatType:
        """The bits of an element."""
        return FLOAT_TYPES[self.number]

    def shape(self, fractions: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape [..., out, in] of the matrices with these stored fractions."""
        return (*fractions[:-1], fractions[-1] // self.type.fraction_bytes)

    def least_bytes(self, rows: int, columns: int) -> int:
        """Return the least bytes of the exponents of a matrix."""
        return self.escapes_start(rows, columns) + 8

    def escapes_start(self, rows: int, columns: int) -> int:
        """Return the offset of the escapes in the exponents of a matrix."""
        return _CHECKSUM_BYTES + rows * (_ROW_BYTES + self.type.planes * -(-columns // 8))

    def encode(self, matrix: torch.Tensor) -> dict[Role, torch.Tensor]:
        """Return the stored tensors of `matrix` [rows, columns]. Decoding them gives the same bits."""
        number = self.type
        rows, columns = matrix.shape
        bits = matrix.contiguous().view(number.integer)
        exponent_range = 1 << number.exponent_bits
        exponents = (bits >> number.mantissa_bits & (exponent_range - 1)).short()
        # The sign bit, where a negative number has its sign, follows the mantissa.
        mantissa = (1 << number.mantissa_bits) - 1
        fractions = bits & mantissa | (bits < 0).to(bits.dtype) << number.mantissa_bits

        counts = torch.zeros(rows, exponent_range, dtype=torch.int32)
        counts.scatter_add_(1, exponents.long(), torch.ones(1, dtype=torch.int32).expand(rows, columns))
        base = counts.unfold(1, _ESCAPE, 1).sum(-1).argmax(1, keepdim=True).short()
        codes = exponents - base
        is_escape = (codes < 0) | (codes >= _ESCAPE)
        codes.masked_fill_(is_escape, _ESCAPE)
        codes = codes.byte()
        per_row = is_escape.sum(1, dtype=torch.int32)
        escapes = exponents[is_escape].byte()
        row_values = torch.stack([base.squeeze(1).int(), per_row.cumsum(0, dtype=torch.int32) - per_row], 1)

        planes = _bit_planes(codes, _CODE_PLANES)
        fraction_bytes = fractions.view(torch.uint8).view(rows, columns, -1)
        if number.planes > _CODE_PLANES:
            high = fraction_bytes[..., number.fraction_bytes]
            planes = torch.cat([planes, _bit_planes(high, number.planes - _CODE_PLANES)], 1)
        sections = torch.cat([row_values.view(torch.uint8).flatten(), planes.flatten(), escapes])
        stored = {
            Role.VALUES: fraction_bytes[..., : number.fraction_bytes].flatten(1).contiguous(),
            Role.EXPONENTS: functional.pad(sections, (_CHECKSUM_BYTES, 0)),
        }
        least = self.least_bytes(rows, columns)
        return self.padded(stored, least)

    def padded(self, stored: Mapping[Role, torch.Tensor], nbytes: int) -> dict[Role, torch.Tensor]:
        """Return the stored tensors of a matrix with at least `nbytes` of exponents, as experts have in a stack."""
        nbytes = max(nbytes, len(stored[Role.EXPONENTS]))
        exponents = functional.pad(stored[Role.EXPONENTS], (0, nbytes + -nbytes % 8 - len(stored[Role.EXPONENTS])))
        sums = torch.stack([_checksum(stored[Role.VALUES].flatten()), _checksum(exponents[_CHECKSUM_BYTES:])])
        exponents[:_CHECKSUM_BYTES] = sums.view(torch.uint8)
        return {**stored, Role.EXPONENTS: exponents}

    def decode(self, stored: Mapping[Role, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix in `dtype`: [..., out, in], or [..., in, out] if it is transposed."""
        number, fractions = self.type, stored[Role.VALUES]
        *leading, rows, columns = self.shape(tuple(fractions.shape))
        exponents = stored[Role.EXPONENTS].reshape(*leading, -1)
        end, start = self.escapes_start(rows, columns), _CHECKSUM_BYTES + rows * _ROW_BYTES
        row_values = exponents[..., _CHECKSUM_BYTES:start].contiguous().view(torch.int32).view(*leading, rows, 2)
        planes = exponents[..., start:end].reshape(*leading, rows, number.planes, -1, 1)
        bits = (planes >> torch.arange(8, dtype=torch.uint8, device=planes.device) & 1).flatten(-2)[..., :columns].int()
        codes = sum(bits[..., n, :] << n for n in range(_CODE_PLANES))
        assert isinstance(codes, torch.Tensor)
        is_escape = codes == _ESCAPE
        escapes = exponents[..., end:]
        index = (is_escape.flatten(-2).cumsum(-1) - 1).clamp_(0, escapes.shape[-1] - 1)
        values = torch.where(is_escape, escapes.gather(-1, index).view_as(codes).int(), codes + row_values[..., :1])
        values <<= number.mantissa_bits

        parts = fractions.view(*fractions.shape[:-1], columns, number.fraction_bytes).int()
        fraction = sum(parts[..., n] << 8 * n for n in range(number.fraction_bytes))
        for n in range(_CODE_PLANES, number.planes):
            fraction += bits[..., n, :] << 8 * number.fraction_bytes + n - _CODE_PLANES
        assert isinstance(fraction, torch.Tensor)
        values |= fraction & (1 << number.mantissa_bits) - 1
        values |= fraction >> number.mantissa_bits << number.mantissa_bits + number.exponent_bits
        matrix = values.to(number.integer).view(number.dtype).to(dtype)
        return matrix.transpose(-1, -2) if self.is_transposed else matrix

    def check(self, stored: Mapping[Role, torch.Tensor]) -> None:
        """Raise CheckpointError if a matrix of contiguous `stored` tensors does not have its checksums."""
        fractions, exponents = stored[Role.VALUES].flatten(-2), stored[Role.EXPONENTS]
        exponents = exponents.reshape(-1, exponents.shape[-1])
        for index, (values, packed) in enumerate(zip(fractions.view(len(exponents), -1), exponents, strict=True)):
            sums = torch.stack([_checksum(values), _checksum(packed[_CHECKSUM_BYTES:])])
            if not torch.equal(sums.view(torch.uint8), packed[:_CHECKSUM_BYTES]):
                raise damaged_matrix(index)


def damaged_matrix(index: int) -> CheckpointError:
    """Return the error of a matrix that does not have its checksums."""
    return CheckpointError(f"matrix {index} of packed weights does not have its checksum, so the file is damaged")


def _bit_planes(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the lowest `count` bits of bytes [rows, columns] as planes [rows, count, ceil(columns / 8)]."""
    words = functional.pad(values, (0, -values.shape[1] % 8)).contiguous().view(torch.int64)
    # The product moves the lowest bit of byte n to bit 56 + n; no two products of single bits meet.
    factor, lowest = sum(1 << 56 - 7 * n for n in range(8)), sum(1 << 8 * n for n in range(8))
    planes = [((words >> n & lowest) * factor >> 56).byte() for n in range(count)]
    return torch.stack(planes, 1)


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of all words of eight bytes, each times an odd number of its own, modulo 2^64.

    A change of one word always changes the sum. The last word is filled up with zeros.
    """
    padded = functional.pad(values, (0, -len(values) % 8))
    words = (padded.clone() if padded.storage_offset() % 8 else padded).view(torch.int64)
    return (words * torch.arange(1, 2 * len(words), 2, device=words.device)).sum()
