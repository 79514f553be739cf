"""What is known of the places and sizes that a graph computes with: between which numbers, and what they depend on.

FIXED     known when the graph is compiled: constants, and what is computed from them alone
CHOSEN    a function of one expert id: a finite set, and the mock runs try every id
BOUND     finite whatever the number of tokens, as rows in slots of a fixed number, and truths about such numbers
GROWS     what more tokens may make larger, and truths about that
"""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
from collections.abc import Sequence
from typing import Any

from torch.fx import Node


class Kind(enum.IntEnum):
    """Later kinds take in the earlier ones."""

    FIXED = 0
    CHOSEN = 1
    BOUND = 2
    GROWS = 3


@dataclasses.dataclass(frozen=True)
class Range:
    """From `low` to `high`. A value that GROWS has no bound above but where it is a truth, 0 or 1.

    `lane` is the node whose elements stand in the same order: of CHOSEN values with equal lanes, what is computed
    element by element is a function of one expert id again. `whole` where all values are integers. `mixed` where
    elements that grow came from several nodes: one of them may be on the other side of a threshold in every run, and
    hide that the rest never is.

    Of what grows, `shift` is the sum of the constants that were added to it, `factor` how often tokens are counted in
    it at most, `divisor` what it was divided by, and `copies` how many of its elements may be the same one.
    """

    low: float
    high: float
    kind: Kind = Kind.FIXED
    lane: Node | None = None
    whole: bool = True
    shift: float = 0.0
    factor: float = 1.0
    divisor: float = 1.0
    copies: float = 1.0
    mixed: bool = False

    @property
    def empty(self) -> bool:
        """Memory that nobody has written."""
        return self.low > self.high

    @property
    def uniform(self) -> bool:
        return self.low == self.high

    @property
    def small(self) -> bool:
        """Between -1 and 1: what every mock run is beyond."""
        return not self.empty and self.low >= -1 and self.high <= 1

    @property
    def grows(self) -> bool:
        return self.kind is Kind.GROWS and (math.isinf(self.low) or math.isinf(self.high)) and not self.empty

    def is_constant(self, *numbers: float) -> bool:
        return self.kind is Kind.FIXED and self.uniform and self.low in numbers

    def at_least(self, kind: Kind) -> Range:
        return dataclasses.replace(self, kind=max(self.kind, kind))

    def moved(self, node: Node) -> Range:
        """The same values in another order or number: that of `node`."""
        return dataclasses.replace(self, lane=node if self.kind is Kind.CHOSEN else None)

    def negated(self) -> Range:
        return dataclasses.replace(self, low=-self.high, high=-self.low, shift=-self.shift)


EMPTY = Range(math.inf, -math.inf)
COUNT = Range(0, math.inf, Kind.GROWS)
ANYTHING = Range(-math.inf, math.inf, Kind.GROWS)


def kind_of(*parts: Range) -> Kind:
    """What a value depends on that is computed from `parts`, element by element."""
    kind = max(part.kind for part in parts)
    lanes = {part.lane for part in parts if part.kind is Kind.CHOSEN}
    # Not every pair of two ids is tried.
    return Kind.BOUND if kind is Kind.CHOSEN and len(lanes) > 1 else kind


def _carried(parts: Sequence[Range]) -> dict[str, Any]:
    """What is known of how the tokens came into what is computed from `parts`."""
    return {
        "shift": max((part.shift for part in parts), key=abs),
        "factor": max(part.factor for part in parts),
        "divisor": max(part.divisor for part in parts),
        "copies": max(part.copies for part in parts),
    }


def computed(low: float, high: float, *parts: Range, whole: bool = True) -> Range:
    """The range of what is computed from `parts`, element by element."""
    lanes = [part.lane for part in parts if part.kind is Kind.CHOSEN]
    kind = kind_of(*parts)
    return Range(
        low,
        high,
        kind,
        lanes[0] if kind is Kind.CHOSEN else None,
        whole and all(part.whole for part in parts),
        mixed=any(part.mixed for part in parts),
        **_carried(parts),
    )


def joined(*parts: Range) -> Range:
    """The range of what comes from one of `parts`; the kind is that of the one with the latest."""
    written = [part for part in parts if not part.empty]
    if not written:
        return EMPTY
    return Range(
        min(part.low for part in written),
        max(part.high for part in written),
        max(part.kind for part in written),
        whole=all(part.whole for part in written),
        mixed=any(part.mixed for part in written),
        **_carried(written),
    )


def growing(given: Range) -> Range:
    """What is as large as tokens make it, and negative only where `given` may be."""
    low = 0 if given.low >= 0 else -math.inf
    return dataclasses.replace(given, low=low, high=math.inf, kind=Kind.GROWS, lane=None)


def product(left: Range, right: Range) -> Range:
    def times(a: float, b: float) -> float:
        return 0.0 if a == 0 or b == 0 else a * b

    corners = [times(a, b) for a in (left.low, left.high) for b in (right.low, right.high)]
    return computed(min(corners), max(corners), left, right)


def is_decided(kind: str, left: Range, right: Range) -> bool | None:
    """How the comparison `kind` of all values of `left` with all of `right` comes out; None where that differs."""
    corners = {getattr(operator, kind)(a, b) for a in (left.low, left.high) for b in (right.low, right.high)}
    apart = left.high < right.low or right.high < left.low
    if kind in ("eq", "ne") and not apart and not (left.uniform and right.uniform):
        return None
    return corners.pop() if len(corners) == 1 else None
