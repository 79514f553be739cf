"""Which sizes of tiles a GPU multiplies fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from moepass.passes.graph.nodes import fake_value
from moepass.passes.segments.expert_kernels import ONE_COLUMN, ONE_ROW, Accumulated, GemmKernel, Loaded
from moepass.runtime.kernels.grouped_gemm.kernel_source import chosen_once


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Rows, columns and inner elements of a tile; `group` row tiles that share columns run side by side.

    `warps` work on a tile, and `stages` steps of the inner loop are in flight. A thread has at most `registers`; None:
    as many as the compiler finds best, which may spill some for the sake of more tiles at a time. With `descriptors`,
    the hardware copies tiles (TMA) of weights and rows that allow it. `blocks` tiles are computed at a time by each
    multiprocessor.
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
        """What Triton compiles them with."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


@dataclasses.dataclass(frozen=True)
class _SizesFrom:
    """For experts with `rows_per_expert` rows or more: `one` where a kernel holds one tile of sums, `two` for two.

    `short` is `one` for an inner dimension below _SHORT_INNER; None: no other.
    """

    rows_per_expert: int
    one: TileSizes
    two: TileSizes
    short: TileSizes | None = None

    def sizes(self, live_tiles: int, inner: int | torch.SymInt) -> TileSizes:
        if live_tiles > 1:
            halves = 2 if live_tiles > _MOST_LIVE_TILES else 1
            return dataclasses.replace(self.two, columns=max(16, self.two.columns // halves))
        is_short = isinstance(inner, int) and inner < _SHORT_INNER  # it may be a symbol
        return self.short if self.short is not None and is_short else self.one


def _same(rows_per_expert: int, sizes: TileSizes) -> _SizesFrom:
    return _SizesFrom(rows_per_expert, sizes, sizes)


# By the first digits of the compute capability (8: sm_80, 9: sm_90, 10: sm_100) and the bytes of an element; the most
# rows first.
# [Empirical] for sm_90 and two bytes: an H100, 2026-11-26, layers of qwen3-30b-a3b and gpt-oss-120b with 32 to 2,048
# rows for each expert (docs/results/2026-11-26-h100.md). For others no GPU was there yet: as large as registers and
# shared memory allow without spilling, and smaller ones for few rows.
_SIZES: dict[tuple[int, int], tuple[_SizesFrom, ...]] = {
    (8, 2): (
        _same(64, TileSizes(128, 64, 64, 8, 3)),
        _same(32, TileSizes(64, 64, 64, 4, 4)),
        _same(0, TileSizes(16, 64, 64, 4, 4)),
    ),
    (9, 2): (
        _SizesFrom(
            192,
            one=TileSizes(128, 256, 64, 8, 3, group=16, descriptors=True),
            two=TileSizes(128, 128, 64, 8, 4, group=16, descriptors=True),
            short=TileSizes(128, 256, 64, 8, 4, group=16, descriptors=True),
        ),
        _SizesFrom(
            24,
            one=TileSizes(64, 128, 64, 4, 4, descriptors=True, blocks=2),
            two=TileSizes(64, 128, 64, 8, 4, descriptors=True),
        ),
        _same(0, TileSizes(16, 64, 64, 4, 4)),
    ),
    (10, 2): (
        _same(64, TileSizes(128, 128, 64, 8, 3)),
        _same(32, TileSizes(64, 128, 64, 4, 3)),
        _same(0, TileSizes(16, 64, 64, 4, 4)),
    ),
    (8, 4): (
        _same(32, TileSizes(64, 64, 32, 4, 3, registers=255)),
        _same(0, TileSizes(16, 32, 32, 4, 3, registers=255)),
    ),
    (9, 4): (
        _same(32, TileSizes(64, 64, 32, 4, 3, registers=255)),
        _same(0, TileSizes(16, 32, 32, 4, 3, registers=255)),
    ),
    (10, 4): (
        _same(32, TileSizes(64, 32, 32, 4, 3, registers=255)),
        _same(0, TileSizes(16, 32, 32, 4, 3, registers=255)),
    ),
}
# Of a block, by compute capability. CUDA C++ programming guide, "technical specifications per compute capability".
_SHARED_BYTES = {8: 163 << 10, 9: 227 << 10, 10: 227 << 10}
# The first generation whose hardware copies tiles.
_TMA_CAPABILITY = 9
_SHORT_INNER = 1024
_HOPPER = 9
# Tiles of values that registers hold at the sizes above: gate and up.
_MOST_LIVE_TILES = 2


def tile_sizes(kernel: GemmKernel, capability: int, dtype: torch.dtype, rows_per_expert: int) -> TileSizes:
    """Sizes for experts with so many rows on average, on a GPU of compute capability `capability`.x."""
    for least_rows, sizes in _sizes_by_rows(kernel, capability, dtype):
        if rows_per_expert >= least_rows:
            return sizes
    raise AssertionError("the last sizes are for any number of rows")


def all_tile_sizes(kernel: GemmKernel, capability: int, dtype: torch.dtype) -> tuple[TileSizes, ...]:
    """All sizes that `kernel` runs with on this GPU, or on the next older one of the table; the largest first."""
    return tuple(sizes for _, sizes in _sizes_by_rows(kernel, capability, dtype))


def _sizes_by_rows(kernel: GemmKernel, capability: int, dtype: torch.dtype) -> list[tuple[int, TileSizes]]:
    known = sorted(major for major, size in _SIZES if size == dtype.itemsize)
    major = max((one for one in known if one <= capability), default=known[0])
    live, inner = _live_tiles(kernel, major), fake_value(kernel.gemm.weights).shape[1]
    return [(entry.rows_per_expert, entry.sizes(live, inner)) for entry in _SIZES[major, dtype.itemsize]]


def candidate_sizes(kernel: GemmKernel, capability: int, dtype: torch.dtype) -> tuple[TileSizes, ...]:
    """Sizes that a tuner tries: those that are used by default, and neighbours that shared memory has room for."""
    found: dict[TileSizes, None] = {}
    room = _SHARED_BYTES.get(capability, min(_SHARED_BYTES.values()))
    for sizes in all_tile_sizes(kernel, capability, dtype):
        found[sizes] = None
        if sizes.rows < 64:
            # Else the compiler, for more tiles at a time, spills some of these on sm_90, where weights are biased and
            # as wide as no number of tiles (gpt-oss-120b).
            sizes = dataclasses.replace(sizes, registers=255)
        if capability >= _TMA_CAPABILITY and dtype.itemsize == 2:
            # Float32 spills with them. Loops are not specialised by warps: with Triton 3.7, that changes nothing on
            # sm_90 with 8 warps, does not compile there with 4, and spills on sm_100 (SwiGLU, 128 x 128). Without all
            # registers, Triton 3.6 spills 8 bytes on sm_100 (mixtral-8x7b, down), for two tiles at a time.
            found[dataclasses.replace(sizes, descriptors=not sizes.descriptors, registers=255)] = None
        for neighbour in _neighbours(sizes):
            if neighbour.stages * _stage_bytes(kernel, neighbour, dtype) * neighbour.blocks <= room:
                found[neighbour] = None
    return tuple(found)


def _neighbours(sizes: TileSizes) -> Iterator[TileSizes]:
    yield dataclasses.replace(sizes, stages=sizes.stages - 1)
    yield dataclasses.replace(sizes, stages=sizes.stages + 1)
    if sizes.inner > 32:
        yield dataclasses.replace(sizes, inner=sizes.inner // 2, stages=sizes.stages + 1)
    if sizes.rows >= 64 and sizes.columns > 32:  # with few rows, 32 columns spill on sm_90 where weights are biased
        yield dataclasses.replace(sizes, columns=sizes.columns // 2)


def _stage_bytes(kernel: GemmKernel, sizes: TileSizes, dtype: torch.dtype) -> int:
    """Of rows and weights of one step of the inner loop."""
    products = len({value.columns for value in kernel.values if isinstance(value, Accumulated)})
    return (sizes.rows + products * sizes.columns) * sizes.inner * dtype.itemsize


def _live_tiles(kernel: GemmKernel, capability: int) -> int:
    """Values of a tile's rows and columns that do not come from others: sums, and what is loaded for each element."""
    columns = {value.columns for value in kernel.values if isinstance(value, Accumulated)}
    # Every second column: the tile of all columns is there too while it is split. On sm_90 that moves nothing, and rows
    # that are chosen once take few registers. [Empirical] an H100, gpt-oss-120b: 8.0 ms with tiles twice as wide as
    # these would allow, not 11.0 ms. On sm_100 such tiles spill; nobody measured.
    wide, once = sum(one.step > 1 for one in columns), None
    if capability == _HOPPER:
        wide, once = 0, chosen_once(kernel)
    loaded = sum(
        isinstance(value, Loaded) and value.rows not in (ONE_ROW, once) and value.columns != ONE_COLUMN
        for value in kernel.values
    )
    return len(columns) + wide + loaded
