"""Compare the measurements of all parts with their targets: met, missed, or not measured, with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.on_gpu.kernel_runs import LAYER, KernelResult
from benchmarks.on_gpu.memory_runs import LongestSequence
from benchmarks.on_gpu.streaming_runs import ACCELERATE, RESIDENT, STREAMED, StreamingResult
from benchmarks.on_gpu.tables import ResultTable

KERNEL_TOKENS = 32768
MET, MISSED, NOT_MEASURED = "met", "MISSED", "not measured"


@dataclasses.dataclass(frozen=True)
class Point:
    """One target. `found` is None if it was not measured, because of `note`."""

    what: str
    wanted: str
    found: str | None
    is_met: bool
    note: str = ""

    @property
    def verdict(self) -> str:
        """Return whether the target was met, missed, or not measured."""
        return NOT_MEASURED if self.found is None else MET if self.is_met else MISSED


def _missing(what: str, wanted: str, reason: str) -> Point:
    return Point(what, wanted, None, False, reason)


def _at_least(what: str, wanted: float, values: Mapping[str, float], reason: str) -> Point:
    """Return the point that all of `values` are at least `wanted`; it shows the smallest value."""
    if not values:
        return _missing(what, f"at least {wanted:g}", reason)
    name = min(values, key=values.__getitem__)
    return Point(what, f"at least {wanted:g}", f"{values[name]:.3f} ({name})", values[name] >= wanted)


def _at_most(what: str, wanted: float, values: Mapping[str, float], reason: str) -> Point:
    """Return the point that all of `values` are at most `wanted`; it shows the largest value."""
    if not values:
        return _missing(what, f"at most {wanted:g}", reason)
    name = max(values, key=values.__getitem__)
    return Point(what, f"at most {wanted:g}", f"{values[name]:.3f} ({name})", values[name] <= wanted)


def kernel_points(results: Sequence[KernelResult] | None) -> list[Point]:
    """Return the points about all models' expert layers at `KERNEL_TOKENS`, with even and skewed routing."""
    chosen = [result for result in results or () if result.what == LAYER and result.tokens == KERNEL_TOKENS]
    reason = "the part was not run" if results is None else f"no expert layer at {KERNEL_TOKENS} tokens was measured"
    dense, grouped = (
        {
            f"{measured.model}, {measured.routing}": value
            for measured in chosen
            if (value := getattr(measured, name)) is not None
        }
        for name in ("share_of_dense", "against_grouped_mm")
    )
    return [
        _at_least(f"expert layer, rate as a part of dense GEMMs', {KERNEL_TOKENS} tokens", 0.80, dense, reason),
        _at_least(f"expert layer, times F.grouped_mm with permutes, {KERNEL_TOKENS} tokens", 1.15, grouped, reason),
    ]


def streaming_points(result: StreamingResult | None) -> list[Point]:
    """Return the points at and above the predicted threshold, or at the first measured number of tokens there."""
    reason = "the part was not run" if result is None else "no number of tokens above the predicted threshold"
    result = result or StreamingResult()
    if result.predicted is None:
        reason = "the part was not run" if not result.points else "no profile to predict a threshold from"
    predicted = float("inf") if result.predicted is None else result.predicted

    def above(values: Mapping[int, float]) -> dict[str, float]:
        return {f"{tokens} tokens": value for tokens, value in sorted(values.items()) if tokens >= predicted}

    def first(values: Mapping[int, float]) -> dict[str, float]:
        return dict(list(above(values).items())[:1])

    streamed = [point for point in result.points if point.variant == STREAMED]
    memory: dict[int, float] = {}
    for one in streamed:
        resident = result.point(one.tokens, RESIDENT)
        if one.bytes is not None and resident is not None and resident.bytes:
            memory[one.tokens] = one.bytes / resident.bytes
    mfu = {point.tokens: point.mfu for point in streamed if point.mfu is not None}
    rates, offload = result.rate_ratios(STREAMED, RESIDENT), result.rate_ratios(STREAMED, ACCELERATE)
    return [
        _at_least("streamed, rate as a part of resident's", 0.95, above(rates), reason),
        _at_most("streamed, device memory as a part of resident's", 0.2, first(memory), reason),
        _threshold(result),
        _at_least("streamed, MFU", 0.45, first(mfu), reason),
        _at_least("streamed, times accelerate's offload", 5, first(offload), reason),
    ]


def _threshold(result: StreamingResult) -> Point:
    what, wanted = "predicted threshold against the observed one", "within 20 %"
    if result.predicted is None or result.observed is None:
        reason = "nothing to predict it from" if result.points and result.predicted is None else "it was not observed"
        return _missing(what, wanted, reason if result.points else "the part was not run")
    off = result.predicted / result.observed - 1
    return Point(what, wanted, f"{off:+.0%}: {result.predicted:.0f} and {result.observed:.0f} tokens", abs(off) <= 0.2)


def memory_points(results: Sequence[LongestSequence] | None) -> list[Point]:
    """Return the points about sequence length in the same memory, without keys and values."""
    what, wanted = "hybrid prefill, times longer sequences", "reported"
    if results is None:
        return [_missing(what, wanted, "the part was not run")]
    plain, hybrid = (
        next((run for run in results if (run.chunk_tokens is not None) == chunked and not run.keeps_kv), None)
        for chunked in (False, True)
    )
    if plain is None or hybrid is None or hybrid.reason or plain.reason:
        return [_missing(what, wanted, (hybrid and hybrid.reason) or (plain and plain.reason) or "no result")]
    if not plain.tokens or plain.beyond is None or hybrid.beyond is None:
        return [_missing(what, wanted, "the search did not reach the limit of the memory")]
    return [Point(what, wanted, f"{hybrid.tokens / plain.tokens:.2f}", True)]


def summarise(
    kernels: Sequence[KernelResult] | None,
    streaming: StreamingResult | None,
    memory: Sequence[LongestSequence] | None,
    conditions: Mapping[str, str],
    folder: Path | None,
) -> list[Point]:
    """Print all points as one table. Points of a part that was not run (None) say so."""
    table = ResultTable(
        "summary", "Targets and measurements", ["what", "wanted", "found", "verdict"], conditions, folder
    )
    points = [*kernel_points(kernels), *streaming_points(streaming), *memory_points(memory)]
    for point in points:
        table.add(point.what, point.wanted, point.found or f"- ({point.note})", point.verdict)
    table.finish(
        "Of several values the worst counts. Streamed: at the numbers of tokens at or above the predicted threshold; "
        "memory, MFU and accelerate at the first of these."
    )
    return points
