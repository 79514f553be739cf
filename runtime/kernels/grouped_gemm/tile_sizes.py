"""Which sizes of tiles a GPU multiplies fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from moepass.passes.segments.expert_kernels import ONE_COLUMN, ONE_ROW, Accumulated, GemmKernel, Loaded


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Rows, columns and inner elements of a tile; `group` row tiles that share columns run side by side.

    `warps` work on a tile, and `stages` steps of the inner loop are in flight. A thread has at most `registers`; None:
    as many as the compiler finds best, which may spill some for the sake of more tiles at a time. With `descriptors`,
    the hardware copies tiles (TMA) of weights and rows that allow it.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    group: int = 8
    registers: int | None = None
    descriptors: bool = False

    def options(self) -> dict[str, int]:
        """What Triton compiles them with."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


# [Empirical] for no GPU yet: as large as registers and shared memory allow without spilling, and smaller ones for few
# rows. By the first digits of the compute capability (8: sm_80, 9: sm_90, 10: sm_100) and the bytes of an element.
_SIZES: dict[tuple[int, int], tuple[TileSizes, ...]] = {
    (8, 2): (TileSizes(128, 64, 64, 8, 3), TileSizes(64, 64, 64, 4, 4), TileSizes(16, 64, 64, 4, 4)),
    (9, 2): (TileSizes(128, 128, 64, 8, 3), TileSizes(64, 128, 64, 4, 3), TileSizes(16, 64, 64, 4, 4)),
    (10, 2): (TileSizes(128, 128, 64, 8, 3), TileSizes(64, 128, 64, 4, 3), TileSizes(16, 64, 64, 4, 4)),
    (8, 4): (TileSizes(64, 64, 32, 4, 3, registers=255), TileSizes(16, 32, 32, 4, 3, registers=255)),
    (9, 4): (TileSizes(64, 64, 32, 4, 3, registers=255), TileSizes(16, 32, 32, 4, 3, registers=255)),
    (10, 4): (TileSizes(64, 32, 32, 4, 3, registers=255), TileSizes(16, 32, 32, 4, 3, registers=255)),
}
# Of a block, by compute capability. CUDA C++ programming guide, "technical specifications per compute capability".
_SHARED_BYTES = {8: 163 << 10, 9: 227 << 10, 10: 227 << 10}
# The first generation whose hardware copies tiles.
_TMA_CAPABILITY = 9
# Tiles of values that registers hold at the sizes above: gate and up.
_MOST_LIVE_TILES = 2


def tile_sizes(kernel: GemmKernel, capability: int, dtype: torch.dtype, rows_per_expert: int) -> TileSizes:
    """Sizes for experts with so many rows on average, on a GPU of compute capability `capability`.x."""
    all_sizes = all_tile_sizes(kernel, capability, dtype)
    return next((sizes for sizes in all_sizes if sizes.rows <= 2 * rows_per_expert), all_sizes[-1])


def all_tile_sizes(kernel: GemmKernel, capability: int, dtype: torch.dtype) -> tuple[TileSizes, ...]:
    """All sizes that `kernel` runs with on this GPU, or on the next older one of the table; the largest first."""
    known = sorted(major for major, size in _SIZES if size == dtype.itemsize)
    major = max((one for one in known if one <= capability), default=known[0])
    halves = 2 if _live_tiles(kernel) > _MOST_LIVE_TILES else 1
    return tuple(
        dataclasses.replace(sizes, columns=max(16, sizes.columns // halves)) for sizes in _SIZES[major, dtype.itemsize]
    )


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
            # [Empirical] for no GPU yet, so that none is a default: compiled, they spill nothing, and most take fewer
            # registers. Float32 spills with them. Loops are not specialised by warps: with Triton 3.7, that changes
            # nothing on sm_90 with 8 warps, does not compile there with 4, and spills on sm_100 (SwiGLU, 128 x 128).
            # Without all registers, Triton 3.6 spills 8 bytes on sm_100 (mixtral-8x7b, down), for two tiles at a time.
            found[dataclasses.replace(sizes, descriptors=True, registers=255)] = None
        for neighbour in _neighbours(sizes):
            if neighbour.stages * _stage_bytes(kernel, neighbour, dtype) <= room:
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


def _live_tiles(kernel: GemmKernel) -> int:
    """Values of a tile's rows and columns that do not come from others: sums, and what is loaded for each element."""
    columns = {value.columns for value in kernel.values if isinstance(value, Accumulated)}
    # Every second column: the tile of all columns is there too while it is split.
    wide = sum(one.step > 1 for one in columns)
    loaded = sum(
        isinstance(value, Loaded) and value.rows != ONE_ROW and value.columns != ONE_COLUMN for value in kernel.values
    )
    return len(columns) + wide + loaded
