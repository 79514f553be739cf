"""The tensors of a bank in a slot, and the decoding of matrices that stay FP8 there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moepass.models.errors import InputError
from moepass.models.layouts.layout import MatrixFormula, Number, Role
from moepass.passes.ir.plan import BankSpec, DecodedPart
from moepass.passes.ir.shards import FP8_BLOCK, slot_layout
from moepass.runtime.kernels.fp8_rows import BlockScaledWeights


def slot_tensors(bank: BankSpec, slot: torch.Tensor) -> tuple[torch.Tensor | BlockScaledWeights, ...]:
    """Return the tensors of `bank` as views of `slot`, flat uint8."""
    count = len(bank.tensors)
    views = [tensor.view(slot) for tensor in slot_layout(bank).tensors]
    scales = dict(zip(bank.fp8, views[count:], strict=True))
    return tuple(
        BlockScaledWeights(view, scales[position]) if position in scales else view
        for position, view in enumerate(views[:count])
    )


def check_fp8(bank: BankSpec) -> None:
    """Raise InputError if a matrix of `bank` that stays FP8 in a slot is not stored in blocks of FP8_BLOCK elements."""
    names = {bank.tensors[position].name for position in bank.fp8}
    for part in bank.parts:
        if part.tensor.name in names and (problem := _why_not_fp8(part)):
            raise InputError(
                f"experts_compute is 'fp8', but {part.tensor.name} of {bank.name} {problem}; it needs e4m3 values with "
                f"a scale for each block of {FP8_BLOCK} x {FP8_BLOCK}",
                name=bank.name,
            )


def _why_not_fp8(part: DecodedPart) -> str:
    formula = part.formula
    if not isinstance(formula, MatrixFormula) or formula.number is not Number.E4M3:
        return "is not stored in FP8"
    if formula.block != (FP8_BLOCK, FP8_BLOCK):
        return f"has scales for blocks of {formula.block[0]} x {formula.block[1]}"
    size = part.tensor.shape[part.dim]
    if part.dim and (part.start % FP8_BLOCK or (part.stop % FP8_BLOCK and part.stop != size)):
        return f"is stored in matrices that meet at {part.start or part.stop}, within a block"
    return ""


def copy_fp8(part: DecodedPart, stored: Mapping[Role, torch.Tensor], target: BlockScaledWeights) -> None:
    """Copy the values of `part` into its range of `target`, with the scales of its blocks; `check_fp8` allows it."""
    formula = part.formula
    assert isinstance(formula, MatrixFormula), "check_fp8 allows it"
    values, scales = formula.packing.unpack(stored[Role.VALUES]), formula.block_scales(stored)
    if formula.is_transposed:
        values, scales = values.transpose(-1, -2), scales.transpose(-1, -2)
    start, count = part.start, part.stop - part.start
    target.values.narrow(part.dim, start, count).copy_(values)
    if part.dim:
        start, count = start // FP8_BLOCK, -(-count // FP8_BLOCK)
    target.scales.narrow(part.dim, start, count).copy_(scales)
