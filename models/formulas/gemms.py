"""GEMMs: rows, inner and columns are the three sizes of `[rows, inner] @ [inner, columns]`."""

from __future__ import annotations

from moepass.models.formulas.sizes import Size


def gemm_flops(rows: Size, inner: Size, columns: Size, count: Size = 1) -> Size:
    """Return the FLOPs of `count` GEMMs of one shape, or of a grouped GEMM: each row has one expert's matrix."""
    return 2 * count * rows * inner * columns


def gemm_bytes(rows: Size, inner: Size, columns: Size, element_bytes: int, count: Size = 1) -> Size:
    """Return the bytes that `count` GEMMs move: both operands read, the result written."""
    return count * (rows * inner + inner * columns + rows * columns) * element_bytes


def convolution_flops(positions: Size, channels_out: Size, channels_in: Size, width: Size) -> Size:
    """Return the FLOPs of a convolution of `width` kernel elements; an output channel sees `channels_in`."""
    return gemm_flops(positions, channels_in * width, channels_out)


def triangular_solve_flops(rows: Size, columns: Size, count: Size = 1) -> Size:
    """Return the FLOPs of `count` triangular systems of `rows` equations, each for `columns` right-hand sides."""
    return count * rows * rows * columns
