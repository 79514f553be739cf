"""Ranges of the indices and sizes that a graph computes: their bounds and dependences."""

from __future__ import annotations

import dataclasses
import enum
import math
import operator

from torch.fx import Node


class Kind(enum.IntEnum):
    """Dependence of a value. A later kind includes the earlier ones. A mask has the kind of the numbers it compares."""

    FIXED = 0  # known at compile time
    BY_EXPERT = 1  # a function of one expert id, so mock runs try all values
    BOUND = 2  # bounded for any number of tokens, such as row indices in slots of a fixed number
    GROWS = 3  # unbounded as the number of tokens grows


@dataclasses.dataclass(frozen=True)
class Range:
    """A range from `low` to `high`. A value that GROWS has no upper bound, unless it is a mask of 0 and 1."""

    low: float
    high: float
    kind: Kind = Kind.FIXED
    lane: Node | None = None  # the order of elements; a function of BY_EXPERT values of equal lanes is BY_EXPERT
    integral: bool = True
    # Of growing values:
    shift: float = 0.0  # the sum of the constants that were added
    factor: float = 1.0  # how often they count the tokens at most
    divisor: float = 1.0  # the number by which they were divided
    copies: float = 1.0  # the largest number of elements that may be copies of one
    mixed: bool = False  # they come from several nodes: one may pass a threshold in every run, and others never

    @property
    def empty(self) -> bool:
        """Uninitialised memory."""
        return self.low > self.high

    @property
    def uniform(self) -> bool:
        """True for a single value."""
        return self.low == self.high

    @property
    def small(self) -> bool:
        """Within -1 and 1, which the numbers of tokens in all mock runs exceed."""
        return not self.empty and self.low >= -1 and self.high <= 1

    @property
    def grows(self) -> bool:
        """True for values without a bound, which masks of growing values have."""
        return self.kind is Kind.GROWS and (math.isinf(self.low) or math.isinf(self.high)) and not self.empty

    def is_constant(self, *numbers: float) -> bool:
        """Return whether the only value is one of `numbers`, and known at compile time."""
        return self.kind is Kind.FIXED and self.uniform and self.low in numbers

    def at_least(self, kind: Kind) -> Range:
        """Return this range with the later of its kind and `kind`."""
        return dataclasses.replace(self, kind=max(self.kind, kind))

    def moved(self, node: Node) -> Range:
        """Return the range of the same values in the order of `node`."""
        return dataclasses.replace(self, lane=node if self.kind is Kind.BY_EXPERT else None)

    def negated(self) -> Range:
        """Return the range of the negated values."""
        return dataclasses.replace(self, low=-self.high, high=-self.low, shift=-self.shift)


EMPTY = Range(math.inf, -math.inf)
COUNT = Range(0, math.inf, Kind.GROWS)
ANYTHING = Range(-math.inf, math.inf, Kind.GROWS)


def computed(low: float, high: float, *operands: Range) -> Range:
    """Return the range of an elementwise function of `operands` with values from `low` to `high`."""
    kind = max(operand.kind for operand in operands)
    lanes = {operand.lane for operand in operands if operand.kind is Kind.BY_EXPERT}
    if kind is Kind.BY_EXPERT and len(lanes) > 1:
        kind = Kind.BOUND  # mock runs do not try every pair of two ids
    return Range(
        low,
        high,
        kind,
        lanes.pop() if kind is Kind.BY_EXPERT else None,
        all(operand.integral for operand in operands),
        shift=max((operand.shift for operand in operands), key=abs),
        factor=max(operand.factor for operand in operands),
        divisor=max(operand.divisor for operand in operands),
        copies=max(operand.copies for operand in operands),
        mixed=any(operand.mixed for operand in operands),
    )


def joined(*operands: Range) -> Range:
    """Return the range of a value that comes from one of `operands`, with the latest of their kinds."""
    written = [operand for operand in operands if not operand.empty]
    if not written:
        return EMPTY
    union = computed(min(operand.low for operand in written), max(operand.high for operand in written), *written)
    return dataclasses.replace(union, kind=max(operand.kind for operand in written), lane=None)


def growing(values: Range) -> Range:
    """Return `values` without an upper bound; without a lower bound too if they may be negative."""
    low = 0 if values.low >= 0 else -math.inf
    return dataclasses.replace(values, low=low, high=math.inf, kind=Kind.GROWS, lane=None)


def product(left: Range, right: Range) -> Range:
    """Return the range of `left * right`."""

    def times(a: float, b: float) -> float:
        return 0.0 if a == 0 or b == 0 else a * b

    corners = [times(a, b) for a in (left.low, left.high) for b in (right.low, right.high)]
    return computed(min(corners), max(corners), left, right)


def decide(kind: str, left: Range, right: Range) -> bool | None:
    """Return the result of the comparison `kind` if it is equal for all values of `left` and `right`; else None."""
    corners = {getattr(operator, kind)(a, b) for a in (left.low, left.high) for b in (right.low, right.high)}
    apart = left.high < right.low or right.high < left.low
    if kind in ("eq", "ne") and not apart and not (left.uniform and right.uniform):
        return None
    return corners.pop() if len(corners) == 1 else None
