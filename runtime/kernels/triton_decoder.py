"""Decoding of quantised and packed matrices on a GPU, by a Triton kernel for each.

The methods `decode` of their formulas are the references, bit for bit.

The module needs Triton, so it is imported where a GPU decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from moepass.models.layouts.layout import MatrixFormula, Role
from moepass.models.layouts.lossless import LosslessFormula
from moepass.runtime.kernels.stored_lines import StoredLines, stored_lines

# A tile is as wide as it is high, because the target may be transposed. 64 bf16 elements are a cache line.
TILE = 64
OPTIONS = {"num_warps": 8}
# Lines of packed floats that a program decodes from start to end, because escapes are counted along them.
FLOAT_LINES = 32
FLOAT_OPTIONS = {"num_warps": 8}


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


@triton.jit  # type: ignore[untyped-decorator]
def decode_float_tiles(  # type: ignore[no-untyped-def]
    fractions,
    exponents,
    target,
    lines,
    length,
    exponent_bytes,
    matrix_stride,
    line_stride,
    element_stride,
    exponent_bits: tl.constexpr,
    mantissa_bits: tl.constexpr,
    fraction_bytes: tl.constexpr,
    planes: tl.constexpr,
    lines_of_program: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Decode some lines of a matrix, tile by tile; `models/layouts/lossless.py` describes the bytes.

    `target` points to integers of the size of the floats.
    """
    octets = tl.cdiv(length, 8)
    programs = tl.cdiv(lines, lines_of_program)
    matrix = (tl.program_id(0) // programs).to(tl.int64)
    line = (tl.program_id(0) % programs * lines_of_program + tl.arange(0, lines_of_program))[:, None]
    is_line = line < lines
    packed = exponents + matrix * exponent_bytes
    row = packed + 16 + line * 8
    base = tl.load(row, mask=is_line, other=0).to(tl.int32)
    next_escape = tl.zeros([lines_of_program, 1], tl.int32)
    for byte in tl.static_range(4):
        next_escape |= tl.load(row + 4 + byte, mask=is_line, other=0).to(tl.int32) << (8 * byte)
    line_planes = packed + 16 + lines * 8 + line * (planes * octets)
    escapes_start = 16 + lines * (8 + planes * octets)
    escapes = exponent_bytes - escapes_start

    for first in range(0, length, tile_size):
        element = (first + tl.arange(0, tile_size))[None, :]
        is_inside = is_line & (element < length)
        code = tl.zeros([lines_of_program, tile_size], tl.int32)
        for plane in tl.static_range(3):
            octet = tl.load(line_planes + plane * octets + element // 8, mask=is_inside, other=0).to(tl.int32)
            code |= (octet >> (element % 8) & 1) << plane
        is_escape = ((code == 7) & is_inside).to(tl.int32)
        escape = next_escape + tl.cumsum(is_escape, 1) - 1
        is_stored = (is_escape != 0) & (escape >= 0) & (escape < escapes)
        escaped = tl.load(packed + escapes_start + escape, mask=is_stored, other=0).to(tl.int32)
        exponent = tl.where(is_escape != 0, escaped, base + code)
        next_escape += tl.sum(is_escape, 1)[:, None]

        fraction = tl.zeros([lines_of_program, tile_size], tl.int32)
        stored = fractions + ((matrix * lines + line) * length + element) * fraction_bytes
        for byte in tl.static_range(fraction_bytes):
            fraction |= tl.load(stored + byte, mask=is_inside, other=0).to(tl.int32) << (8 * byte)
        for plane in tl.static_range(3, planes):
            octet = tl.load(line_planes + plane * octets + element // 8, mask=is_inside, other=0).to(tl.int32)
            fraction |= (octet >> (element % 8) & 1) << (8 * fraction_bytes + plane - 3)
        bits = (fraction & ((1 << mantissa_bits) - 1)) | (exponent << mantissa_bits)
        bits |= (fraction >> mantissa_bits) << (mantissa_bits + exponent_bits)
        address = target + matrix * matrix_stride + line * line_stride + element * element_stride
        tl.store(address, bits.to(target.dtype.element_ty), mask=is_inside)


def decode_floats_by_triton(
    formula: LosslessFormula, stored: Mapping[Role, torch.Tensor], target: torch.Tensor
) -> None:
    """Decode the matrices of contiguous `stored` tensors, each [experts, ...], into `target` of the formula's dtype."""
    programs = target.shape[0] * triton.cdiv(target.shape[1 + formula.is_transposed], FLOAT_LINES)
    if programs and target.numel():
        arguments, constants = float_arguments(formula, stored, target)
        decode_float_tiles[programs,](*arguments, **constants, **FLOAT_OPTIONS)


def float_arguments(
    formula: LosslessFormula, stored: Mapping[Role, torch.Tensor], target: torch.Tensor
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and the constants by which the kernel decodes packed floats."""
    number, exponents = formula.type, stored[Role.EXPONENTS]
    lines = target.view(number.integer)
    lines = lines.transpose(-1, -2) if formula.is_transposed else lines
    return [stored[Role.VALUES], exponents, lines, *lines.shape[1:], exponents.shape[-1], *lines.stride()], {
        "exponent_bits": number.exponent_bits,
        "mantissa_bits": number.mantissa_bits,
        "fraction_bytes": number.fraction_bytes,
        "planes": number.planes,
        "lines_of_program": FLOAT_LINES,
        "tile_size": TILE,
    }
