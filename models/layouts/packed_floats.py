"""Float matrices packed by moepass: the bits of floats, and what both formats store alike.

A matrix [rows, columns] is stored in two tensors of bytes, with leading dimensions as of stacked experts:

    values [rows, columns * bytes]    the whole low bytes of each element's sign and mantissa
    sections [bytes]                  checksum of the values, int64
                                      checksum of all bytes that follow, int64
                                      sections of the format

A bit plane [rows, ceil(columns / 8)] has bit n of its byte k for column 8 * k + n.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec
import torch
from torch.nn import functional

from moepass.models.errors import CheckpointError
from moepass.models.layouts.layout import Role

CHECKSUM_BYTES = 16
_HALF = (1 << 32) - 1
# 2^64 divided by the golden ratio, as a signed number.
_KEY = 0x9E3779B97F4A7C15 - (1 << 64)

FloatName = Literal["bf16", "fp16", "fp32"]


@dataclasses.dataclass(frozen=True)
class FloatType:
    """The bits of a float: sign, exponent, mantissa."""

    dtype: torch.dtype
    integer: torch.dtype
    exponent_bits: int
    mantissa_bits: int

    @property
    def value_bytes(self) -> int:
        """Whole bytes of the sign and the mantissa."""
        return (self.mantissa_bits + 1) // 8

    @property
    def high_bits(self) -> int:
        """Bits of the sign and the mantissa that fill no byte."""
        return (self.mantissa_bits + 1) % 8

    @property
    def mantissa_mask(self) -> int:
        """The bits of the mantissa."""
        return (1 << self.mantissa_bits) - 1


FLOAT_TYPES: Mapping[FloatName, FloatType] = {
    "bf16": FloatType(torch.bfloat16, torch.int16, 8, 7),
    "fp16": FloatType(torch.float16, torch.int16, 5, 10),
    "fp32": FloatType(torch.float32, torch.int32, 8, 23),
}


class PackedFormula(msgspec.Struct, frozen=True):
    """The formula that decodes packed matrices of `number`s; decoded matrices are [in, out] if `is_transposed`."""

    number: FloatName
    is_transposed: bool = False

    # Bit planes of each row before those of the high bits.
    code_planes: ClassVar[int] = 0
    # Bytes between the checksums and the bit planes, for each row.
    row_bytes: ClassVar[int] = 0
    # Bytes behind the bit planes for each element that is an escape or an exception.
    exception_bytes: ClassVar[int] = 0

    @property
    def type(self) -> FloatType:
        """The bits of an element."""
        return FLOAT_TYPES[self.number]

    @property
    def planes(self) -> int:
        """Bit planes of each row."""
        return self.code_planes + self.type.high_bits

    @property
    def bound(self) -> float:
        """The largest possible absolute error of an element."""
        return 0.0

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape [..., out, in] of the matrices with these stored values."""
        return (*values[:-1], values[-1] // self.type.value_bytes)

    def planes_end(self, rows: int, columns: int) -> int:
        """Return the offset in the sections of the bytes behind the bit planes."""
        return CHECKSUM_BYTES + rows * (self.row_bytes + self.planes * -(-columns // 8))

    def least_bytes(self, rows: int, columns: int) -> int:
        """Return the least bytes of the sections of a matrix."""
        raise NotImplementedError

    def most_bytes(self, rows: int, columns: int) -> int:
        """Return the most bytes of the sections of a matrix, if no other matrix is longer."""
        return -(-self.least_bytes(rows, columns) // 8) * 8 + -(-rows * columns * self.exception_bytes // 8) * 8

    def padding(self, stored: Mapping[Role, torch.Tensor], nbytes: int) -> torch.Tensor:
        """Return `nbytes` bytes that may follow the sections of a matrix without changing it."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def padded(self, stored: Mapping[Role, torch.Tensor], nbytes: int) -> dict[Role, torch.Tensor]:
        """Return the stored tensors of a matrix with at least `nbytes` of sections, as experts have in a stack."""
        sections = stored[Role.SECTIONS]
        missing = max(nbytes, len(sections)) - len(sections)
        padding = self.padding(stored, missing + -(missing + len(sections)) % 8)
        return sealed(stored[Role.VALUES], torch.cat([sections[CHECKSUM_BYTES:], padding]))

    def check(self, stored: Mapping[Role, torch.Tensor]) -> None:
        """Raise CheckpointError if a matrix of contiguous `stored` tensors does not have its checksums."""
        sections = stored[Role.SECTIONS].reshape(-1, stored[Role.SECTIONS].shape[-1])
        values = stored[Role.VALUES].reshape(len(sections), -1)
        for index, matrix in enumerate(zip(values, sections, strict=True)):
            if not torch.equal(_checksums(matrix[0], matrix[1][CHECKSUM_BYTES:]), matrix[1][:CHECKSUM_BYTES]):
                raise damaged_matrix(index)

    def split(self, fractions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole bytes of signs and mantissas [rows, columns], and bit planes of the other bits."""
        rows, columns = fractions.shape
        parts = fractions.view(torch.uint8).view(rows, columns, -1)
        count = self.type.value_bytes
        high = parts[..., count] if self.type.high_bits else parts[..., 0]
        return parts[..., :count].flatten(1).contiguous(), bit_planes(high, self.type.high_bits)

    def planes_of(self, stored: Mapping[Role, torch.Tensor]) -> torch.Tensor:
        """Return the bits of each plane, int32 [..., rows, planes, columns]."""
        *leading, rows, columns = self.shape(tuple(stored[Role.VALUES].shape))
        sections = stored[Role.SECTIONS].reshape(*leading, -1)
        end = self.planes_end(rows, columns)
        planes = sections[..., CHECKSUM_BYTES + rows * self.row_bytes : end]
        planes = planes.reshape(*leading, rows, self.planes, -(-columns // 8), 1)
        bits = planes >> torch.arange(8, dtype=torch.uint8, device=planes.device) & 1
        return bits.flatten(-2)[..., :columns].int()

    def fractions_of(self, stored: Mapping[Role, torch.Tensor], planes: torch.Tensor) -> torch.Tensor:
        """Return the sign and the mantissa of each element, int32 [..., rows, columns]."""
        values, count = stored[Role.VALUES], self.type.value_bytes
        parts = values.unflatten(-1, (-1, count)).int()
        fractions = torch.zeros_like(parts[..., 0])
        for n in range(count):
            fractions |= parts[..., n] << 8 * n
        for n in range(self.type.high_bits):
            fractions |= planes[..., self.code_planes + n, :] << 8 * count + n
        return fractions


def sealed(values: torch.Tensor, sections: torch.Tensor) -> dict[Role, torch.Tensor]:
    """Return the stored tensors of a matrix: its values, and its sections behind their checksums."""
    return {Role.VALUES: values, Role.SECTIONS: torch.cat([_checksums(values.flatten(), sections), sections])}


def damaged_matrix(index: int) -> CheckpointError:
    """Return the error of a matrix that does not have its checksums."""
    return CheckpointError(f"matrix {index} of packed weights does not have its checksum, so the file is damaged")


def bit_planes(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Return the lowest `count` bits of bytes [rows, columns] as planes [rows, count, ceil(columns / 8)]."""
    words = functional.pad(numbers, (0, -numbers.shape[1] % 8)).contiguous().view(torch.int64)
    # The product moves the lowest bit of byte n to bit 56 + n; no two products of single bits meet.
    factor, lowest = sum(1 << 56 - 7 * n for n in range(8)), sum(1 << 8 * n for n in range(8))
    planes = [((words >> n & lowest) * factor >> 56).byte() for n in range(count)]
    return torch.stack(planes, 1) if planes else torch.empty(len(words), 0, words.shape[1], dtype=torch.uint8)


def _checksums(values: torch.Tensor, sections: torch.Tensor) -> torch.Tensor:
    return torch.stack([_checksum(values), _checksum(sections)]).view(torch.uint8)


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """Return a checksum of bytes, modulo 2^64, by the NH function of UMAC (RFC 4418, section 5.2.2) with 32-bit halves.

        sum over words n of 8 bytes:  word + (low half of word + low half of key n) * (high half + high half of key n)

    Changes escape it with a probability of about 2^-32. Zeros alone have no sum of zero. The last word is filled up
    with zeros. Key n is n + 1 times `_KEY`.
    """
    padded = functional.pad(values, (0, -len(values) % 8))
    words = (padded.clone() if padded.storage_offset() % 8 else padded).view(torch.int64)
    keys = torch.arange(1, len(words) + 1, device=words.device) * _KEY
    low = (words & _HALF) + (keys & _HALF) & _HALF
    high = (words >> 32 & _HALF) + (keys >> 32 & _HALF) & _HALF
    return (low * high + words).sum() + _KEY
