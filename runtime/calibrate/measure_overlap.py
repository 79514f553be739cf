"""Slowdown of computation beside copies, and of copies beside computation."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from moepass.runtime.calibrate.experiments import Sizes
from moepass.runtime.calibrate.measure_compute import TORCH_DTYPES
from moepass.runtime.calibrate.measure_transfers import Lane
from moepass.runtime.calibrate.stopwatch import Timing, TimingEffort, synchronise, time_calls, timing_of

# Copies that are under way while something else is timed; together they take much longer than one piece of work.
_COPIES = 4
# [Empirical] Pieces of work between two looks at the copies: long enough to run at full speed.
_PIECE_SECONDS = 0.002


def measure_overlap(lane: Lane, sizes: Sizes, device: torch.device) -> dict[str, Timing]:
    """`gemm` and `memory`: how many times as long each takes beside copies; `copy`: the copies, beside GEMMs.

    These are ratios, 1 and above. Alone and together are measured in turns, so that drift of the machine meets both.
    """
    gemms = _gemms(sizes, device)
    elements = max(1, min(sizes.memory_bytes[-1], 48 << 20) // 12)
    left, right, result = (torch.ones(elements, device=device) for _ in range(3))
    gemm, copy = _beside(gemms, lane, sizes, device)
    memory, _ = _beside(lambda: torch.add(left, right, out=result), lane, sizes, device)
    return {"gemm": gemm, "memory": memory, "copy": copy}


def _gemms(sizes: Sizes, device: torch.device) -> Callable[[], object]:
    dtype = TORCH_DTYPES[sizes.dtypes[0]]
    width, rows = sizes.widths[-1], sizes.rows[-1]
    left, right = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, width), (width, width)))
    # A part of the rows, so that one GEMM ends soon.
    once = time_calls(lambda: left @ right, device, TimingEffort(1, 0.0, 0.0)).seconds
    part = left[: max(1, min(rows, int(rows * _PIECE_SECONDS / once)))]
    return lambda: part @ right


def _beside(work: Callable[[], object], lane: Lane, sizes: Sizes, device: torch.device) -> tuple[Timing, Timing]:
    """How many times as long `work` takes beside copies, and the copies beside `work`."""
    nbytes = lane.largest_bytes
    works: list[float] = []
    copies: list[float] = []
    lane.wait(lane.start(nbytes))
    for _ in range(sizes.effort.samples):
        copy_alone = _copies(lane, nbytes, None, device)[0]
        work_alone = time_calls(work, device, TimingEffort(1, copy_alone)).seconds
        together, pieces = _copies(lane, nbytes, work, device)
        works.append(together / pieces / work_alone)
        copies.append(together / copy_alone)
    return _at_least_once(works), _at_least_once(copies)


def _copies(lane: Lane, nbytes: int, work: Callable[[], object] | None, device: torch.device) -> tuple[float, int]:
    """Seconds until some copies are done, and how many pieces of work were done meanwhile, if there is any."""
    started = time.perf_counter()
    copies = [lane.start(nbytes) for _ in range(_COPIES)]
    pieces = 0
    if work is None:
        lane.wait(copies[-1])
    else:
        while not lane.is_done(copies[-1]):
            work()
            synchronise_compute(device)
            pieces += 1
    return time.perf_counter() - started, max(1, pieces)


def synchronise_compute(device: torch.device) -> None:
    """Wait for the current stream alone, not for copies on others."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    else:
        synchronise(device)


def _at_least_once(ratios: list[float]) -> Timing:
    timing = timing_of(ratios)
    return Timing(max(1.0, timing.seconds), timing.spread)
