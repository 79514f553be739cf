"""Tables of seconds by size or shape, and what lies between and beyond their points.

Times grow like powers of sizes over wide ranges, so everything here is done on logarithms: between the points of a
table a straight line in log-log is exact for every power law. Beyond the largest point of an axis the rate stays what
it is there: seconds grow in proportion. Below the smallest one they fall as they do between the first two points, at
the least steep place of the table, and not faster than in proportion.
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

# Where a number comes from:
#   measured     read off this machine, such as the size of its memory
#   calibrated   timed on the machine that it describes, by `moepass calibrate`
#   datasheet    what the vendor states
#   empirical    reached on some machine, and assumed here
#   emulated     made so for a measurement, such as the speed of an emulated link
#   user         from a user's own file
#   derived      computed from others
Source = Literal["measured", "calibrated", "datasheet", "empirical", "emulated", "user", "derived"]


@dataclasses.dataclass(frozen=True)
class Axis:
    """One size that a table goes by: `points` are above 0 and increase."""

    name: str
    points: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class SecondsTable:
    """Seconds for every combination of points of the axes, the last axis fastest.

    `spreads` has for each of `seconds` how wide the middle half of its measurements was, relative to their median; it
    is empty where that is not known. Raises InputError where the numbers make no table.
    """

    axes: tuple[Axis, ...]
    seconds: tuple[float, ...]
    source: Source
    note: str = ""
    spreads: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.axes:
            raise InputError("a table of seconds has no axes; it needs one or more")
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
            raise InputError(f"a table of {shape} has {len(self.seconds)} seconds; it must have {expected}")
        for value in self.seconds:
            if not _is_positive(value):
                raise InputError(f"a table of {shape} has {value!r} seconds; every one must be a number above 0")
            check_limit(f"the largest of a table of {shape} seconds", value, MOST_SECONDS, "measure smaller sizes")
        if self.spreads and len(self.spreads) != expected:
            raise InputError(f"a table of {shape} has {len(self.spreads)} spreads; it must have {expected}, or none")

    def at(self, **sizes: float) -> float:
        """Seconds at one size for each axis, all above 0. Raises TypeError where these are not the axes' names."""
        names = [axis.name for axis in self.axes]
        if sorted(sizes) != sorted(names):
            raise TypeError(f"sizes are given for {sorted(sizes)}; the table goes by {names}")
        values = self._log_seconds
        beyond = 0.0
        for axis, slope, logs in zip(self.axes, self._slopes_below, self._log_points, strict=True):
            position = math.log(sizes[axis.name])
            inside = min(max(position, logs[0]), logs[-1])
            beyond += (position - inside) * (slope if position < inside else 1.0)
            upper = bisect.bisect_right(logs, inside, hi=len(logs) - 1)
            lower = max(0, upper - 1)
            part = (inside - logs[lower]) / (logs[upper] - logs[lower]) if lower < upper else 0.0
            values = values[lower] * (1.0 - part) + values[upper] * part
        return math.exp(float(values) + beyond)

    def points(self) -> Iterator[tuple[dict[str, float], float]]:
        """The size for each axis, and the seconds, of every point."""
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
        """For each axis, by which power of a size below its first point seconds fall."""
        return [
            float(
                np.clip(np.diff(self._log_seconds.take([0, 1], axis), axis=axis).min() / (logs[1] - logs[0]), 0.0, 1.0)
            )
            if len(logs) > 1
            else 1.0
            for axis, logs in enumerate(self._log_points)
        ]


def without_dips(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """The table of measured `seconds`, smoothed so that no larger size takes less time.

    `lengths` are the numbers of points of its axes. Neighbours in the wrong order are noise and become their mean (of
    logarithms), axis by axis, until none is left.
    """
    logs: Array = np.log(seconds).reshape(lengths)
    for _ in range(_SWEEPS):
        before = logs
        for axis in range(len(lengths)):
            logs = np.apply_along_axis(_isotonic, axis, logs)
        if np.array_equal(logs, before):
            break
    # The remainder after rounding, or after the last sweep.
    for axis in range(len(lengths)):
        logs = np.maximum.accumulate(logs, axis)
    return tuple(np.exp(logs).ravel().tolist())


# Enough for noise: each sweep leaves a table less wrong than before.
_SWEEPS = 50


def table_of(
    axes: Mapping[str, Sequence[float]],
    seconds: Sequence[float],
    source: Source,
    note: str = "",
    spreads: Sequence[float] = (),
) -> SecondsTable:
    """A table from measurements, in the order of `itertools.product(*axes.values())`, without dips."""
    lengths = [len(points) for points in axes.values()]
    return SecondsTable(
        tuple(Axis(name, tuple(float(point) for point in points)) for name, points in axes.items()),
        without_dips(lengths, seconds),
        source,
        note,
        tuple(spreads),
    )


def _isotonic(values: Array) -> list[float]:
    """The nearest sequence (least squares) that does not fall: pools of neighbours that are in the wrong order."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            other, count = pools.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
