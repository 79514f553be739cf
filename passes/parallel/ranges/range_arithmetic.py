"""Ranges of elementwise operations: comparisons, logic, addition, multiplication, clamps and division.

A growing operand may meet only growing operands, -1, 0, 1, and the structural numbers of the block.
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
    decide,
    joined,
    product,
)

# Every mock run has more tokens than this.
MOST_SHIFT = 2
# A row index is a few offsets plus an index within one expert, so it may count the tokens a few times.
_LEAST_FACTOR = 6


class RangeArithmetic:
    """Ranges of a block's nodes, and of the results of elementwise operations. Its methods raise NotThisForm."""

    def __init__(self, block: ParallelBlock) -> None:
        self.block = block
        self.ranges: dict[Node, Range] = {}
        self.tried = TriedValues()
        self.structural = structural_numbers(block)
        self.tokens = token_numbers(block)
        self.most_factor = max(_LEAST_FACTOR, 2 * max(self.structural))

    def range_of(self, argument: Any) -> Range:
        """Return the range of an operand: a node, a number, or a list of these."""
        if isinstance(argument, (bool, int, float)):
            return Range(argument, argument, integral=float(argument).is_integer())
        if isinstance(argument, (list, tuple)):
            return joined(*(self.range_of(item) for item in argument))
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
                integral = not value.is_floating_point() or bool((value == value.floor()).all())
                return Range(float(value.min()), float(value.max()), integral=integral)
            return ANYTHING
        return size_range(fake_value(node))

    def compared(self, node: Node, kind: str) -> Range:
        """Return the range of a comparison, and require that mock runs try both results of it."""
        left, right = self.operands(node)
        self._check_operands(node, left, right)
        if left.mixed or right.mixed:
            raise NotThisForm(f"{node.name} ({node.target}) compares several sizes at once; compare one by one")
        outcome = decide(kind, left, right)
        if outcome is not None:
            return Range(int(outcome), int(outcome))
        result = computed(0, 1, left, right)
        if result.kind > Kind.BY_EXPERT:
            for position, operand in enumerate((left, right)):
                if operand.kind is Kind.FIXED and not operand.uniform:
                    undecided = _Undecided(kind, position, right if position == 0 else left)
                    self.tried.require_both(node, node.args[position], undecided)  # type: ignore[arg-type]
        return result

    def logical(self, node: Node) -> Range:
        """Return the range of a logical operation, or of a reduction by any or all."""
        if fake_value(node).dtype is not torch.bool:
            raise NotThisForm(f"{node.name} ({node.target}) computes with bits of indices or sizes; {CHANGE}")
        operands = [self.range_of(used) for used in node.all_input_nodes]
        if any(operand.grows for operand in operands):
            raise NotThisForm(f"{node.name} ({node.target}) uses indices or sizes as masks; compare them with 0")
        name = base_operation(node)
        if name in ("any", "all"):
            return Range(0, 1).at_least(max(operands[0].kind, Kind.BOUND)) if not operands[0].uniform else operands[0]
        if name.endswith("not"):
            return computed(1 - operands[0].high, 1 - operands[0].low, *operands)
        lows, highs = [operand.low for operand in operands], [operand.high for operand in operands]
        if name.endswith("and"):
            return computed(min(lows), min(highs), *operands)
        if name.endswith("xor"):
            return computed(0, 1, *operands)
        return computed(max(lows), max(highs), *operands)

    def added(self, node: Node, base: str) -> Range:
        """Return the range of a sum or difference."""
        left, right = self.operands(node)
        factor: Any = node.kwargs.get("alpha", 1)
        if factor not in (1, -1):
            self.refuse_constant(node, "adds a multiple of", factor)
        if node.args[0] is node.args[1] and (factor == 1) == (base == "sub"):
            return Range(0, 0)
        self._check_operands(node, left, right)
        right = right if (factor == 1) == (base == "add") else right.negated()
        total = computed(left.low + right.low, left.high + right.high, left, right)
        if not total.grows:
            return total
        added = [operand.low for operand in (left, right) if not operand.grows and operand.uniform]
        constants = [constant for constant in added if abs(constant) not in self.tokens]
        factors = [operand.factor for operand in (left, right) if operand.grows]
        # Sums of symbolic sizes are checked by their expressions (growing_sizes.py).
        times = sum(factors) if isinstance(fake_value(node), torch.Tensor) else max(factors)
        shift = left.shift + right.shift + sum(constants)
        # Bounded operands may have the same value in every run, and be added several times.
        bounded = [operand for operand in (left, right) if not operand.grows and not operand.uniform]
        largest = sum(max(abs(operand.low), abs(operand.high)) for operand in bounded)
        return self.counted(node, total, shift + math.copysign(largest, shift), times)

    def counted(self, node: Node, values: Range, shift: float, factor: float) -> Range:
        """Return `values` with this `shift` and `factor`. Raises NotThisForm if one is too large."""
        if abs(shift) > MOST_SHIFT:
            self.refuse_constant(node, "adds up to", shift)
        if factor > self.most_factor:
            self.refuse_constant(node, "counts the tokens as often as", factor)
        return dataclasses.replace(values, shift=shift, factor=factor)

    def multiplied(self, node: Node, base: str) -> Range:
        """Return the range of a product or negation."""
        if base == "neg":
            return self.range_of(node.args[0]).negated()
        left, right = self.operands(node)
        for value, multiplier in ((left, right), (right, left)):
            if value.grows and not (multiplier.small or multiplier.is_constant(*self.structural)):
                if multiplier.kind is Kind.FIXED and multiplier.uniform:
                    self.refuse_constant(node, "multiplies what grows with", multiplier.low)
                raise NotThisForm(f"{node.name} ({node.target}) multiplies a growing value by a variable; {CHANGE}")
        result = product(left, right)
        times = math.prod(abs(operand.low) for operand in (left, right) if operand.uniform)
        if not result.grows or not times:
            return result
        return self.counted(node, result, result.shift * times, result.factor * times)

    def bounded(self, node: Node, arguments: dict[str, Any]) -> Range:
        """Return the range of a clamp, minimum or maximum."""
        value, lower, upper = self.bounds_of(node, arguments)
        values = self.range_of(value)
        bounds = [self.range_of(bound) for bound in (lower, upper) if bound is not None]
        low = values.low if lower is None else max(values.low, self.range_of(lower).low)
        high = values.high if upper is None else min(values.high, self.range_of(upper).high)
        result = computed(min(low, high), max(low, high), values, *bounds)
        if result.kind > Kind.BY_EXPERT:
            idle = not values.grows and (result.low, result.high) == (values.low, values.high)
            for bound in bounds:
                if bound.kind is not Kind.FIXED or not (bound.small or (idle and bound.uniform)):
                    self.refuse_constant(node, "bounds an index or a size by", bound.high)
        return result

    def bounds_of(self, node: Node, arguments: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return the operand that `node` bounds, its lower and its upper bound; None for no bound."""
        if base_operation(node).startswith("clamp"):
            return node.args[0], arguments.get("min"), arguments.get("max")
        # The operand of the earlier kind is the bound.
        value, bound = sorted(node.args[:2], key=lambda argument: -self.range_of(argument).kind)
        return (value, bound, None) if "max" in base_operation(node) else (value, None, bound)

    def divided(self, node: Node) -> Range:
        """Return the range of a rounded quotient or a remainder."""
        left, right = self.operands(node)
        if not right.uniform or right.kind is not Kind.FIXED or right.low <= 0 or not right.integral:
            raise NotThisForm(f"{node.name} ({node.target}) divides, but not by a positive constant integer; {CHANGE}")
        divisor, is_remainder = right.low, has_trait(node, Trait.REMAINDER)
        # Repeated quotients would be 0 up to a large number of tokens.
        if left.kind > Kind.BY_EXPERT and divisor != 1 and (left.divisor != 1 or divisor not in self._divisors(left)):
            self.refuse_constant(node, "divides an index or a size by", divisor)
        if is_remainder:
            unchanged = left.low >= 0 and left.high < divisor
            remainder = computed(0, divisor - 1, left)
            return left if unchanged else dataclasses.replace(remainder, kind=min(remainder.kind, Kind.BOUND))
        is_floor = has_trait(node, Trait.FLOOR_DIVIDE) or node.kwargs.get("rounding_mode") == "floor" or left.low >= 0
        ends = [end / divisor for end in (left.low, left.high)]
        low, high = (end if math.isinf(end) else (math.floor(end) if is_floor else math.trunc(end)) for end in ends)
        return dataclasses.replace(computed(low, high, left), divisor=max(left.divisor, divisor))

    def _divisors(self, value: Range) -> set[int]:
        """Return the allowed divisors of `value`: for growing values the number of experts per token."""
        top_k = [int(fake_value(node).shape[-1]) for role, node in self.block.sources.items() if role == "ids"]
        return {1, *top_k} if value.grows else {1}

    def operands(self, node: Node) -> tuple[Range, Range]:
        """Return the ranges of both operands. Raises NotThisForm if one is uninitialised memory."""
        left, right = (self.range_of(argument) for argument in node.args[:2])
        if left.empty or right.empty:
            raise NotThisForm(f"{node.name} ({node.target}) computes with uninitialised memory; fill all of it")
        return left, right

    def _check_operands(self, node: Node, left: Range, right: Range) -> None:
        if left.grows:
            self.check_constant(node, right)
        if right.grows:
            self.check_constant(node, left)

    def check_constant(self, node: Node, operand: Range) -> None:
        """Check that `operand`, which meets a growing one, grows too or is small."""
        if operand.grows or operand.small or operand.empty or operand.is_constant(*self.tokens):
            return
        self.refuse_constant(node, "meets", operand.low if abs(operand.low) > abs(operand.high) else operand.high)

    @staticmethod
    def refuse_constant(node: Node, does: str, constant: float) -> None:
        """Raise NotThisForm because `node` `does` something with `constant`, which may be a threshold."""
        raise NotThisForm(
            f"{node.name} ({node.target}) {does} the constant {constant:g}, which no sample run passed; {CHANGE}"
        )


@dataclasses.dataclass(frozen=True)
class _Undecided:
    """Constants for which the comparison `kind`, with the constant at `position`, may be both true and false."""

    kind: str
    position: int
    operand: Range

    def __call__(self, constants: torch.Tensor) -> torch.Tensor:
        undecided = []
        for constant in constants.flatten().tolist():
            operands = [Range(constant, constant), self.operand]
            undecided.append(decide(self.kind, *(operands if self.position == 0 else operands[::-1])) is None)
        return torch.tensor(undecided, dtype=torch.bool)


def size_range(size: Any) -> Range:
    """Return the range of a size; any number for a tensor."""
    if isinstance(size, torch.Tensor):
        return ANYTHING
    return Range(size, size) if isinstance(size, int) else COUNT
