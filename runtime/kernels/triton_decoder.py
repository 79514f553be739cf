"""Decoding of quantised matrices on a GPU, by one Triton kernel. `MatrixFormula.decode` is the reference, bit for bit.

The module needs Triton, so it is imported where a GPU decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from moepass.models.layouts.layout import MatrixFormula, Role
from moepass.runtime.kernels.stored_lines import StoredLines, stored_lines

# A tile is as wide as it is high, because the target may be transposed. 64 bf16 elements are a cache line.
TILE = 64
OPTIONS = {"num_warps": 8}


@triton.jit  # type: ignore[untyped-decorator]
def decode_tiles(  # type: ignore[no-untyped-def]
    values,
    scales,
    zero_points,
    line_blocks,
    element_blocks,
    target,
    lines,
    length,
    count_of_line_blocks,
    count_of_element_blocks,
    line_block,
    element_block,
    zero_point,
    matrix_stride,
    line_stride,
    element_stride,
    number: tl.constexpr,
    code_bits: tl.constexpr,
    codes_per_word: tl.constexpr,
    order: tl.constexpr,
    is_packed_across: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Decode one tile of lines and elements; `StoredLines` describes the arguments.

    An element of `values` has `codes_per_word` codes, of `code_bits` bits each. The four bits of `order` from 4 * n on
    are the position of code n in it.
    """
    tiles_of_line = tl.cdiv(length, tile_size)
    tiles = tl.cdiv(lines, tile_size) * tiles_of_line
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    line = (tile // tiles_of_line * tile_size + tl.arange(0, tile_size))[:, None]
    element = (tile % tiles_of_line * tile_size + tl.arange(0, tile_size))[None, :]
    is_inside = (line < lines) & (element < length)

    if is_packed_across:
        stored = (matrix * (lines // codes_per_word) + line // codes_per_word) * length + element
        position = line % codes_per_word
    else:
        stored = (matrix * lines + line) * (length // codes_per_word) + element // codes_per_word
        position = element % codes_per_word
    words = tl.load(values + stored, mask=is_inside, other=0).to(tl.int32)
    codes = (words >> (((order >> (position * 4)) & 15) * code_bits)) & ((1 << code_bits) - 1)

    # Numbers are put together bit by bit: not all GPUs convert them, and a product would lose the sign of -0.
    if number == "e4m3":
        magnitude = codes & 127
        denormal = (magnitude.to(tl.float32) * (1.0 / 512)).to(tl.int32, bitcast=True)
        bits = tl.where(magnitude < 8, denormal, (magnitude << 20) + (120 << 23))
        bits = tl.where(magnitude == 127, 0x7FC00000, bits) | ((codes & 128) << 24)
        numbers = bits.to(tl.float32, bitcast=True)
    elif number == "e2m1":
        magnitude = codes & 7
        bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude + 252) << 22) | ((codes & 8) << 28)
        numbers = bits.to(tl.float32, bitcast=True)
    else:
        numbers = codes.to(tl.float32)

    if line_blocks is None:
        line_index = line // line_block
    else:
        line_index = tl.load(line_blocks + matrix * lines + line, mask=line < lines, other=0)
    if element_blocks is None:
        element_index = element // element_block
    else:
        element_index = tl.load(element_blocks + matrix * length + element, mask=element < length, other=0)
    block = (matrix * count_of_line_blocks + line_index) * count_of_element_blocks + element_index
    if zero_points is None:
        numbers -= zero_point
    else:
        numbers -= tl.load(zero_points + block, mask=is_inside, other=0.0)
    decoded = numbers * tl.load(scales + block, mask=is_inside, other=0.0)
    address = target + matrix * matrix_stride + line * line_stride + element * element_stride
    tl.store(address, decoded.to(target.dtype.element_ty), mask=is_inside)


def decode_by_triton(formula: MatrixFormula, stored: Mapping[Role, torch.Tensor], target: torch.Tensor) -> None:
    """Decode the matrices of contiguous `stored` tensors, each [experts, ...], into `target` [experts, ...].

    `target` has one of `DECODED_DTYPES`.
    """
    lines = stored_lines(formula, stored, target)
    programs = lines.target.shape[0]
    for size in lines.target.shape[1:]:
        programs *= triton.cdiv(size, TILE)
    if programs:
        arguments, constants = launch_arguments(lines)
        decode_tiles[programs,](*arguments, **constants, **OPTIONS)


def launch_arguments(lines: StoredLines) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and the constants by which the kernel decodes `lines`."""
    packing, values = lines.packing, lines.values
    if values.dtype != torch.int32:
        values = values.view(torch.uint8)
    order = packing.order or range(packing.count)
    return [
        *(values, lines.scales, lines.zero_points, lines.line_blocks, lines.element_blocks, lines.target),
        *(*lines.target.shape[1:], *lines.scales.shape[-2:], lines.line_block, lines.element_block),
        *(float(lines.zero_point), *lines.target.stride()),
    ], {
        "number": lines.number.value,
        "code_bits": packing.bits,
        "codes_per_word": packing.count,
        "order": sum(position << 4 * number for number, position in enumerate(order)),
        "is_packed_across": lines.is_packed_across,
        "tile_size": TILE,
    }
