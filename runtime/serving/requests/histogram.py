"""Counts of values by their size, as Prometheus has them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


class Histogram:
    """How many of the observed values are at most each of `bounds`, which ascend; how many there are, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> tuple[int, ...]:
        """For each bound the values up to it; the last number is that of all values."""
        total, found = 0, []
        for count in self._counts:
            total += count
            found.append(total)
        return tuple(found)
