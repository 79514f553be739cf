"""Times one operation: repeatedly, with the spread, and including the work that it issues to the device."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median and spread of repeated measurements.

    Attributes:
        seconds: The median.
        spread: The width of the middle half of the measurements, relative to the median.
    """

    seconds: float
    spread: float


@dataclasses.dataclass(frozen=True)
class TimingEffort:
    """The time that one timing may take.

    Attributes:
        samples: The number of samples.
        sample_seconds: The length of one sample; it repeats the call until then.
        long_seconds: An operation whose first call takes longer gets at most two samples.
    """

    samples: int = 7
    sample_seconds: float = 0.01
    long_seconds: float = 0.3


def synchronise(device: torch.device) -> None:
    """Wait until all work issued to `device` is done; on a CPU it is done already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(
    run: Callable[[], object], device: torch.device, effort: TimingEffort, calls: int | None = None
) -> Timing:
    """Return the seconds of one call of `run`, including the work that it issues to `device`, after a first call.

    `calls` sets the number of calls in each sample, for operations that other ranks must run as often.
    """
    synchronise(device)
    started = time.perf_counter()
    run()
    synchronise(device)
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
    """Return the timing of some measurements in seconds. Raises ValueError for an empty sequence."""
    if not seconds:
        raise ValueError("a timing needs one measurement or more")
    middle = statistics.median(seconds)
    if len(seconds) < 2:
        return Timing(middle, 0.0)
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(middle, (upper - lower) / middle)


def _sample(run: Callable[[], object], device: torch.device, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        run()
    synchronise(device)
    return (time.perf_counter() - started) / calls
