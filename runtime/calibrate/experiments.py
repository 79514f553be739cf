"""The experiments of a calibration: operations over grids of sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from moepass.runtime.calibrate.stopwatch import Timing, TimingEffort


@dataclasses.dataclass(frozen=True)
class Experiment:
    """`time` is called with one size for each of `axes`, over their product, the last axis fastest."""

    name: str
    axes: dict[str, tuple[int, ...]]
    time: Callable[..., Timing]
    is_computation: bool = False

    @property
    def points(self) -> int:
        return math.prod(len(points) for points in self.axes.values())

    def sizes(self) -> Iterator[dict[str, int]]:
        for point in itertools.product(*self.axes.values()):
            yield dict(zip(self.axes, point, strict=True))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The grids of one calibration. Widths are both inner and outer sizes of GEMMs.

    GEMMs run over so many weights and results that these have `cold_bytes`, and grouped GEMMs over `experts` at
    least: few rows take as long as the weights take from memory, and no cache may hold these.
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

CPU_SIZES = Sizes(
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
CUDA_SIZES = Sizes(
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


def quick(sizes: Sizes) -> Sizes:
    """Every second point or so, one dtype and fewer samples: for a first look."""
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
    """The first and the last point, and every second one between."""
    return tuple(dict.fromkeys((*points[:-1:2], points[-1])))
