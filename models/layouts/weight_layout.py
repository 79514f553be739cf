"""The stored tensors of a matrix in a checkpoint: their keys, their dtypes, and the formula that decodes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from moepass.models.layouts.elf import ElfFormula
from moepass.models.layouts.layout import MatrixFormula, Role
from moepass.models.layouts.lossless import LosslessFormula

# What `moepass pack` writes.
PackedMatrixFormula = LosslessFormula | ElfFormula
Formula = MatrixFormula | PackedMatrixFormula


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """The stored tensors of a matrix, and the formula that decodes it.

    Attributes:
        name: name in messages and reports.
        source: where the formula is published.
        suffixes: suffix of each stored tensor's key; `matrix_suffix` replaces it in the key of the matrix.
        dtypes: possible dtypes of the tensor of values, all of one size, and of the zero points.
        scales: possible dtypes of the scales; uint8 contains exponents (e8m0).
        optional: suffixes of stored tensors that a matrix may lack.
    """

    name: str
    source: str
    suffixes: Mapping[Role, str]
    dtypes: tuple[torch.dtype, ...]
    scales: tuple[torch.dtype, ...]
    formula: Formula
    matrix_suffix: str = "weight"
    optional: Mapping[Role, str] = dataclasses.field(default_factory=dict)
