"""Layouts of quantised matrices: which stored tensors hold a matrix [out, in], and how it is decoded from them.

Every layout is an instance of one formula, computed in fp32 and rounded once to the model's dtype:

    matrix[o, i] = (value[o, i] - zero point[o, group]) * scale[o, group]        group: the block that contains (o, i)

Leading dimensions of all tensors, as of stacked experts, are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum

import torch

_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


class Role(StrEnum):
    """The part of the formula that a stored tensor contains."""

    VALUES = "values"
    SCALES = "scales"
    GLOBAL_SCALE = "global scale"
    ZERO_POINTS = "zero points"
    GROUPS = "groups"


@dataclasses.dataclass(frozen=True)
class Packing:
    """Storage of a matrix of numbers, several of which may share an element of the stored tensor.

    Attributes:
        dtypes: possible dtypes of the stored tensor, all of one size.
        bits: bits of a number; equal to the bits of an element if numbers are not packed.
        dim: -1 if neighbours in the last stored dimension share an element, -2 for the dimension before it.
        transposed: whether the stored tensor is [in, out] instead of [out, in].
        order: number n of an element starts at its bit `order[n] * bits`; empty for ascending order.
        folded: whether the last two stored dimensions are blocks of columns, [..., out, blocks, elements].
    """

    dtypes: tuple[torch.dtype, ...]
    bits: int
    dim: int = -1
    transposed: bool = False
    order: tuple[int, ...] = ()
    folded: bool = False

    @property
    def count(self) -> int:
        """Numbers in one element."""
        return self.dtypes[0].itemsize * 8 // self.bits

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape [..., out, in] of the numbers in a tensor of shape `stored`."""
        shape = [*stored[:-2], stored[-2] * stored[-1]] if self.folded else list(stored)
        shape[self.dim] *= self.count
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else tuple(shape)

    def unpack(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the numbers in `stored` as non-negative int32, [..., out, in]."""
        elements = (stored.view(torch.uint8) if stored.dtype in _BYTES else stored).to(torch.int32)
        if self.folded:
            elements = elements.flatten(-2)
        if self.count > 1:
            shifts = torch.tensor(self.order or range(self.count), dtype=torch.int32, device=stored.device) * self.bits
            elements = elements.transpose(self.dim, -1)
            numbers = (elements.unsqueeze(-1) >> shifts) & ((1 << self.bits) - 1)
            elements = numbers.flatten(-2).transpose(self.dim, -1)
        return elements.transpose(-1, -2) if self.transposed else elements


@dataclasses.dataclass(frozen=True)
class Layout:
    """The stored tensors of a matrix [out, in], and the formula that decodes it.

    Attributes:
        name: name in messages and reports.
        source: where the formula is published.
        suffixes: end of each stored tensor's key; the matrix itself has the same key with the end `matrix`.
        scales: possible dtypes of the scales; uint8 contains exponents (e8m0).
        values: storage of the values: e4m3, e2m1 or integers.
        kind: how a stored number is read: "e4m3", "e2m1" or "int".
        block: rows and columns that share a scale; None for all of them. Blocks at the edges may be partial.
        groups_suffix: end of the key of an optional tensor [in] with the group of each column.
        is_transposed: whether the model's matrix is [in, out].
        divides: whether the global scale divides the scales instead of multiplying them.
        zero_points: storage of the zero points [out, groups]; None if all are `zero_point`.
        zero_point: zero point of all numbers, or what is added to the stored zero points.
    """

    name: str
    source: str
    suffixes: Mapping[Role, str]
    values: Packing
    kind: str
    scales: tuple[torch.dtype, ...]
    block: tuple[int | None, int | None]
    matrix: str = "weight"
    groups_suffix: str = ""
    is_transposed: bool = False
    divides: bool = False
    zero_points: Packing | None = None
    zero_point: int = 0

    def decode(self, stored: Mapping[Role, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [..., out, in] in `dtype`, or [..., in, out] if the model's matrix is transposed."""
        values = _READ[self.kind](self.values.unpack(stored[Role.VALUES]))
        rows, columns = values.shape[-2:]
        scales = read_scales(stored[Role.SCALES], self.values.transposed)
        scales = scales.reshape(*values.shape[:-2], *self.groups(rows, columns))
        if Role.GLOBAL_SCALE in stored:
            factor = stored[Role.GLOBAL_SCALE].float().reshape(*values.shape[:-2], 1, 1)
            scales = scales / factor if self.divides else scales * factor
        if self.zero_points is not None:
            zeros = self.zero_points.unpack(stored[Role.ZERO_POINTS])[..., : scales.shape[-2], :] + self.zero_point
            values = values - self._spread(zeros.float(), stored, rows, columns)
        elif self.zero_point:
            values = values - self.zero_point
        matrix = (values * self._spread(scales, stored, rows, columns)).to(dtype)
        return matrix.transpose(-1, -2) if self.is_transposed else matrix

    def groups(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many blocks a matrix has along its rows and columns."""
        block_rows, block_columns = self.block
        return -(-rows // (block_rows or rows)), -(-columns // (block_columns or columns))

    def _spread(
        self, numbers: torch.Tensor, stored: Mapping[Role, torch.Tensor], rows: int, columns: int
    ) -> torch.Tensor:
        """Return one number per block as one per row and column, or as one for all rows or columns."""
        block_rows, block_columns = self.block
        if block_rows is not None and block_rows > 1:
            numbers = numbers.repeat_interleave(block_rows, -2)[..., :rows, :]
        if Role.GROUPS in stored:
            groups = stored[Role.GROUPS].long().unsqueeze(-2)
            return numbers.gather(-1, groups.expand(*numbers.shape[:-1], columns))
        if block_columns is not None and block_columns > 1:
            numbers = numbers.repeat_interleave(block_columns, -1)[..., :columns]
        return numbers


def read_scales(stored: torch.Tensor, transposed: bool = False) -> torch.Tensor:
    """Return stored scales in fp32: floats, e4m3, or exponents (e8m0), which may be stored as uint8."""
    scales = stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored
    numbers = scales.float()
    return numbers.transpose(-1, -2) if transposed else numbers


def _e4m3(numbers: torch.Tensor) -> torch.Tensor:
    # The bits of exponent and mantissa are moved to their places in fp32, whose exponents are 120 larger.
    floats = (((numbers & 0x80) << 24) | ((numbers & 0x7F) << 20)).view(torch.float32) * 2.0**120
    return torch.where((numbers & 0x7F) == 0x7F, torch.nan, floats)


def _e2m1(numbers: torch.Tensor) -> torch.Tensor:
    return (((numbers & 8) << 28) | ((numbers & 7) << 22)).view(torch.float32) * 2.0**126


_READ = {"e4m3": _e4m3, "e2m1": _e2m1, "int": torch.Tensor.float}
