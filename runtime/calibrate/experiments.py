"""The experiments of a calibration: operations over grids of sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from moepass.runtime.calibrate.stopwatch import Timing, TimingEffort


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An operation that is timed over a grid of sizes.

    Attributes:
        axes: The sizes of each axis, by name.
        time: Called with one size for each axis, for all combinations, the last axis fastest.
        is_computation: Whether the calling thread computes, so that its share of a core matters.
    """

    name: str
    axes: dict[str, tuple[int, ...]]
    time: Callable[..., Timing]
    is_computation: bool = False

    @property
    def points(self) -> int:
        """The number of combinations."""
        return math.prod(len(points) for points in self.axes.values())

    def sizes(self) -> Iterator[dict[str, int]]:
        """Yield all combinations, the last axis fastest."""
        for point in itertools.product(*self.axes.values()):
            yield dict(zip(self.axes, point, strict=True))


@dataclasses.dataclass(frozen=True)
class CalibrationSizes:
    """The grids of one calibration.

    A GEMM with few rows takes as long as its weights take from memory, so no cache may hold them: GEMMs run over
    several weights and results of `cold_bytes` together, and grouped GEMMs over at least `experts` experts.

    Attributes:
        widths: Both the inner and the outer sizes of GEMMs.
        expert_rows: Rows of one expert in a grouped GEMM.
        sequences: Tokens of one sequence in attention.
        memory_bytes: Bytes read and written by an elementwise operation.
        cold_bytes: More bytes than the caches hold.
    """

    dtypes: tuple[str, ...]
    rows: tuple[int, ...]
    widths: tuple[int, ...]
    expert_rows: tuple[int, ...]
    experts: int
    sequences: tuple[int, ...]
    head_dims: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    transfer_bytes: tuple[int, ...]
    collective_bytes: tuple[int, ...]
    cold_bytes: int = 0
    effort: TimingEffort = dataclasses.field(default_factory=TimingEffort)


_KIB, _MIB = 1 << 10, 1 << 20

CPU_SIZES = CalibrationSizes(
    dtypes=("fp32", "bf16"),
    rows=(1, 16, 128, 1024, 4096),
    widths=(64, 256, 1024, 2048),
    expert_rows=(1, 8, 32, 128, 512, 2048),
    experts=8,
    sequences=(64, 256, 1024, 4096),
    head_dims=(64, 128),
    memory_bytes=(64 * _KIB, 1 * _MIB, 16 * _MIB, 128 * _MIB),
    transfer_bytes=(64 * _KIB, 1 * _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB, 128 * _MIB),
    collective_bytes=(1 * _KIB, 64 * _KIB, 1 * _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB),
    cold_bytes=64 * _MIB,
)
CUDA_SIZES = CalibrationSizes(
    dtypes=("bf16", "fp16", "fp32"),
    rows=(1, 16, 128, 1024, 4096, 16384),
    widths=(128, 1024, 4096, 8192),
    expert_rows=(1, 16, 64, 256, 1024, 4096),
    experts=16,
    sequences=(128, 1024, 4096, 16384),
    head_dims=(64, 128),
    memory_bytes=(1 * _MIB, 16 * _MIB, 256 * _MIB, 2048 * _MIB),
    transfer_bytes=(64 * _KIB, 1 * _MIB, 4 * _MIB, 16 * _MIB, 128 * _MIB, 1024 * _MIB),
    collective_bytes=(1 * _KIB, 64 * _KIB, 1 * _MIB, 16 * _MIB, 256 * _MIB, 1024 * _MIB),
    cold_bytes=256 * _MIB,
)


def quick(sizes: CalibrationSizes) -> CalibrationSizes:
    """Return coarser grids of one dtype, with fewer samples, for a first impression."""
    return dataclasses.replace(
        sizes,
        dtypes=sizes.dtypes[:1],
        rows=_thinned(sizes.rows),
        widths=_thinned(sizes.widths),
        expert_rows=_thinned(sizes.expert_rows),
        sequences=_thinned(sizes.sequences),
        head_dims=sizes.head_dims[:1],
        memory_bytes=_thinned(sizes.memory_bytes),
        transfer_bytes=_thinned(sizes.transfer_bytes),
        collective_bytes=_thinned(sizes.collective_bytes),
        effort=TimingEffort(samples=3, sample_seconds=0.003),
    )


def _thinned(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first and the last point, and every second one between them."""
    return tuple(dict.fromkeys((*points[:-1:2], points[-1])))
