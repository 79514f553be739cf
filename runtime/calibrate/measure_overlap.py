"""Measures how much copies slow down computation, and computation slows down copies."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from moepass.runtime.calibrate.experiments import CalibrationSizes
from moepass.runtime.calibrate.measure_compute import TORCH_DTYPES
from moepass.runtime.calibrate.measure_transfers import TransferBench
from moepass.runtime.calibrate.stopwatch import Timing, TimingEffort, synchronise, time_calls, timing_of

# Copies that run while computation is timed; together they take much longer than one call.
_COPIES = 4
# [Empirical] Computation between two checks of the copies, long enough to run at full speed.
_PIECE_SECONDS = 0.002


def measure_overlap(bench: TransferBench, sizes: CalibrationSizes, device: torch.device) -> dict[str, Timing]:
    """Return slowdowns of 1 and above: `gemm` and `memory` during copies, and `copy`, the copies during GEMMs.

    Measurements alone and together alternate, so that drift of the machine affects both.
    """
    gemms = _gemms(sizes, device)
    elements = max(1, min(sizes.memory_bytes[-1], 48 << 20) // 12)
    left, right, result = (torch.ones(elements, device=device) for _ in range(3))
    gemm, copy = _measure_together(gemms, bench, sizes, device)
    memory, _ = _measure_together(lambda: torch.add(left, right, out=result), bench, sizes, device)
    return {"gemm": gemm, "memory": memory, "copy": copy}


def _gemms(sizes: CalibrationSizes, device: torch.device) -> Callable[[], object]:
    dtype = TORCH_DTYPES[sizes.dtypes[0]]
    width, rows = sizes.widths[-1], sizes.rows[-1]
    left, right = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, width), (width, width)))
    # Few rows, so that one GEMM ends soon.
    once = time_calls(lambda: left @ right, device, TimingEffort(1, 0.0, 0.0)).seconds
    few_rows = left[: max(1, min(rows, int(rows * _PIECE_SECONDS / once)))]
    return lambda: few_rows @ right


def _measure_together(
    work: Callable[[], object], bench: TransferBench, sizes: CalibrationSizes, device: torch.device
) -> tuple[Timing, Timing]:
    """Return the slowdown of `work` during copies, and of the copies during `work`."""
    nbytes = bench.largest_bytes
    works: list[float] = []
    copies: list[float] = []
    bench.wait(bench.start(nbytes))
    for _ in range(sizes.effort.samples):
        copy_alone = _copies(bench, nbytes, None, device)[0]
        work_alone = time_calls(work, device, TimingEffort(1, copy_alone)).seconds
        together, pieces = _copies(bench, nbytes, work, device)
        works.append(together / pieces / work_alone)
        copies.append(together / copy_alone)
    return _at_least_once(works), _at_least_once(copies)


def _copies(
    bench: TransferBench, nbytes: int, work: Callable[[], object] | None, device: torch.device
) -> tuple[float, int]:
    """Return the seconds that some copies take, and how many times `work` ran in that time (at least 1)."""
    started = time.perf_counter()
    copies = [bench.start(nbytes) for _ in range(_COPIES)]
    pieces = 0
    if work is None:
        bench.wait(copies[-1])
    else:
        while not bench.is_done(copies[-1]):
            work()
            synchronise_compute(device)
            pieces += 1
    return time.perf_counter() - started, max(1, pieces)


def synchronise_compute(device: torch.device) -> None:
    """Wait for the current stream alone, not for copies on other streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    else:
        synchronise(device)


def _at_least_once(ratios: list[float]) -> Timing:
    timing = timing_of(ratios)
    return Timing(max(1.0, timing.seconds), timing.spread)
