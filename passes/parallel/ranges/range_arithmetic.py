"""Ranges of comparisons, logic, addition, multiplication, clamps, division, sums and counts.

A growing operand may meet only growing operands, -1, 0, 1, and the structural numbers of the block. A sum over a fixed
number of elements multiplies constants that were added to each of them, and copies of elements.
All functions raise NotThisForm for an operation that may hide a threshold.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import collective_of
from moepass.passes.graph.nodes import fake_value
from moepass.passes.ops.arguments import is_accumulating_write, named_arguments
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.parallel.ranges.growing_sizes import grows_in_size, refuse, size_along
from moepass.passes.parallel.ranges.joint_masks import is_single
from moepass.passes.parallel.ranges.known_ranges import KnownRanges, Rules, refuse_constant, refuse_unknown
from moepass.passes.parallel.ranges.value_range import (
    ANYTHING,
    COUNT,
    Kind,
    Range,
    computed,
    decide,
    growing,
    joined,
    product,
)


def compared(node: Node, known: KnownRanges) -> Range:
    """Return the range of a comparison, and require that mock runs try both results of it."""
    left, right = _operands(node, known)
    known.check_constants(node, left, right)
    if left.mixed or right.mixed:
        refuse(node, "compares several sizes at once", "compare one by one")
    comparison = base_operation(node)
    outcome = decide(comparison, left, right)
    if outcome is not None:
        return Range(int(outcome), int(outcome))
    result = computed(0, 1, left, right)

    def is_undecided(position: int, constant: float) -> bool:
        operands = [left, right]
        operands[position] = Range(constant, constant)
        return decide(comparison, *operands) is None

    if result.kind > Kind.BY_EXPERT:
        for position, operand in enumerate((left, right)):
            if operand.kind is Kind.FIXED and not operand.uniform:
                undecided = functools.partial(is_undecided, position)
                known.tried.require_both(node, node.args[position], undecided)  # type: ignore[arg-type]
    return result


def logical(node: Node, known: KnownRanges) -> Range:
    """Return the range of a logical operation, or of a reduction by any or all."""
    if fake_value(node).dtype is not torch.bool:
        refuse(node, "computes with bits of indices or sizes")
    operands = [known.range_of(used) for used in node.all_input_nodes]
    if any(operand.grows for operand in operands):
        refuse(node, "uses indices or sizes as masks", "compare them with 0")
    first, name = operands[0], base_operation(node)
    if name in ("any", "all"):
        return first if first.uniform else Range(0, 1, max(first.kind, Kind.BOUND))
    if name.endswith("not"):
        return computed(1 - first.high, 1 - first.low, first)
    if name.endswith("xor"):
        return computed(0, 1, *operands)
    bound = min if name.endswith("and") else max
    return computed(bound(operand.low for operand in operands), bound(operand.high for operand in operands), *operands)


def added(node: Node, known: KnownRanges) -> Range:
    """Return the range of a sum or difference."""
    left, right = _operands(node, known)
    factor: Any = node.kwargs.get("alpha", 1)
    if factor not in (1, -1):
        refuse_constant(node, "adds a multiple of", factor)
    is_sum = (factor == 1) == (base_operation(node) == "add")
    if node.args[0] is node.args[1] and not is_sum:
        return Range(0, 0)
    known.check_constants(node, left, right)
    right = right if is_sum else right.negated()
    total = computed(left.low + right.low, left.high + right.high, left, right)
    if not total.grows:
        return total
    others = [operand for operand in (left, right) if not operand.grows]
    constants = [operand.low for operand in others if operand.uniform and abs(operand.low) not in known.tokens]
    factors = [operand.factor for operand in (left, right) if operand.grows]
    # Sums of symbolic sizes are checked by their expressions (growing_sizes.py).
    times = sum(factors) if isinstance(fake_value(node), torch.Tensor) else max(factors)
    shift = left.shift + right.shift + sum(constants)
    # Bounded operands may have the same value in every run, and be added several times.
    largest = sum(max(abs(operand.low), abs(operand.high)) for operand in others if not operand.uniform)
    return known.counted(node, total, shift + math.copysign(largest, shift), times)


def multiplied(node: Node, known: KnownRanges) -> Range:
    """Return the range of a product or negation."""
    if base_operation(node) == "neg":
        return known.range_of(node.args[0]).negated()
    left, right = _operands(node, known)
    for value, multiplier in ((left, right), (right, left)):
        if value.grows and not (multiplier.small or multiplier.is_constant(*known.structural)):
            if multiplier.kind is Kind.FIXED and multiplier.uniform:
                refuse_constant(node, "multiplies what grows with", multiplier.low)
            refuse(node, "multiplies a growing value by a variable")
    result = product(left, right)
    times = math.prod(abs(operand.low) for operand in (left, right) if operand.uniform)
    if not result.grows or not times:
        return result
    return known.counted(node, result, result.shift * times, result.factor * times)


def bounded(node: Node, known: KnownRanges) -> Range:
    """Return the range of a clamp, minimum or maximum."""
    value, lower, upper = bounds_of(node, known)
    values = known.range_of(value)
    bounds = [known.range_of(bound) for bound in (lower, upper) if bound is not None]
    low = values.low if lower is None else max(values.low, known.range_of(lower).low)
    high = values.high if upper is None else min(values.high, known.range_of(upper).high)
    result = computed(min(low, high), max(low, high), values, *bounds)
    if result.kind > Kind.BY_EXPERT:
        idle = not values.grows and (result.low, result.high) == (values.low, values.high)
        for bound in bounds:
            if bound.kind is not Kind.FIXED or not (bound.small or (idle and bound.uniform)):
                refuse_constant(node, "bounds an index or a size by", bound.high)
    return result


def bounds_of(node: Node, known: KnownRanges) -> tuple[Any, Any, Any]:
    """Return the operand that `node` bounds, its lower and its upper bound; None for no bound."""
    if base_operation(node).startswith("clamp"):
        arguments = named_arguments(node)
        return node.args[0], arguments.get("min"), arguments.get("max")
    # The operand of the earlier kind is the bound.
    value, bound = sorted(node.args[:2], key=lambda argument: -known.range_of(argument).kind)
    return (value, bound, None) if "max" in base_operation(node) else (value, None, bound)


def divided(node: Node, known: KnownRanges) -> Range:
    """Return the range of a rounded quotient or a remainder."""
    rounding = "floor" if has_trait(node, Trait.FLOOR_DIVIDE) else node.kwargs.get("rounding_mode")
    is_remainder = has_trait(node, Trait.REMAINDER)
    if not is_remainder and rounding not in ("floor", "trunc"):
        refuse_unknown(node, known)
    left, right = _operands(node, known)
    if not right.uniform or right.kind is not Kind.FIXED or right.low <= 0 or not right.integral:
        refuse(node, "divides, but not by a positive constant integer")
    divisor = right.low
    # Other quotients, and repeated ones, would be 0 up to a large number of tokens.
    is_by_top_k = left.grows and left.divisor == 1 and divisor == known.block.top_k
    if left.kind > Kind.BY_EXPERT and divisor != 1 and not is_by_top_k:
        refuse_constant(node, "divides an index or a size by", divisor)
    if is_remainder:
        unchanged = left.low >= 0 and left.high < divisor
        remainder = computed(0, divisor - 1, left)
        return left if unchanged else dataclasses.replace(remainder, kind=min(remainder.kind, Kind.BOUND))
    rounded = math.floor if rounding == "floor" else math.trunc
    ends = [end / divisor for end in (left.low, left.high)]
    low, high = (end if math.isinf(end) else rounded(end) for end in ends)
    return dataclasses.replace(computed(low, high, left), divisor=max(left.divisor, divisor))


def summed(node: Node, known: KnownRanges) -> Range:
    """Return the range of a sum, a count, or sums by index."""
    known.check_indices(node)
    arguments = named_arguments(node)
    if has_trait(node, Trait.COUNT):
        counted = known.range_of(node.args[0])
        if counted.kind > Kind.BY_EXPERT or arguments.get("weights") is not None:
            refuse(node, "counts something other than expert ids")
        return COUNT
    is_by_index = has_trait(node, Trait.WRITE_SUM) or is_accumulating_write(node)
    start = known.range_of(node.args[0]) if is_by_index else Range(0, 0)
    known.check_constant(node, start)
    if is_by_index and arguments.get("alpha", 1) != 1:
        refuse_constant(node, "adds a multiple of", arguments["alpha"])
    operand = next((arguments[name] for name in ("src", "source", "values") if name in arguments), node.args[0])
    addends = known.range_of(operand)
    if addends.empty or start.empty:
        refuse(node, "sums uninitialised memory", "fill all of it")
    number = _number_of_addends(node, operand, None if is_by_index else arguments.get("dim"))
    if addends.grows and math.isinf(number):
        refuse(node, "sums a growing number of growing values")
    if addends.grows:
        times = addends.factor * min(addends.copies, number) + (start.factor if start.grows else 0)
        total = growing(joined(start, addends))
        total = dataclasses.replace(total, mixed=total.mixed and not is_single(node))
        return known.counted(node, total, addends.shift * number, times)
    is_static = addends.kind is not Kind.FIXED and known.is_of_tokens(number)
    if not is_by_index and number < math.inf and not is_static:
        # A sum of a fixed number of masks has at most that number, which is a constant.
        ends = [end * times for end in (addends.low, addends.high) for times in (min(1, number), number)]
        kind = Kind.FIXED if addends.kind is Kind.FIXED else max(addends.kind, Kind.BOUND)
        return Range(min(ends), max(ends), kind, integral=addends.integral)
    return COUNT if addends.low >= 0 and start.low >= 0 else ANYTHING


def searched(node: Node, known: KnownRanges) -> Range:
    """Return the range of a binary search."""
    arguments = named_arguments(node)
    sequence, values = known.range_of(arguments["sorted_sequence"]), known.range_of(arguments["self"])
    if arguments.get("sorter") is not None or values.empty or sequence.empty:
        refuse(node, "searches a sequence that may not be sorted")
    if sequence.kind <= Kind.BY_EXPERT and values.kind is Kind.FIXED:
        return COUNT  # of sorted expert ids
    refuse(node, "searches among growing indices or sizes")


def with_copies(node: Node, values: Range, known: KnownRanges) -> Range:
    """Return `values`, the range of `node`, with the number of elements that may be copies of one element."""
    value = fake_value(node)
    if not values.grows or not isinstance(value, torch.Tensor) or grows_in_size(node):
        return values
    elements = value.numel()
    inputs = {source: known.range_of(source) for source in node.all_input_nodes}
    if has_trait(node, Trait.LOOKUP):
        table, *indices = inputs.values()
        most = elements if any(index.uniform or index.kind is Kind.FIXED for index in indices) else table.copies
    elif has_trait(node, Trait.SCAN):
        most = elements
    else:
        copies = (operand.copies * _repeats(node, source) for source, operand in inputs.items() if operand.grows)
        most = max(copies, default=1)
    return dataclasses.replace(values, copies=min(elements, most))


def _operands(node: Node, known: KnownRanges) -> tuple[Range, Range]:
    """Return the ranges of both operands. Raises NotThisForm if one is uninitialised memory."""
    left, right = (known.range_of(argument) for argument in node.args[:2])
    if left.empty or right.empty:
        refuse(node, "computes with uninitialised memory", "fill all of it")
    return left, right


def _repeats(node: Node, used: Node) -> float:
    """Return how many elements `node` has for each element of `used`. An AllGather has each of them once."""
    collective = collective_of(node)
    if collective is not None and collective.kind == "all_gather":
        return 1.0
    operand = fake_value(used)
    if isinstance(operand, (list, tuple)):
        return 1.0  # `node` is one of several results
    if not isinstance(operand, torch.Tensor):
        return float(fake_value(node).numel())
    return 1.0 if grows_in_size(used) else max(1.0, fake_value(node).numel() / max(1, operand.numel()))


def _number_of_addends(node: Node, operand: Any, dims: Any) -> float:
    """Return how many elements of `operand` along `dims`, None for all, `node` adds; infinity if not constant."""
    if isinstance(operand, (list, tuple)):
        return len(operand)
    shape = fake_value(operand).shape
    if dims in (None, []):
        dims = range(len(shape))
    sizes = [size_along(node, shape, dim) for dim in (dims if not isinstance(dims, int) else [dims])]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else math.inf


ARITHMETIC_RULES: Rules = (
    ((Trait.COMPARE,), compared),
    ((Trait.LOGICAL, "any", "all"), logical),
    (("add", "sub"), added),
    (("mul", "neg"), multiplied),
    (("max.dim", "min.dim"), refuse_unknown),
    ((Trait.BOUND,), bounded),
    ((Trait.SUM, "sym_sum"), summed),
    (("searchsorted",), searched),
    (("amax", "amin", "max", "min"), lambda node, known: known.range_of(node.args[0]).at_least(Kind.BOUND)),
    ((Trait.FLOOR_DIVIDE, Trait.REMAINDER, "div"), divided),
)
