"""Quantised matrices: the formula that decodes a matrix [out, in] from its stored tensors.

Every published layout is an instance of one formula, computed in fp32 and rounded once to the model's dtype:

    matrix[o, i] = (value[o, i] - zero point[block]) * scale[block]        block: the block of the matrix with (o, i)

Leading dimensions of all tensors, as of stacked experts, are kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from enum import StrEnum

import msgspec
import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Role(StrEnum):
    """The part of a formula that a stored tensor contains. Packed matrices have only values and sections."""

    VALUES = "values"
    SCALES = "scales"
    GLOBAL_SCALE = "global scale"
    ZERO_POINTS = "zero points"
    BLOCK_INDICES = "block indices"
    SECTIONS = "sections"


class Number(StrEnum):
    """The type of a stored number."""

    E4M3 = "e4m3"
    E2M1 = "e2m1"
    INT = "int"


@dataclasses.dataclass(frozen=True)
class Packing:
    """Storage of a matrix of numbers, several of which may share an element of the stored tensor.

    Attributes:
        bits: bits of a number.
        count: numbers in one element of the stored tensor.
        dim: -1 if neighbours in the last stored dimension share an element, -2 for the dimension before it.
        transposed: whether the stored tensor is [in, out] instead of [out, in].
        order: number n of an element starts at its bit `order[n] * bits`; empty for ascending order.
        folded: whether the last two stored dimensions are blocks of columns, [..., out, blocks, elements].
    """

    bits: int
    count: int = 1
    dim: int = -1
    transposed: bool = False
    order: tuple[int, ...] = ()
    folded: bool = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape [..., out, in] of the numbers in a tensor of shape `stored`."""
        shape = [*stored[:-2], stored[-2] * stored[-1]] if self.folded else list(stored)
        shape[self.dim] *= self.count
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else tuple(shape)

    def unpack(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the numbers in `stored`, [..., out, in]: packed ones as non-negative int32, others as stored."""
        numbers = stored.flatten(-2) if self.folded else stored
        if self.count > 1:
            elements = numbers.view(torch.uint8) if numbers.dtype == torch.int8 else numbers
            elements = elements.to(torch.int32).transpose(self.dim, -1)
            order = self.order or range(self.count)
            shifts = _constant(tuple(position * self.bits for position in order), torch.int32, stored.device)
            numbers = (elements.unsqueeze(-1) >> shifts) & ((1 << self.bits) - 1)
            numbers = numbers.flatten(-2).transpose(self.dim, -1)
        return numbers.transpose(-1, -2) if self.transposed else numbers


class MatrixFormula(msgspec.Struct, frozen=True, tag="scaled"):
    """The formula that decodes a matrix from its stored tensors.

    Attributes:
        packing: storage of the values.
        number: type of the values.
        block: rows and columns that share a scale; None for all of them. Blocks at the edges may be partial.
        is_transposed: whether the decoded matrix is [in, out].
        divides: whether the global scale divides the scales instead of multiplying them.
        zero_points: storage of the zero points [out, blocks of columns]; None if all are `zero_point`.
        zero_point: zero point of all values if none are stored.
        zero_point_offset: number that is added to stored zero points, modulo their range.
    """

    packing: Packing
    number: Number
    block: tuple[int | None, int | None]
    is_transposed: bool = False
    divides: bool = False
    zero_points: Packing | None = None
    zero_point: int = 0
    zero_point_offset: int = 0

    def decode(self, stored: Mapping[Role, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix in `dtype`: [..., out, in], or [..., in, out] if it is transposed."""
        values = self._floats(self.packing.unpack(stored[Role.VALUES]))
        rows, columns = values.shape[-2:]
        zero_points = self.stored_zero_points(stored)
        if zero_points is not None:
            values = values - self._spread(zero_points, stored, rows, columns)
        elif self.zero_point:
            values = values - self.zero_point
        matrix = (values * self._spread(self.block_scales(stored), stored, rows, columns)).to(dtype)
        return matrix.transpose(-1, -2) if self.is_transposed else matrix

    def block_scales(self, stored: Mapping[Role, torch.Tensor]) -> torch.Tensor:
        """Return the scale of every block in fp32, [..., blocks of rows, blocks of columns]."""
        *leading, rows, columns = self.packing.shape(tuple(stored[Role.VALUES].shape))
        scales = scales_in_fp32(stored[Role.SCALES])
        if self.packing.transposed and scales.dim() == len(leading) + 2:
            scales = scales.transpose(-1, -2)
        scales = scales.reshape(*leading, *self.block_counts(rows, columns))
        if Role.GLOBAL_SCALE in stored:
            factor = stored[Role.GLOBAL_SCALE].float().reshape(*leading, 1, 1)
            scales = scales / factor if self.divides else scales * factor
        return scales

    def stored_zero_points(self, stored: Mapping[Role, torch.Tensor]) -> torch.Tensor | None:
        """Return the zero point of every block in fp32, [..., blocks of rows, blocks of columns]; None if all agree."""
        if self.zero_points is None:
            return None
        rows, columns = self.packing.shape(tuple(stored[Role.VALUES].shape))[-2:]
        zero_points = self.zero_points.unpack(stored[Role.ZERO_POINTS])[..., : self.block_counts(rows, columns)[0], :]
        return ((zero_points + self.zero_point_offset) & ((1 << self.zero_points.bits) - 1)).float()

    def block_counts(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many blocks a matrix has along its rows and along its columns."""
        block_rows, block_columns = self.block
        return -(-rows // (block_rows or rows)), -(-columns // (block_columns or columns))

    def _floats(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.number is Number.E2M1:
            return _constant(_E2M1, torch.float32, numbers.device)[numbers]
        return numbers.float()

    def _spread(
        self, numbers: torch.Tensor, stored: Mapping[Role, torch.Tensor], rows: int, columns: int
    ) -> torch.Tensor:
        """Return the number of each block for each of its rows and columns; one for all where a block has all."""
        block_rows, block_columns = self.block
        if block_rows is not None and block_rows > 1:
            numbers = numbers.repeat_interleave(block_rows, -2)[..., :rows, :]
        if Role.BLOCK_INDICES in stored:
            indices = stored[Role.BLOCK_INDICES].long().unsqueeze(-2)
            return numbers.gather(-1, indices.expand(*numbers.shape[:-1], columns))
        if block_columns is not None and block_columns > 1:
            numbers = numbers.repeat_interleave(block_columns, -1)[..., :columns]
        return numbers


def scales_in_fp32(stored: torch.Tensor) -> torch.Tensor:
    """Return stored scales in fp32. Bytes (uint8) are exponents, as in e8m0."""
    return (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).float()


@functools.cache
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a constant tensor, made once, because a copy from host memory would wait for the device."""
    return torch.tensor(values, dtype=dtype, device=device)
