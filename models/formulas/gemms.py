"""GEMMs: rows, inner and columns are the three sizes of `[rows, inner] @ [inner, columns]`."""

from __future__ import annotations

from moepass.models.formulas.sizes import Size


def gemm_flops(rows: Size, inner: Size, columns: Size, count: Size = 1) -> Size:
    """FLOPs of `count` GEMMs of one shape."""
    return 2 * count * rows * inner * columns


def gemm_bytes(rows: Size, inner: Size, columns: Size, element_bytes: int, count: Size = 1) -> Size:
    """Bytes that `count` GEMMs move: both operands read, the result written."""
    return count * (rows * inner + inner * columns + rows * columns) * element_bytes


def grouped_gemm_flops(rows: Size, inner: Size, columns: Size) -> Size:
    """FLOPs of a grouped GEMM: each row meets the matrix of its own expert; `rows` are those of all experts."""
    return gemm_flops(rows, inner, columns)


def grouped_gemm_bytes(rows: Size, inner: Size, columns: Size, experts: Size, element_bytes: int) -> Size:
    """Bytes that a grouped GEMM moves: rows read, the matrices of `experts` experts read, the result written."""
    return (rows * inner + experts * inner * columns + rows * columns) * element_bytes


def convolution_flops(positions: Size, channels_out: Size, channels_in: Size, width: Size) -> Size:
    """FLOPs of a convolution; `channels_in` are those that one output channel sees, `width` the kernel's elements."""
    return gemm_flops(positions, channels_in * width, channels_out)


def triangular_solve_flops(rows: Size, columns: Size, count: Size = 1) -> Size:
    """FLOPs of `count` systems of `rows` equations, triangular, each for `columns` right-hand sides."""
    return count * rows * rows * columns
