"""Quantised matrices as lines of codes, as the compiled decoders of CPUs and GPUs read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from moepass.models.layouts.layout import MatrixFormula, Number, Packing, Role

# Dtypes that compiled decoders write.
DECODED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class StoredLines:
    """Stored matrices, and the memory of the decoded ones.

    A line is a row of a stored matrix: a row [in] of the matrix, or a column [out] if it is stored transposed. Blocks
    of elements of a line share a scale.

        code     the stored bits of an element
        target   (number of the code - zero point) * scale, rounded once

    Attributes:
        values: codes, contiguous [matrices, ...]
        scales: contiguous fp32 [matrices, blocks of lines, blocks of elements]
        zero_points: as `scales`; None if all are `zero_point`
        line_blocks: block of each line, int64 [matrices, lines]; None if blocks have `line_block` lines each
        element_blocks: block of each element of a line, int64 [matrices, length]; None if they have `element_block`
        target: [matrices, lines, length], strided
    """

    values: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    line_blocks: torch.Tensor | None
    element_blocks: torch.Tensor | None
    target: torch.Tensor
    line_block: int
    element_block: int
    packing: Packing
    number: Number
    zero_point: int

    @property
    def is_packed_across(self) -> bool:
        """True if codes of neighbouring lines share a word."""
        return self.packing.dim == -2


def stored_lines(formula: MatrixFormula, stored: Mapping[Role, torch.Tensor], target: torch.Tensor) -> StoredLines:
    """Return the matrices of contiguous `stored` tensors, each [experts, ...], as lines that are decoded to `target`.

    Only scales, zero points and indices are computed, by torch on the device of `stored`.
    """
    packing, values = formula.packing, stored[Role.VALUES]
    rows, columns = packing.shape(tuple(values.shape))[-2:]
    blocks = formula.block[0] or rows, formula.block[1] or columns
    line_blocks, element_blocks = None, stored.get(Role.BLOCK_INDICES)
    scales, zero_points = formula.block_scales(stored), formula.stored_zero_points(stored)
    target = target.transpose(-1, -2) if formula.is_transposed else target
    if packing.transposed:  # lines are columns
        blocks, line_blocks, element_blocks = blocks[::-1], element_blocks, None
        scales, target = scales.transpose(-1, -2), target.transpose(-1, -2)
        zero_points = None if zero_points is None else zero_points.transpose(-1, -2)
    return StoredLines(
        values,
        scales.contiguous(),
        None if zero_points is None else zero_points.contiguous(),
        None if line_blocks is None else line_blocks.long().contiguous(),
        None if element_blocks is None else element_blocks.long().contiguous(),
        target,
        *blocks,
        packing,
        formula.number,
        formula.zero_point,
    )
