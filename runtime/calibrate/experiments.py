"""The experiments of a calibration: operations that are timed over grids of sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moepass.runtime.transfer.lanes import finish_on


@dataclasses.dataclass(frozen=True)
class Timing:
    """The median of repeated measurements, and the width of their middle half relative to the median."""

    seconds: float
    spread: float


@dataclasses.dataclass(frozen=True)
class TimingEffort:
    """Samples of one timing, each of `sample_seconds`; at most two if a call takes longer than `long_seconds`."""

    samples: int = 7
    sample_seconds: float = 0.01
    long_seconds: float = 0.3


def time_calls(
    run: Callable[[], object], device: torch.device, effort: TimingEffort, calls: int | None = None
) -> Timing:
    """Return the seconds of one call of `run`, including the work that it issues to `device`, after a first call.

    `calls` sets the number of calls in each sample, for operations that other ranks must run as often.
    """
    finish_on(device)
    started = time.perf_counter()
    run()
    finish_on(device)
    first = time.perf_counter() - started
    samples = effort.samples
    if calls is None:
        if first > effort.long_seconds:
            samples = min(samples, 2)
        calls = max(1, math.ceil(effort.sample_seconds / max(first, 1e-9)))
        if calls > 1:  # the first call includes one-time work
            calls = max(1, math.ceil(effort.sample_seconds / _sample(run, device, min(calls, 10))))
    return timing_of([_sample(run, device, calls) for _ in range(samples)])


def timing_of(seconds: Sequence[float]) -> Timing:
    """Return the timing of `seconds`, which has at least one measurement."""
    middle = statistics.median(seconds)
    if len(seconds) < 2:
        return Timing(middle, 0.0)
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(middle, (upper - lower) / middle)


def _sample(run: Callable[[], object], device: torch.device, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        run()
    finish_on(device)
    return (time.perf_counter() - started) / calls


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An operation `time`, which takes one size per axis. With `is_computation`, its thread needs a core."""

    name: str
    axes: dict[str, tuple[int, ...]]
    time: Callable[..., Timing]
    is_computation: bool = False

    def sizes(self) -> list[dict[str, int]]:
        """Return all combinations of sizes, the last axis fastest."""
        return [dict(zip(self.axes, point, strict=True)) for point in itertools.product(*self.axes.values())]


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
    coarser: dict[str, Any] = {"dtypes": sizes.dtypes[:1], "head_dims": sizes.head_dims[:1]}
    for name in ("rows", "widths", "expert_rows", "sequences", "memory_bytes", "transfer_bytes", "collective_bytes"):
        points = getattr(sizes, name)
        coarser[name] = tuple(dict.fromkeys((*points[:-1:2], points[-1])))
    return dataclasses.replace(sizes, **coarser, effort=TimingEffort(samples=3, sample_seconds=0.003))
