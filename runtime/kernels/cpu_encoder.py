"""Packing of matrices of floats on a CPU, by `decode_lines.cpp`, in the thread that calls it."""

from __future__ import annotations

import ctypes

import torch

from moepass.models.layouts.elf import ElfFormula
from moepass.models.layouts.packed_floats import FLOAT_TYPES
from moepass.models.layouts.weight_layout import PackedMatrixFormula
from moepass.runtime.kernels.cpu_decoder import library


class _Matrix(ctypes.Structure):
    """The struct `Matrix` of the C++ source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("numbers", "values", "sections")),
        *((name, ctypes.c_int64) for name in ("lines", "length")),
    )


def can_encode() -> bool:
    """Return whether the functions of this module can be called."""
    return library() is not None


def encode_floats_on_cpu(formula: PackedMatrixFormula, matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write the values of a contiguous `matrix` [rows, columns] to contiguous `values`, and return its sections.

    They have the 8 bytes that pad them in place of their own checksum.
    """
    compiled = library()
    assert compiled is not None, "can_encode is true"
    sections = torch.empty(formula.most_bytes(*matrix.shape), dtype=torch.uint8, device="cpu")
    arguments = _Matrix(matrix.data_ptr(), values.data_ptr(), sections.data_ptr(), *matrix.shape)
    number, is_elf = list(FLOAT_TYPES).index(formula.number), isinstance(formula, ElfFormula)
    nbytes: int = compiled.encode_floats(ctypes.byref(arguments), ctypes.c_int64(number), ctypes.c_int64(is_elf))
    return sections[:nbytes].clone()


def seal_on_cpu(sections: torch.Tensor) -> None:
    """Write the checksums of contiguous `sections` [matrices, bytes]."""
    compiled = library()
    assert compiled is not None, "can_encode is true"
    compiled.seal_sections(ctypes.c_void_p(sections.data_ptr()), *map(ctypes.c_int64, sections.shape))
