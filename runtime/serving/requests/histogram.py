"""A histogram with cumulative buckets, as in Prometheus."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


class Histogram:
    """Counts of observed values up to each of the ascending `bounds`, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Add `value`."""
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> tuple[int, ...]:
        """The number of values up to each bound; the last entry counts all values."""
        total, totals = 0, []
        for count in self._counts:
            total += count
            totals.append(total)
        return tuple(totals)
