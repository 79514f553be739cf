"""Rows and weights in FP8 (e4m3), with a scale for each block of 128 elements, as kernels multiply them.

The module needs Triton only to quantise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moepass.passes.ir.shards import FP8_BLOCK

# The largest number of e4m3.
LARGEST_E4M3 = 448.0
# The least normal number of fp32. Blocks of smaller numbers would get a scale of 0.
_LEAST_SCALE = 2.0**-126
_ROWS_OF_PROGRAM = 8


class BlockScaledWeights(NamedTuple):
    """Weights in FP8: a tuple like weights in parts, whose views are the views of both tensors.

    Attributes:
        values: e4m3 [experts, in, out], or another order of dimensions
        scales: fp32, one for each block of FP8_BLOCK x FP8_BLOCK values, in the same order of dimensions
    """

    values: torch.Tensor
    scales: torch.Tensor


class ScaledRows(NamedTuple):
    """Rows in FP8: e4m3 [rows, width], and fp32 scales [rows, blocks of FP8_BLOCK columns]."""

    values: torch.Tensor
    scales: torch.Tensor


def quantize_rows(rows: torch.Tensor) -> ScaledRows:
    """Return `rows` [n, width] in FP8, on the device of `rows`.

    The scale of a block is its largest magnitude divided by LARGEST_E4M3 (DeepSeek-V3, inference/kernel.py, act_quant).
    Values are rounded to the nearest number of e4m3, ties to even.
    """
    import triton

    count, width = rows.shape
    blocks = triton.cdiv(width, FP8_BLOCK)
    values = torch.empty((count, width), dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty((count, blocks), dtype=torch.float32, device=rows.device)
    if scales.numel():
        grid = (triton.cdiv(count, _ROWS_OF_PROGRAM), blocks)
        _kernel()[grid](*quantizer_arguments(rows, values, scales), **QUANTIZER_CONSTANTS)
    return ScaledRows(values, scales)


QUANTIZER_CONSTANTS = {
    "block_size": FP8_BLOCK,
    "rows_of_program": _ROWS_OF_PROGRAM,
    "largest": LARGEST_E4M3,
    "least_scale": _LEAST_SCALE,
}


def quantizer_arguments(rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> list[Any]:
    """Return the arguments by which the kernel quantises `rows`."""
    count, width = rows.shape
    return [rows, *rows.stride(), values.view(torch.uint8), scales, count, width]


def _kernel() -> Any:
    from moepass.runtime.kernels.fp8_quantizer import quantize_tiles

    return quantize_tiles
