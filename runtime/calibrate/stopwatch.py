"""Timing one operation: repeatedly, with its spread, and with the device's work included."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch


@dataclasses.dataclass(frozen=True)
class Timing:
    """The median of some measurements, and how wide their middle half is, relative to it."""

    seconds: float
    spread: float


@dataclasses.dataclass(frozen=True)
class TimingEffort:
    """How much time one timing may take: `samples`, each of as many calls as fill `sample_seconds`.

    An operation whose first call takes longer than `long_seconds` gets two samples, whatever `samples` says.
    """

    samples: int = 7
    sample_seconds: float = 0.01
    long_seconds: float = 0.3


def synchronise(device: torch.device) -> None:
    """Wait until everything that was issued to `device` is done; on a CPU it is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(
    run: Callable[[], object], device: torch.device, effort: TimingEffort, calls: int | None = None
) -> Timing:
    """Seconds of one call of `run`, the work that it issues to `device` included; the first call is not counted.

    `calls` in each sample are fixed where other ranks must make as many.
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
        if calls > 1:  # the first call also pays for what is made once
            calls = max(1, math.ceil(effort.sample_seconds / _sample(run, device, min(calls, 10))))
    return timing_of([_sample(run, device, calls) for _ in range(samples)])


def timing_of(seconds: Sequence[float]) -> Timing:
    """Raises ValueError without any measurement."""
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
