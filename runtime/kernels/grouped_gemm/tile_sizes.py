"""The tile sizes with which GPUs multiply fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from moepass.passes.graph.nodes import fake_value
from moepass.passes.ir.shards import FP8_BLOCK
from moepass.passes.segments.expert_kernels import ONE_COLUMN, ONE_ROW, Accumulated, GemmKernel, Loaded
from moepass.runtime.kernels.grouped_gemm.kernel_source import chosen_once


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """The sizes of a tile, and how a GPU computes it.

    Attributes:
        inner: Elements of the inner dimension in one step.
        stages: Steps of the inner loop that are in flight.
        group: Row tiles with the same columns that run next to each other.
        registers: The most registers per thread. None lets the compiler choose; it may spill some to run more tiles.
        descriptors: Whether the hardware copies tiles (TMA) of weights and rows that allow it.
        blocks: Tiles that each multiprocessor computes at a time.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    group: int = 8
    registers: int | None = None
    descriptors: bool = False
    blocks: int = 1

    def options(self) -> dict[str, int]:
        """Return the compiler options of Triton."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


@dataclasses.dataclass(frozen=True)
class _SizesFrom:
    """The tile sizes for experts with `rows_per_expert` rows or more.

    `single` is for kernels with one tile of sums, and `double` for kernels with more. `short` replaces `single` if the
    inner dimension is below _SHORT_INNER.
    """

    rows_per_expert: int
    single: TileSizes
    double: TileSizes
    short: TileSizes | None = None

    def sizes(self, live_tiles: int, inner: int | torch.SymInt) -> TileSizes:
        if live_tiles > 1:
            halves = 2 if live_tiles > _MOST_LIVE_TILES else 1
            return dataclasses.replace(self.double, columns=max(16, self.double.columns // halves))
        is_short = isinstance(inner, int) and inner < _SHORT_INNER  # it may be a symbol
        return self.short if self.short is not None and is_short else self.single


def _same(rows_per_expert: int, sizes: TileSizes) -> _SizesFrom:
    return _SizesFrom(rows_per_expert, sizes, sizes)


_FEW_ROWS = _same(0, TileSizes(16, 64, 64, 4, 4))
_FEW_FLOAT32_ROWS = _same(0, TileSizes(16, 32, 32, 4, 3, registers=255))
# By the major compute capability (8: sm_80, 9: sm_90, 10: sm_100) and the bytes of an element; the most rows first.
# [Empirical] for sm_90 and two bytes: an H100, 2026-11-26, layers of qwen3-30b-a3b and gpt-oss-120b with 32 to 2,048
# rows for each expert (docs/results/2026-11-26-h100.md). The others were not measured: they are as large as registers
# and shared memory allow without spilling, and smaller for few rows.
_SIZES: dict[tuple[int, int], tuple[_SizesFrom, ...]] = {
    (8, 2): (
        _same(64, TileSizes(128, 64, 64, 8, 3)),
        _same(32, TileSizes(64, 64, 64, 4, 4)),
        _FEW_ROWS,
    ),
    (9, 2): (
        _SizesFrom(
            192,
            single=TileSizes(128, 256, 64, 8, 3, group=16, descriptors=True),
            double=TileSizes(128, 128, 64, 8, 4, group=16, descriptors=True),
            short=TileSizes(128, 256, 64, 8, 4, group=16, descriptors=True),
        ),
        _SizesFrom(
            24,
            single=TileSizes(64, 128, 64, 4, 4, descriptors=True, blocks=2),
            double=TileSizes(64, 128, 64, 8, 4, descriptors=True),
        ),
        _FEW_ROWS,
    ),
    (10, 2): (
        _same(64, TileSizes(128, 128, 64, 8, 3)),
        _same(32, TileSizes(64, 128, 64, 4, 3)),
        _FEW_ROWS,
    ),
    (8, 4): (_same(32, TileSizes(64, 64, 32, 4, 3, registers=255)), _FEW_FLOAT32_ROWS),
    (9, 4): (_same(32, TileSizes(64, 64, 32, 4, 3, registers=255)), _FEW_FLOAT32_ROWS),
    # In FP8 a step multiplies 128 elements, which share a scale; the result of a step takes registers beside the sums.
    (9, 1): (
        _SizesFrom(
            64,
            single=TileSizes(128, 128, FP8_BLOCK, 8, 3, descriptors=True),
            double=TileSizes(128, 64, FP8_BLOCK, 8, 3, descriptors=True),
        ),
        _same(0, TileSizes(16, 64, FP8_BLOCK, 4, 3)),
    ),
    (10, 1): (
        _same(64, TileSizes(128, 64, FP8_BLOCK, 8, 3)),
        _same(0, TileSizes(16, 64, FP8_BLOCK, 4, 3)),
    ),
    (10, 4): (_same(32, TileSizes(64, 32, 32, 4, 3, registers=255)), _FEW_FLOAT32_ROWS),
}
# Shared memory of a block, by compute capability. CUDA C++ programming guide, "technical specifications per compute
# capability".
_SHARED_BYTES = {8: 163 << 10, 9: 227 << 10, 10: 227 << 10}
# The first generation whose hardware copies tiles.
_TMA_CAPABILITY = 9
_SHORT_INNER = 1024
_HOPPER = 9
# The most tiles of values that registers hold at the sizes above: gate and up.
_MOST_LIVE_TILES = 2


def tile_sizes(kernel: GemmKernel, capability: int, dtype: torch.dtype, rows_per_expert: int) -> TileSizes:
    """Return the sizes for this mean number of rows per expert, on a GPU of compute capability `capability`.x."""
    # The last sizes are for any number of rows.
    by_rows = _sizes_by_rows(kernel, capability, dtype)
    return next(sizes for least_rows, sizes in by_rows if rows_per_expert >= least_rows)


def all_tile_sizes(kernel: GemmKernel, capability: int, dtype: torch.dtype) -> tuple[TileSizes, ...]:
    """Return all default sizes of `kernel` on this GPU, or on the next older one of the table; the largest first."""
    return tuple(sizes for _, sizes in _sizes_by_rows(kernel, capability, dtype))


def _sizes_by_rows(kernel: GemmKernel, capability: int, dtype: torch.dtype) -> list[tuple[int, TileSizes]]:
    majors = sorted(major for major, size in _SIZES if size == dtype.itemsize)
    major = max((major for major in majors if major <= capability), default=majors[0])
    live, inner = _live_tiles(kernel, major), fake_value(kernel.gemm.weights).shape[1]
    return [(entry.rows_per_expert, entry.sizes(live, inner)) for entry in _SIZES[major, dtype.itemsize]]


def candidate_sizes(kernel: GemmKernel, capability: int, dtype: torch.dtype) -> tuple[TileSizes, ...]:
    """Return the sizes that a tuner tries: the default sizes, and neighbours that fit into shared memory."""
    candidates: dict[TileSizes, None] = {}
    most_bytes = _SHARED_BYTES.get(capability, min(_SHARED_BYTES.values()))
    for sizes in all_tile_sizes(kernel, capability, dtype):
        candidates[sizes] = None
        if dtype.itemsize == 1:
            candidates[dataclasses.replace(sizes, stages=sizes.stages + 1)] = None
            continue
        if sizes.rows < 64:
            # Without this limit the compiler spills on sm_90 to run more tiles at a time, if weights have biases and no
            # number of tiles fits their width (gpt-oss-120b).
            sizes = dataclasses.replace(sizes, registers=255)
        if capability >= _TMA_CAPABILITY and dtype.itemsize == 2:
            # Float32 spills with descriptors. Warp specialisation of the loops is off: with Triton 3.7 it changes
            # nothing on sm_90 with 8 warps, does not compile there with 4, and spills on sm_100 (SwiGLU, 128 x 128).
            # With fewer registers, Triton 3.6 spills 8 bytes on sm_100 (mixtral-8x7b, down) to run two tiles at a time.
            candidates[dataclasses.replace(sizes, descriptors=not sizes.descriptors, registers=255)] = None
        for neighbour in _neighbours(sizes):
            if neighbour.stages * _stage_bytes(kernel, neighbour, dtype) * neighbour.blocks <= most_bytes:
                candidates[neighbour] = None
    return tuple(candidates)


def _neighbours(sizes: TileSizes) -> Iterator[TileSizes]:
    yield dataclasses.replace(sizes, stages=sizes.stages - 1)
    yield dataclasses.replace(sizes, stages=sizes.stages + 1)
    if sizes.inner > 32:
        yield dataclasses.replace(sizes, inner=sizes.inner // 2, stages=sizes.stages + 1)
    if sizes.rows >= 64 and sizes.columns > 32:  # with few rows, 32 columns spill on sm_90 where weights are biased
        yield dataclasses.replace(sizes, columns=sizes.columns // 2)


def _stage_bytes(kernel: GemmKernel, sizes: TileSizes, dtype: torch.dtype) -> int:
    """Return the bytes of rows and weights in one step of the inner loop."""
    products = len({value.columns for value in kernel.values if isinstance(value, Accumulated)})
    return (sizes.rows + products * sizes.columns) * sizes.inner * dtype.itemsize


def _live_tiles(kernel: GemmKernel, capability: int) -> int:
    """Return the number of tiles that stay in registers: accumulators, and operands loaded for each element."""
    columns = {value.columns for value in kernel.values if isinstance(value, Accumulated)}
    # With every second column, the tile of all columns is held as well while it is split. On sm_90 the split moves no
    # values, and rows that are chosen once take few registers. [Empirical] an H100, gpt-oss-120b: 8.0 ms with tiles
    # twice as wide as these would allow, instead of 11.0 ms. On sm_100 such tiles spill; their time is unmeasured.
    wide, once = sum(group.step > 1 for group in columns), None
    if capability == _HOPPER:
        wide, once = 0, chosen_once(kernel)
    loaded = sum(
        isinstance(value, Loaded) and value.rows not in (ONE_ROW, once) and value.columns != ONE_COLUMN
        for value in kernel.values
    )
    return len(columns) + wide + loaded
