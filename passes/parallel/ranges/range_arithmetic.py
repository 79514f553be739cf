"""The ranges of what is computed element by element: comparisons, truths, sums of two, products, bounds and quotients.

What grows with the tokens meets nothing here but what grows too, -1, 0 and 1, and the structural numbers of the block.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import constant_of, fake_value
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.parallel.match.parallel_block import ParallelBlock
from moepass.passes.parallel.ranges.growing_sizes import CHANGE, structural_numbers, token_numbers
from moepass.passes.parallel.ranges.tried_values import TriedValues
from moepass.passes.parallel.ranges.value_range import (
    ANYTHING,
    COUNT,
    EMPTY,
    Kind,
    Range,
    computed,
    is_decided,
    joined,
    product,
)

# Every mock run has more tokens than this.
MOST_SHIFT = 2
# A place is a few offsets and a place among those of one expert. Whatever was tried, loads of other ratios may come.
_LEAST_FACTOR = 6


class RangeArithmetic:
    """The ranges that are known of a block's nodes, and of what operations make of them. Raises NotThisForm."""

    def __init__(self, block: ParallelBlock) -> None:
        self.block = block
        self.ranges: dict[Node, Range] = {}
        self.tried = TriedValues()
        self.structural = structural_numbers(block)
        self.tokens = token_numbers(block)
        self.most_factor = max(_LEAST_FACTOR, 2 * max(self.structural))

    def range_of(self, argument: Any) -> Range:
        """The range of an operand: a node, or a number."""
        if isinstance(argument, (bool, int, float)):
            return Range(argument, argument, whole=float(argument).is_integer())
        if isinstance(argument, (list, tuple)):
            return joined(*(self.range_of(part) for part in argument))
        if not isinstance(argument, Node):
            return EMPTY
        if argument not in self.ranges:
            self.ranges[argument] = self._leaf(argument)
        return self.ranges[argument]

    @staticmethod
    def _leaf(node: Node) -> Range:
        if node.op == "get_attr":
            value = constant_of(node)
            if type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel():
                whole = not value.is_floating_point() or bool((value == value.floor()).all())
                return Range(float(value.min()), float(value.max()), whole=whole)
            return ANYTHING
        return size_range(fake_value(node))

    def compared(self, node: Node, kind: str) -> Range:
        left, right = self.operands(node)
        self._check_meeting(node, left, right)
        if left.mixed or right.mixed:
            raise NotThisForm(f"{node.name} ({node.target}) compares several sizes at once; compare one by one")
        outcome = is_decided(kind, left, right)
        if outcome is not None:
            return Range(int(outcome), int(outcome))
        found = computed(0, 1, left, right)
        if found.kind > Kind.CHOSEN:
            for place, part in enumerate((left, right)):
                if part.kind is Kind.FIXED and not part.uniform:
                    undecided = _Undecided(kind, place, right if place == 0 else left)
                    self.tried.require_both(node, node.args[place], undecided)  # type: ignore[arg-type]
        return found

    def truth(self, node: Node) -> Range:
        if fake_value(node).dtype is not torch.bool:
            raise NotThisForm(f"{node.name} ({node.target}) computes with bits of places or sizes; {CHANGE}")
        parts = [self.range_of(used) for used in node.all_input_nodes]
        if any(part.grows for part in parts):
            raise NotThisForm(f"{node.name} ({node.target}) takes places or sizes for truths; compare them with 0")
        name = base_operation(node)
        if name in ("any", "all"):
            return Range(0, 1).at_least(max(parts[0].kind, Kind.BOUND)) if not parts[0].uniform else parts[0]
        if name.endswith("not"):
            return computed(1 - parts[0].high, 1 - parts[0].low, *parts)
        lows, highs = [part.low for part in parts], [part.high for part in parts]
        if name.endswith("and"):
            return computed(min(lows), min(highs), *parts)
        if name.endswith("xor"):
            return computed(0, 1, *parts)
        return computed(max(lows), max(highs), *parts)

    def added(self, node: Node, base: str) -> Range:
        left, right = self.operands(node)
        factor: Any = node.kwargs.get("alpha", 1)
        if factor not in (1, -1):
            self.refuse_constant(node, "adds a multiple of", factor)
        if node.args[0] is node.args[1] and (factor == 1) == (base == "sub"):
            return Range(0, 0)
        self._check_meeting(node, left, right)
        right = right if (factor == 1) == (base == "add") else right.negated()
        found = computed(left.low + right.low, left.high + right.high, left, right)
        if not found.grows:
            return found
        added = [part.low for part in (left, right) if not part.grows and part.uniform]
        constants = [constant for constant in added if abs(constant) not in self.tokens]
        factors = [part.factor for part in (left, right) if part.grows]
        # How often each size is in a symbol is known of the symbol (growing_sizes.py).
        times = sum(factors) if isinstance(fake_value(node), torch.Tensor) else max(factors)
        shift = left.shift + right.shift + sum(constants)
        # Several numbers may be what they are in every run, and be added again and again.
        others = [part for part in (left, right) if not part.grows and not part.uniform]
        most = sum(max(abs(part.low), abs(part.high)) for part in others)
        return self.counted(node, found, shift + math.copysign(most, shift), times)

    def counted(self, node: Node, found: Range, shift: float, factor: float) -> Range:
        """`found`, in which `shift` was added up and tokens are counted `factor` times. Raises NotThisForm."""
        if abs(shift) > MOST_SHIFT:
            self.refuse_constant(node, "adds up to", shift)
        if factor > self.most_factor:
            self.refuse_constant(node, "counts the tokens as often as", factor)
        return dataclasses.replace(found, shift=shift, factor=factor)

    def multiplied(self, node: Node, base: str) -> Range:
        if base == "neg":
            return self.range_of(node.args[0]).negated()
        left, right = self.operands(node)
        for one, other in ((left, right), (right, left)):
            if one.grows and not (other.small or other.is_constant(*self.structural)):
                if other.kind is Kind.FIXED and other.uniform:
                    self.refuse_constant(node, "multiplies what grows with", other.low)
                raise NotThisForm(
                    f"{node.name} ({node.target}) multiplies what grows with what is no constant; {CHANGE}"
                )
        found = product(left, right)
        times = math.prod(abs(part.low) for part in (left, right) if part.uniform)
        if not found.grows or not times:
            return found
        return self.counted(node, found, found.shift * times, found.factor * times)

    def bounded(self, node: Node, arguments: dict[str, Any]) -> Range:
        value, lower, upper = self.bounds_of(node, arguments)
        found = self.range_of(value)
        bounds = [self.range_of(bound) for bound in (lower, upper) if bound is not None]
        low = found.low if lower is None else max(found.low, self.range_of(lower).low)
        high = found.high if upper is None else min(found.high, self.range_of(upper).high)
        result = computed(min(low, high), max(low, high), found, *bounds)
        if result.kind > Kind.CHOSEN:
            idle = not found.grows and (result.low, result.high) == (found.low, found.high)
            for bound in bounds:
                if bound.kind is not Kind.FIXED or not (bound.small or (idle and bound.uniform)):
                    self.refuse_constant(node, "bounds a place or a size by", bound.high)
        return result

    def bounds_of(self, node: Node, arguments: dict[str, Any]) -> tuple[Any, Any, Any]:
        """What `node` bounds, from below and from above; None where it does not."""
        if base_operation(node).startswith("clamp"):
            return node.args[0], arguments.get("min"), arguments.get("max")
        # Bound a value that is unknown at compile time by a known one.
        value, other = sorted(node.args[:2], key=lambda argument: -self.range_of(argument).kind)
        return (value, other, None) if "max" in base_operation(node) else (value, None, other)

    def divided(self, node: Node) -> Range:
        left, right = self.operands(node)
        if not right.uniform or right.kind is not Kind.FIXED or right.low <= 0 or not right.whole:
            raise NotThisForm(
                f"{node.name} ({node.target}) divides places or sizes by what is no whole constant above 0; {CHANGE}"
            )
        divisor, remains = right.low, has_trait(node, Trait.REMAINDER)
        # What is divided again and again is 0 until there are very many.
        if left.kind > Kind.CHOSEN and divisor != 1 and (left.divisor != 1 or divisor not in self._divisors(left)):
            self.refuse_constant(node, "divides a place or a size by", divisor)
        if remains:
            inside = left.low >= 0 and left.high < divisor
            found = computed(0, divisor - 1, left)
            return left if inside else dataclasses.replace(found, kind=min(found.kind, Kind.BOUND))
        rounds_down = (
            has_trait(node, Trait.FLOOR_DIVIDE) or node.kwargs.get("rounding_mode") == "floor" or left.low >= 0
        )
        ends = [end / divisor for end in (left.low, left.high)]
        low, high = (end if math.isinf(end) else (math.floor(end) if rounds_down else math.trunc(end)) for end in ends)
        return dataclasses.replace(computed(low, high, left), divisor=max(left.divisor, divisor))

    def _divisors(self, value: Range) -> set[int]:
        """What a place may be divided by: the number of experts that each token has."""
        chosen = [int(fake_value(node).shape[-1]) for role, node in self.block.sources.items() if role == "ids"]
        return {1, *chosen} if value.grows else {1}

    # --------------------------------------------------------------------------------------------------- checks

    def operands(self, node: Node) -> tuple[Range, Range]:
        left, right = (self.range_of(argument) for argument in node.args[:2])
        if left.empty or right.empty:
            raise NotThisForm(f"{node.name} ({node.target}) computes with memory that nobody has written")
        return left, right

    def _check_meeting(self, node: Node, left: Range, right: Range) -> None:
        if left.grows:
            self.check_constant(node, right)
        if right.grows:
            self.check_constant(node, left)

    def check_constant(self, node: Node, part: Range) -> None:
        """What meets something that grows must grow as well, or be small."""
        if part.grows or part.small or part.empty or part.is_constant(*self.tokens):
            return
        self.refuse_constant(node, "meets", part.low if abs(part.low) > abs(part.high) else part.high)

    @staticmethod
    def refuse_constant(node: Node, does: str, constant: float) -> None:
        raise NotThisForm(
            f"{node.name} ({node.target}) {does} the constant {constant:g}, which a run may pass although none that "
            f"was tried did; {CHANGE}"
        )


@dataclasses.dataclass(frozen=True)
class _Undecided:
    """For which constants, operand `place` of the comparison `kind` with `other`, it may come out both ways."""

    kind: str
    place: int
    other: Range

    def __call__(self, constants: torch.Tensor) -> torch.Tensor:
        found = []
        for constant in constants.flatten().tolist():
            operands = [Range(constant, constant), self.other]
            found.append(is_decided(self.kind, *(operands if self.place == 0 else operands[::-1])) is None)
        return torch.tensor(found, dtype=torch.bool)


def size_range(size: Any) -> Range:
    if isinstance(size, torch.Tensor):
        return ANYTHING
    return Range(size, size) if isinstance(size, int) else COUNT
