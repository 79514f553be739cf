"""The Triton kernel that quantises rows to FP8. The module needs Triton, so it is imported where a GPU quantises."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def quantize_tiles(  # type: ignore[no-untyped-def]
    rows,
    row_stride,
    column_stride,
    values,
    scales,
    count,
    width,
    block_size: tl.constexpr,
    rows_of_program: tl.constexpr,
    largest: tl.constexpr,
    least_scale: tl.constexpr,
):
    """Quantise one block of columns of some rows; `quantize_rows` says how.

    Numbers are rounded bit by bit: Triton's interpreter rounds casts to FP8 differently.
    """
    row = (tl.program_id(0) * rows_of_program + tl.arange(0, rows_of_program)).to(tl.int64)
    column = tl.program_id(1) * block_size + tl.arange(0, block_size)
    is_inside = (row < count)[:, None] & (column < width)[None, :]
    address = rows + row[:, None] * row_stride + column[None, :] * column_stride
    numbers = tl.load(address, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), 1) / largest, least_scale)
    scaled = numbers / scale[:, None]

    # The sign, and a magnitude of four bits of exponent and three of mantissa.
    magnitude = tl.abs(scaled)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2^23 rounds multiples of the least denormal, 2^-9, to integers.
    denormal = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(magnitude < 0.015625, denormal, normal)
    code = tl.where(scaled == scaled, code, 127)
    code |= (scaled.to(tl.int32, bitcast=True) >> 24) & 128
    tl.store(values + row[:, None] * width + column[None, :], code.to(tl.uint8), mask=is_inside)
    blocks = tl.num_programs(1)
    tl.store(scales + row * blocks + tl.program_id(1), scale, mask=row < count)
