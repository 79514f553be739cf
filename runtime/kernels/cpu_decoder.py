"""Decoding of quantised matrices on a CPU, by `decode_lines.cpp`, in the thread that calls it."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Mapping
from importlib import resources

import torch

from moepass.models.checkpoint.weight_files import one_line
from moepass.models.layouts.layout import MatrixFormula, Number, Role

logger = logging.getLogger("moepass")

_NUMBERS = (Number.E4M3, Number.E2M1, Number.INT)
_ELEMENTS = (torch.bfloat16, torch.float16, torch.float32)
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


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled source, which Inductor's cache keeps for later processes; None if it cannot be compiled."""
    from torch._inductor.codecache import CppCodeCache

    source = resources.files(__package__).joinpath("decode_lines.cpp").read_text(encoding="utf-8")
    try:
        # Inductor vectorises loops itself, and tells the compiler not to.
        loaded: ctypes.CDLL = CppCodeCache.load(source, extra_flags=("-ftree-loop-vectorize", "-fno-trapping-math"))
    except Exception as error:  # there is no compiler, or it fails
        logger.warning(
            "quantised experts are decoded by operations of torch, several times slower than by C++: the C++ compiler "
            "fails: %s",
            one_line(error),
        )
        return None
    loaded.decode_lines.restype = None
    return loaded


def can_decode(target: torch.Tensor) -> bool:
    """Return whether `decode_on_cpu` can write to `target`, and the C++ source can be compiled."""
    is_contiguous = 1 in target.stride()[-2:]
    return target.device.type == "cpu" and target.dtype in _ELEMENTS and is_contiguous and _library() is not None


def decode_on_cpu(formula: MatrixFormula, stored: Mapping[Role, torch.Tensor], target: torch.Tensor) -> None:
    """Decode the matrices of contiguous `stored` tensors, each [experts, ...], into `target` [experts, ...].

    `can_decode(target)` must be true.
    """
    library = _library()
    assert library is not None, "can_decode is true"
    packing, values = formula.packing, stored[Role.VALUES]
    rows, columns = packing.shape(tuple(values.shape))[-2:]
    blocks = formula.block[0] or rows, formula.block[1] or columns
    indices: tuple[torch.Tensor | None, ...] = None, stored.get(Role.BLOCK_INDICES)
    scales, zero_points = formula.block_scales(stored), formula.stored_zero_points(stored)
    target = target.transpose(-1, -2) if formula.is_transposed else target
    if packing.transposed:  # lines are columns
        rows, columns, blocks, indices = columns, rows, blocks[::-1], indices[::-1]
        scales, target = scales.transpose(-1, -2), target.transpose(-1, -2)
        zero_points = None if zero_points is None else zero_points.transpose(-1, -2)
    order = torch.tensor(packing.order, device="cpu") if packing.order else None
    tensors = (
        *(values, scales.contiguous(), None if zero_points is None else zero_points.contiguous()),
        *(None if index is None else index.long().contiguous() for index in indices),
        *(order, target),
    )
    lines = _Lines(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(len(values), rows, columns, *scales.shape[-2:], *blocks),
        *(packing.bits, packing.dim == -2, formula.zero_point, *target.stride()),
    )
    number, element = _NUMBERS.index(formula.number), _ELEMENTS.index(target.dtype)
    library.decode_lines(ctypes.byref(lines), ctypes.c_int64(number), ctypes.c_int64(element))
