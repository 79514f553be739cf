"""Counts the computation, loads and stores of a kernel from its loops: tiles times inner steps times a tile.

These are counts, not measurements. There are three counts of bytes, because caches decide how many of them the memory
has to deliver:

    loaded     bytes that all tiles ask for: the caches deliver these
    by wave    bytes that the memory delivers if programs that run at the same time share common rows and columns. They
               share them if the second-level cache holds one step of each program: neighbours have the same rows or
               the same columns, and work on the same step at about the same time
    once       every byte once, a lower limit for all orders of tiles
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from moepass.passes.graph.nodes import fake_value
from moepass.passes.machine.hardware import Hardware
from moepass.passes.segments.expert_kernels import ONE_COLUMN, ONE_ROW, OWN_ROWS, GemmKernel, Loaded
from moepass.runtime.kernels.grouped_gemm.kernel_source import (
    chosen_once,
    column_groups,
    is_wide_choice,
    row_number_operands,
)
from moepass.runtime.kernels.grouped_gemm.tile_sizes import TileSizes

_ADDRESS_BYTES = 8
_END_BYTES = 4


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """The work of one launch of a kernel.

    Attributes:
        programs: The programs that compute the tiles.
        most_tiles: The tiles of the busiest program.
        steps: The steps of the inner loop in one tile.
        flops: FLOPs of the rows that exist.
        issued_flops: FLOPs of complete tiles, as tensor cores compute them.
    """

    programs: int
    tiles: int
    most_tiles: int
    steps: int
    flops: int
    issued_flops: int
    loaded_bytes: int
    wave_bytes: int
    once_bytes: int
    stored_bytes: int


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Lower limits of the seconds of a launch, at the stated peak rates of tensor cores and memory."""

    tensor_cores: float
    memory_by_wave: float
    memory_once: float

    @property
    def seconds(self) -> float:
        """The larger of the limits by tensor cores and by memory."""
        return max(self.tensor_cores, self.memory_by_wave)

    @property
    def bound(self) -> str:
        """The resource with the larger limit."""
        return "tensor cores" if self.tensor_cores >= self.memory_by_wave else "memory"


def count_work(kernel: GemmKernel, tile: TileSizes, rows: Sequence[int], programs: int) -> KernelWork:
    """Return the work of a launch by `programs` programs, for experts with `rows` rows each."""
    counts = torch.tensor(rows, dtype=torch.int64)
    weights, left = fake_value(kernel.gemm.weights), fake_value(kernel.operands[kernel.rows])
    inner, products = int(weights.shape[1]), sum(len(group) for group in column_groups(kernel))
    column_tiles = -(-kernel.width // tile.columns)
    row_tiles = -(-counts // tile.rows)
    tiles = int(row_tiles.sum()) * column_tiles
    programs = min(programs, tiles) or 1
    all_rows = int(counts.sum())
    # The columns of all column tiles, and the rows of all row tiles with the padding after an expert's last row.
    columns, filled_rows = kernel.width, int(row_tiles.sum()) * tile.rows
    right_bytes = inner * products * weights.itemsize  # of one column of a tile
    left_bytes = inner * left.itemsize  # of one row
    loaded = filled_rows * column_tiles * left_bytes + int(row_tiles.sum()) * columns * right_bytes
    row_work_bytes = _other_loads(kernel, filled_rows, tiles, column_tiles, int(row_tiles.sum()))
    # The first expert begins at 0, so its beginning is not loaded.
    tile_ends = 2 * tiles - int(row_tiles[0]) * column_tiles
    row_work_bytes += tiles * _ADDRESS_BYTES + (programs * 2 * len(rows) + tile_ends) * _END_BYTES
    waved = _wave_bytes(counts, tile, column_tiles, kernel.width, left_bytes, right_bytes, programs)
    used = int((counts > 0).sum())
    table = int(left.shape[0]) if kernel.row_numbers is not None else all_rows
    once = min(all_rows, table) * left_bytes + used * columns * right_bytes
    stored = sum(all_rows * _stored_columns(node) * fake_value(node).itemsize for node in kernel.outputs)
    steps = -(-inner // tile.inner)
    return KernelWork(
        programs=programs,
        tiles=tiles,
        most_tiles=-(-tiles // programs),
        steps=steps,
        flops=2 * all_rows * inner * kernel.width * products,
        issued_flops=2 * tiles * tile.rows * tile.columns * products * steps * tile.inner,
        loaded_bytes=loaded + row_work_bytes,
        wave_bytes=waved + row_work_bytes + stored,
        once_bytes=once + _other_bytes(kernel, all_rows, used) + stored,
        stored_bytes=stored,
    )


def roofline(work: KernelWork, hardware: Hardware, dtype: str) -> Roofline:
    """Return lower limits of the seconds of `work` on one device of `hardware`, with weights of `dtype`.

    Each processor has an equal share of the peak, so the busiest program sets the limit of tensor cores. Raises
    ValueError if the profile has no number of processors, or no rate for `dtype`.
    """
    if hardware.processors is None or dtype not in hardware.flops:
        raise ValueError(f"profile {hardware.name!r} has no number of processors, or no rate for {dtype}")
    of_processor = hardware.flops[dtype].value / hardware.processors.value
    rate = hardware.memory_bytes_per_s.value
    of_tile = work.issued_flops / max(1, work.tiles)
    return Roofline(work.most_tiles * of_tile / of_processor, work.wave_bytes / rate, work.once_bytes / rate)


def _wave_bytes(
    counts: torch.Tensor,
    tile: TileSizes,
    column_tiles: int,
    width: int,
    left_bytes: int,
    right_bytes: int,
    programs: int,
) -> int:
    """Return the bytes of rows and weights that the tiles of each wave need, each byte once per wave."""
    heights = -(-counts // tile.rows)
    expert = torch.repeat_interleave(torch.arange(len(counts)), heights * column_tiles)
    position = torch.arange(len(expert)) - ((heights * column_tiles).cumsum(0) - heights * column_tiles)[expert]
    # The same order as in the kernel.
    group = position // (tile.group * column_tiles)
    position = position - group * tile.group * column_tiles
    group_height = torch.minimum(heights[expert] - group * tile.group, torch.tensor(tile.group))
    row_tile, column_tile = group * tile.group + position % group_height, position // group_height
    wave = torch.arange(len(expert)) // programs
    first = heights.cumsum(0) - heights
    rows = torch.unique(wave * int(heights.sum()) + first[expert] + row_tile) % int(heights.sum())
    of_rows = torch.repeat_interleave(torch.arange(len(counts)), heights)
    filled = torch.clamp(counts[of_rows] - (torch.arange(len(of_rows)) - first[of_rows]) * tile.rows, max=tile.rows)
    columns = torch.unique((wave * len(counts) + expert) * column_tiles + column_tile) % column_tiles
    valid = torch.clamp(width - columns * tile.columns, max=tile.columns)
    return int(filled[rows].sum()) * left_bytes + int(valid.sum()) * right_bytes


def _is_one_column(value: Loaded) -> bool:
    return value.columns == ONE_COLUMN or value.columns.step == 0


def _other_loads(kernel: GemmKernel, filled_rows: int, tiles: int, column_tiles: int, row_tiles: int) -> int:
    """Return the bytes of row indices and of row work that all tiles ask for."""
    total = 0
    chosen = chosen_once(kernel)
    for number in row_number_operands(kernel):
        total += filled_rows * column_tiles * fake_value(kernel.operands[number]).itemsize
    for value in kernel.values:
        if not isinstance(value, Loaded):
            continue
        size = fake_value(kernel.operands[value.operand]).itemsize
        is_once = value.rows == ONE_ROW or (value.rows == chosen and is_wide_choice(value))
        by_row, by_tile = (row_tiles, tiles) if is_once else (filled_rows, filled_rows * column_tiles)
        total += size * (by_tile if _is_one_column(value) else by_row * kernel.width)
    return total


def _other_bytes(kernel: GemmKernel, rows: int, used_experts: int) -> int:
    """Return the bytes of row indices and row work, each byte once; of tables, the rows of experts in use."""
    total = sum(rows * int(fake_value(kernel.operands[number]).itemsize) for number in row_number_operands(kernel))
    for value in kernel.values:
        if isinstance(value, Loaded):
            operand = fake_value(kernel.operands[value.operand])
            columns = 1 if _is_one_column(value) else kernel.width
            of_table = min(used_experts, int(operand.shape[0]))
            height = 1 if value.rows == ONE_ROW else rows if value.rows == OWN_ROWS else of_table
            total += height * columns * int(operand.itemsize)
    return total


def _stored_columns(node: torch.fx.Node) -> int:
    return math.prod(int(size) for size in fake_value(node).shape[1:])
