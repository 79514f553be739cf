"""Tables of seconds by size or shape, with interpolation and extrapolation.

Times grow like powers of sizes over wide ranges, so interpolation is linear in log-log, which is exact for every power
law. Beyond the largest point of an axis, seconds grow in proportion to the size. Below the smallest point, they fall
with the smallest slope found between the first two points of this axis, and at most in proportion.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from moepass.models.errors import InputError
from moepass.models.limits import MOST_SECONDS, check_limit

Array = npt.NDArray[np.float64]

# The source of a number:
#   measured     read from this machine, such as the size of its memory
#   calibrated   timed on this machine by `moepass calibrate`
#   datasheet    stated by the vendor
#   empirical    measured on another machine, and assumed here
#   emulated     set for an experiment, such as the speed of an emulated link
#   user         from a user's own file
#   derived      computed from other numbers
Source = Literal["measured", "calibrated", "datasheet", "empirical", "emulated", "user", "derived"]


@dataclasses.dataclass(frozen=True)
class Axis:
    """One size by which a table is indexed; `points` are positive and increase."""

    name: str
    points: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class SecondsTable:
    """Seconds for every combination of points of the axes; the last axis varies fastest.

    Raises InputError if the numbers do not form a table.

    Attributes:
        spreads: width of the middle half of each measurement, relative to its median; empty if unknown
    """

    axes: tuple[Axis, ...]
    seconds: tuple[float, ...]
    source: Source
    note: str = ""
    spreads: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.axes:
            raise InputError("a table of seconds has no axes; it must have one or more")
        for axis in self.axes:
            grows = all(before < after for before, after in itertools.pairwise(axis.points))
            if not axis.points or not grows or not all(_is_positive(point) for point in axis.points):
                raise InputError(
                    f"axis {axis.name!r} of a table has the points {list(axis.points)}; they must be above 0 and "
                    "increase"
                )
        expected = math.prod(len(axis.points) for axis in self.axes)
        shape = " x ".join(f"{len(axis.points)} {axis.name}" for axis in self.axes)
        if len(self.seconds) != expected:
            raise InputError(f"a table of {shape} has {len(self.seconds)} times in seconds; it must have {expected}")
        for value in self.seconds:
            if not _is_positive(value):
                raise InputError(f"a table of {shape} has a time of {value!r} seconds; every time must be above 0")
            check_limit(f"the longest time in a table of {shape}", value, MOST_SECONDS, "measure smaller sizes")
        if self.spreads and len(self.spreads) != expected:
            raise InputError(f"a table of {shape} has {len(self.spreads)} spreads; it must have {expected}, or none")

    def at(self, **sizes: float) -> float:
        """Return the seconds at one positive size for each axis.

        Raises TypeError unless `sizes` names exactly the axes.
        """
        names = [axis.name for axis in self.axes]
        if sorted(sizes) != sorted(names):
            raise TypeError(f"sizes are given for {sorted(sizes)}; the axes of the table are {names}")
        values = self._log_seconds
        beyond = 0.0
        for axis, slope, logs in zip(self.axes, self._slopes_below, self._log_points, strict=True):
            position = math.log(sizes[axis.name])
            inside = min(max(position, logs[0]), logs[-1])
            beyond += (position - inside) * (slope if position < inside else 1.0)
            upper = bisect.bisect_right(logs, inside, hi=len(logs) - 1)
            lower = max(0, upper - 1)
            weight = (inside - logs[lower]) / (logs[upper] - logs[lower]) if lower < upper else 0.0
            values = values[lower] * (1.0 - weight) + values[upper] * weight
        return math.exp(float(values) + beyond)

    def points(self) -> Iterator[tuple[dict[str, float], float]]:
        """Yield each point: its size on every axis, and its seconds."""
        sizes = itertools.product(*[axis.points for axis in self.axes])
        for point, seconds in zip(sizes, self.seconds, strict=True):
            yield {axis.name: size for axis, size in zip(self.axes, point, strict=True)}, seconds

    @functools.cached_property
    def _log_points(self) -> list[list[float]]:
        return [[math.log(point) for point in axis.points] for axis in self.axes]

    @functools.cached_property
    def _log_seconds(self) -> Array:
        return np.log(self.seconds).reshape([len(axis.points) for axis in self.axes])

    @functools.cached_property
    def _slopes_below(self) -> list[float]:
        """Exponent of the power law below the first point of each axis."""
        return [
            float(
                np.clip(np.diff(self._log_seconds.take([0, 1], axis), axis=axis).min() / (logs[1] - logs[0]), 0.0, 1.0)
            )
            if len(logs) > 1
            else 1.0
            for axis, logs in enumerate(self._log_points)
        ]


def without_dips(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Smooth measured `seconds` so that no larger size takes less time.

    Neighbours in the wrong order are noise. They are replaced by their mean (of logarithms), axis by axis, until all
    are in order.

    Args:
        lengths: The number of points of each axis.
        seconds: One value for each combination of points; the last axis varies fastest.
    """
    logs: Array = np.log(seconds).reshape(lengths)
    for _ in range(_SWEEPS):
        before = logs
        for axis in range(len(lengths)):
            logs = np.apply_along_axis(_isotonic, axis, logs)
        if np.array_equal(logs, before):
            break
    # Rounding, or stopping after the last sweep, can leave small dips.
    for axis in range(len(lengths)):
        logs = np.maximum.accumulate(logs, axis)
    return tuple(np.exp(logs).ravel().tolist())


# Enough sweeps for measurement noise; each one reduces the dips.
_SWEEPS = 50


def table_of(
    axes: Mapping[str, Sequence[float]],
    seconds: Sequence[float],
    source: Source,
    note: str = "",
    spreads: Sequence[float] = (),
) -> SecondsTable:
    """Build a table without dips from measurements, in the order of `itertools.product(*axes.values())`."""
    lengths = [len(points) for points in axes.values()]
    return SecondsTable(
        tuple(Axis(name, tuple(float(point) for point in points)) for name, points in axes.items()),
        without_dips(lengths, seconds),
        source,
        note,
        tuple(spreads),
    )


def _isotonic(values: Array) -> list[float]:
    """Return the nearest non-decreasing sequence (least squares), by pooling neighbours that are in the wrong order."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            previous, count = pools.pop()
            mean, size = (mean * size + previous * count) / (size + count), size + count
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
