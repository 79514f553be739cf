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

from moepass.models.layouts.elf import ElfFormula
from moepass.models.layouts.layout import MatrixFormula, Role
from moepass.models.layouts.packed_floats import PackedFormula
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
    values,
    sections,
    target,
    lines,
    length,
    section_bytes,
    matrix_stride,
    line_stride,
    element_stride,
    is_elf: tl.constexpr,
    exponent_bits: tl.constexpr,
    mantissa_bits: tl.constexpr,
    value_bytes: tl.constexpr,
    code_planes: tl.constexpr,
    row_bytes: tl.constexpr,
    high_bits: tl.constexpr,
    lines_of_program: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Decode some lines of a matrix, tile by tile; lossless.py and elf.py in models/layouts describe the bytes.

    `target` points to integers of the size of the floats. Exceptions are not written.
    """
    octets = tl.cdiv(length, 8)
    programs = tl.cdiv(lines, lines_of_program)
    matrix = (tl.program_id(0) // programs).to(tl.int64)
    line = (tl.program_id(0) % programs * lines_of_program + tl.arange(0, lines_of_program))[:, None]
    is_line = line < lines
    packed = sections + matrix * section_bytes
    line_planes = packed + 16 + lines * row_bytes + line * ((code_planes + high_bits) * octets)
    escapes_start = 16 + lines * (row_bytes + (code_planes + high_bits) * octets)
    if not is_elf:
        row = packed + 16 + line * row_bytes
        base = tl.load(row, mask=is_line, other=0).to(tl.int32)
        next_escape = tl.zeros([lines_of_program, 1], tl.int32)
        for byte in tl.static_range(4):
            next_escape |= tl.load(row + 4 + byte, mask=is_line, other=0).to(tl.int32) << (8 * byte)

    for first in range(0, length, tile_size):
        element = (first + tl.arange(0, tile_size))[None, :]
        is_inside = is_line & (element < length)
        fraction = tl.zeros([lines_of_program, tile_size], tl.int32)
        stored = values + ((matrix * lines + line) * length + element) * value_bytes
        for byte in tl.static_range(value_bytes):
            fraction |= tl.load(stored + byte, mask=is_inside, other=0).to(tl.int32) << (8 * byte)
        for bit in tl.static_range(high_bits):
            plane = line_planes + (code_planes + bit) * octets
            octet = tl.load(plane + element // 8, mask=is_inside, other=0).to(tl.int32)
            fraction |= (octet >> (element % 8) & 1) << (8 * value_bytes + bit)
        mantissa = fraction & ((1 << mantissa_bits) - 1)

        if is_elf:
            magnitude = mantissa.to(tl.float32) * (1.0 / (1 << mantissa_bits))
            bits = magnitude.to(tl.int32, bitcast=True)
            if exponent_bits == 5:  # an exact conversion, which Triton's interpreter has not
                bits = tl.where(mantissa == 0, 0, (bits >> 13) - (112 << mantissa_bits))
        else:
            code = tl.zeros([lines_of_program, tile_size], tl.int32)
            for bit in tl.static_range(code_planes):
                octet = tl.load(line_planes + bit * octets + element // 8, mask=is_inside, other=0).to(tl.int32)
                code |= (octet >> (element % 8) & 1) << bit
            is_escape = ((code == 7) & is_inside).to(tl.int32)
            escape = escapes_start + next_escape + tl.cumsum(is_escape, 1) - 1
            is_stored = (is_escape != 0) & (escape >= escapes_start) & (escape < section_bytes)
            escaped = tl.load(packed + escape, mask=is_stored, other=0).to(tl.int32)
            next_escape += tl.sum(is_escape, 1)[:, None]
            bits = (tl.where(is_escape != 0, escaped, base + code) << mantissa_bits) | mantissa
        bits |= (fraction >> mantissa_bits) << (mantissa_bits + exponent_bits)
        address = target + matrix * matrix_stride + line * line_stride + element * element_stride
        tl.store(address, bits.to(target.dtype.element_ty), mask=is_inside)


def decode_floats_by_triton(formula: PackedFormula, stored: Mapping[Role, torch.Tensor], target: torch.Tensor) -> None:
    """Decode the matrices of contiguous `stored` tensors, each [experts, ...], into `target` of the formula's dtype."""
    if not target.numel():
        return
    programs = target.shape[0] * triton.cdiv(target.shape[1 + formula.is_transposed], FLOAT_LINES)
    arguments, constants = float_arguments(formula, stored, target)
    decode_float_tiles[programs,](*arguments, **constants, **FLOAT_OPTIONS)
    if isinstance(formula, ElfFormula):
        lines = arguments[2]
        indices, values = formula.exceptions(stored)
        matrices = torch.arange(len(lines), device=lines.device)[:, None].expand_as(indices)
        lines.index_put_((matrices, indices // lines.shape[2], indices % lines.shape[2]), values)


def float_arguments(
    formula: PackedFormula, stored: Mapping[Role, torch.Tensor], target: torch.Tensor
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and the constants by which the kernel decodes packed floats."""
    number, sections = formula.type, stored[Role.SECTIONS]
    lines = target.view(number.integer)
    lines = lines.transpose(-1, -2) if formula.is_transposed else lines
    return [stored[Role.VALUES], sections, lines, *lines.shape[1:], sections.shape[-1], *lines.stride()], {
        "is_elf": isinstance(formula, ElfFormula),
        "exponent_bits": number.exponent_bits,
        "mantissa_bits": number.mantissa_bits,
        "value_bytes": number.value_bytes,
        "code_planes": formula.code_planes,
        "row_bytes": formula.row_bytes,
        "high_bits": number.high_bits,
        "lines_of_program": FLOAT_LINES,
        "tile_size": TILE,
    }
