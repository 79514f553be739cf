"""GEMMs: rows, inner and columns are the three sizes of `[rows, inner] @ [inner, columns]`."""

from __future__ import annotations

from moepass.models.formulas.sizes import Size


def gemm_flops(rows: Size, inner: Size, columns: Size, count: Size = 1) -> Size:
    """Return the FLOPs of `count` GEMMs of one shape."""
    return 2 * count * rows * inner * columns


def gemm_bytes(rows: Size, inner: Size, columns: Size, element_bytes: int, count: Size = 1) -> Size:
    """Return the bytes that `count` GEMMs move: both operands read, the result written."""
    return count * (rows * inner + inner * columns + rows * columns) * element_bytes


def grouped_gemm_flops(rows: Size, inner: Size, columns: Size) -> Size:
    """Return the FLOPs of a grouped GEMM, which multiplies each row by the matrix of one expert."""
    return gemm_flops(rows, inner, columns)


def grouped_gemm_bytes(rows: Size, inner: Size, columns: Size, experts: Size, element_bytes: int) -> Size:
    """Return the bytes that a grouped GEMM moves: rows and `experts` matrices read, the result written."""
    return (rows * inner + experts * inner * columns + rows * columns) * element_bytes


def convolution_flops(positions: Size, channels_out: Size, channels_in: Size, width: Size) -> Size:
    """Return the FLOPs of a convolution.

    `channels_in` are those that one output channel sees, `width` is the number of kernel elements.
    """
    return gemm_flops(positions, channels_in * width, channels_out)


def triangular_solve_flops(rows: Size, columns: Size, count: Size = 1) -> Size:
    """Return the FLOPs of `count` triangular systems of `rows` equations, each for `columns` right-hand sides."""
    return count * rows * rows * columns
