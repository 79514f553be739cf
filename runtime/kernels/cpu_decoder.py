"""Decoding of quantised and packed matrices on a CPU, by `decode_lines.cpp`, in the thread that calls it."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Mapping
from importlib import resources

import torch

from moepass.models.checkpoint.weight_files import one_line
from moepass.models.layouts.elf import ElfFormula
from moepass.models.layouts.layout import MatrixFormula, Number, Packing, Role
from moepass.models.layouts.packed_floats import FLOAT_TYPES, PackedFormula, damaged_matrix
from moepass.runtime.kernels.stored_lines import DECODED_DTYPES, StoredLines, stored_lines

logger = logging.getLogger("moepass")

_NUMBERS = (Number.E4M3, Number.E2M1, Number.INT)
_E4M3_NUMBERS = MatrixFormula(Packing(8), Number.E4M3, (None, None))
_POINTERS = ("values", "scales", "zero_points", "line_blocks", "element_blocks", "order", "target")
_COUNTS = (
    *("matrices", "lines", "length", "count_of_line_blocks", "count_of_element_blocks", "line_block", "element_block"),
    *("bits", "is_packed_across", "zero_point", "matrix_stride", "line_stride", "element_stride"),
)


class _Lines(ctypes.Structure):
    """The struct `Lines` of the C++ source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _COUNTS),
    )


class _Floats(ctypes.Structure):
    """The struct `Floats` of the C++ source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "sections", "target")),
        *((name, ctypes.c_int64) for name in ("matrices", "lines", "length", "section_bytes")),
        *((name, ctypes.c_int64) for name in ("matrix_stride", "line_stride", "element_stride")),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled source, which Inductor's cache keeps for later processes; None if it cannot be compiled."""
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.cpp_builder import is_gcc

    source = resources.files(__package__).joinpath("decode_lines.cpp").read_text(encoding="utf-8")
    try:
        # Inductor vectorises loops itself, and tells GCC not to.
        flags = ("-ftree-loop-vectorize", "-fno-trapping-math") if is_gcc() else ()
        loaded: ctypes.CDLL = CppCodeCache.load(source, extra_flags=flags)
    except Exception as error:  # there is no compiler, or it fails
        logger.warning(
            "experts are decoded and packed by operations of torch, several times slower than by C++: the C++ compiler "
            "fails: %s",
            one_line(error),
        )
        return None
    loaded.decode_lines.restype = None
    for function in (loaded.decode_floats, loaded.first_damaged, loaded.encode_floats):
        function.restype = ctypes.c_int64
    return loaded


def can_decode(target: torch.Tensor) -> bool:
    """Return whether the functions of this module can write to `target`, and the compiler can compile that."""
    is_contiguous = 1 in target.stride()[-2:]
    if target.device.type != "cpu" or target.dtype not in DECODED_DTYPES or not is_contiguous:
        return False
    compiled = library()
    return compiled is not None and (target.dtype != torch.float16 or bool(compiled.has_half()))


def decode_on_cpu(formula: MatrixFormula, stored: Mapping[Role, torch.Tensor], target: torch.Tensor) -> None:
    """Decode the matrices of contiguous `stored` tensors, each [experts, ...], into `target` [experts, ...].

    `can_decode(target)` must be true.
    """
    scales = stored[Role.SCALES]
    if scales.dtype == torch.float8_e4m3fn:
        # NVFP4: torch converts the scales as slowly as this module decodes the 16 times as many codes.
        stored = {**stored, Role.SCALES: _e4m3_in_fp32(scales)}
    _decode(stored_lines(formula, stored, target))


def _e4m3_in_fp32(codes: torch.Tensor) -> torch.Tensor:
    target = torch.empty(codes.shape, dtype=torch.float32, device="cpu")
    stored = {Role.VALUES: codes, Role.SCALES: torch.ones(len(codes), device="cpu")}
    _decode(stored_lines(_E4M3_NUMBERS, stored, target))
    return target


def _decode(lines: StoredLines) -> None:
    compiled = library()
    assert compiled is not None, "can_decode is true"
    packing = lines.packing
    order = torch.tensor(packing.order, device="cpu") if packing.order else None
    tensors = (lines.values, lines.scales, lines.zero_points, lines.line_blocks, lines.element_blocks, order)
    arguments = _Lines(
        *(None if tensor is None else tensor.data_ptr() for tensor in (*tensors, lines.target)),
        *(*lines.target.shape, *lines.scales.shape[-2:], lines.line_block, lines.element_block),
        *(packing.bits, lines.is_packed_across, lines.zero_point, *lines.target.stride()),
    )
    number, element = _NUMBERS.index(lines.number), DECODED_DTYPES.index(lines.target.dtype)
    compiled.decode_lines(ctypes.byref(arguments), ctypes.c_int64(number), ctypes.c_int64(element))


def decode_floats_on_cpu(formula: PackedFormula, stored: Mapping[Role, torch.Tensor], target: torch.Tensor) -> None:
    """Decode the matrices of contiguous `stored` tensors, each [experts, ...], into `target` of the formula's dtype.

    `can_decode(target)` must be true. Raises CheckpointError if a matrix does not have its checksums.
    """
    compiled = library()
    assert compiled is not None, "can_decode is true"
    values, sections = stored[Role.VALUES], stored[Role.SECTIONS]
    lines = target.transpose(-1, -2) if formula.is_transposed else target
    pointers = (values.data_ptr(), sections.data_ptr(), lines.data_ptr())
    arguments = _Floats(*pointers, *lines.shape, sections.shape[-1], *lines.stride())
    number, is_elf = list(FLOAT_TYPES).index(formula.number), isinstance(formula, ElfFormula)
    damaged: int = compiled.decode_floats(ctypes.byref(arguments), ctypes.c_int64(number), ctypes.c_int64(is_elf))
    if damaged >= 0:
        raise damaged_matrix(damaged)


def check_floats_on_cpu(stored: Mapping[Role, torch.Tensor]) -> None:
    """Raise CheckpointError if a matrix of contiguous `stored` tensors, each [experts, ...], lacks its checksums.

    The source must have been compiled.
    """
    compiled = library()
    assert compiled is not None, "the caller has checked it"
    values, sections = stored[Role.VALUES], stored[Role.SECTIONS]
    pointers = (ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(sections.data_ptr()))
    sizes = (len(values), values[0].nbytes if len(values) else 0, sections.shape[-1])
    damaged: int = compiled.first_damaged(*pointers, *map(ctypes.c_int64, sizes))
    if damaged >= 0:
        raise damaged_matrix(damaged)
