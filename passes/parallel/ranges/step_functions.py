"""Functions of one whole number, 0 or more, as models round counts and sizes up: sums, products, quotients, bounds.

Each of them goes on as it began: from some number on, `f(x + period) = f(x) + slope`. So what holds for the numbers of
one period, and for those before, holds for all.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

# Numbers that are looked at for one function. [Empirical] Rows are padded to a multiple of 512 at most.
_MOST_VALUES = 2**13


@dataclasses.dataclass(frozen=True, eq=False)
class StepFunction:
    """`values` [start + period] are those of 0, 1, ..; behind them, and from `start` on, each is `slope` more than the
    one that is `period` before it.
    """

    values: NDArray[np.int64]
    start: int
    period: int
    slope: int

    @classmethod
    def identity(cls) -> StepFunction:
        return cls(np.zeros(1, dtype=np.int64), 0, 1, 1)

    @classmethod
    def constant(cls, number: int) -> StepFunction:
        return cls(np.full(1, number, dtype=np.int64), 0, 1, 0)

    def at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The values of `numbers`."""
        periods = np.maximum(numbers - self.start, 0) // self.period
        found: NDArray[np.int64] = self.values[numbers - periods * self.period] + periods * self.slope
        return found

    def plus(self, other: StepFunction, factor: int = 1) -> StepFunction | None:
        """`self + factor * other`; None for more numbers than are looked at, as everywhere here."""
        period, start = math.lcm(self.period, other.period), max(self.start, other.start)
        slope = self.slope * (period // self.period) + factor * other.slope * (period // other.period)
        every = _numbers(start + period)
        return None if every is None else StepFunction(self.at(every) + factor * other.at(every), start, period, slope)

    def times(self, number: int) -> StepFunction:
        return StepFunction(self.values * number, self.start, self.period, self.slope * number)

    def divided(self, number: int) -> StepFunction | None:
        """Rounded down, by a `number` above 0."""
        period = self.period * (number // math.gcd(number, self.slope))
        every = _numbers(self.start + period)
        if number <= 0 or every is None:
            return None
        return StepFunction(
            self.at(every) // number, self.start, period, self.slope * (period // self.period) // number
        )

    def at_least(self, number: int) -> StepFunction | None:
        """No less than `number`; None where it does not rise."""
        if self.slope <= 0:
            return None
        lowest = int(self.values[self.start :].min())
        start = self.start + self.period * max(0, -((lowest - number) // self.slope))
        every = _numbers(start + self.period)
        if every is None:
            return None
        return StepFunction(np.maximum(self.at(every), number), start, self.period, self.slope)

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The least and the largest of all values; None where there is none."""
        return None if self.slope else (int(self.values.min()), int(self.values.max()))

    @property
    def is_nonnegative(self) -> bool:
        return self.slope >= 0 and int(self.values.min()) >= 0

    @property
    def key(self) -> bytes:
        """The same for equal functions, and for no others."""
        # Two that are equal on the starts and periods of both together are equal.
        return self.at(np.arange(2 * _MOST_VALUES, dtype=np.int64)).tobytes()


def _numbers(count: int) -> NDArray[np.int64] | None:
    return np.arange(count, dtype=np.int64) if count <= _MOST_VALUES else None
