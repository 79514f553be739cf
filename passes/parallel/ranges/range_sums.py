"""Ranges of sums and counts, and how often a sum may count the same tokens.

A sum over a fixed number of elements multiplies constants that were added to each of them, and copies of elements.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import collective_of
from moepass.passes.graph.nodes import fake_value
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.parallel.ranges.growing_sizes import CHANGE, grows_in_size, size_along
from moepass.passes.parallel.ranges.joint_masks import is_single
from moepass.passes.parallel.ranges.range_arithmetic import RangeArithmetic
from moepass.passes.parallel.ranges.value_range import ANYTHING, COUNT, Kind, Range, growing, joined


class RangeSums(RangeArithmetic):
    """Ranges of sums. Its methods raise NotThisForm."""

    def summed(self, node: Node, name: str, arguments: dict[str, Any]) -> Range:
        """Return the range of a sum, a count, or sums by index."""
        if has_trait(node, Trait.COUNT):
            counted = self.range_of(node.args[0])
            if counted.kind > Kind.BY_EXPERT or arguments.get("weights") is not None:
                raise NotThisForm(f"{node.name} ({node.target}) counts something other than expert ids; {CHANGE}")
            return COUNT
        start = self.range_of(arguments["self"]) if name in ("scatter_add", "index_add") else Range(0, 0)
        if name in ("scatter_add", "index_add"):
            self.check_constant(node, start)
            if arguments.get("alpha", 1) != 1:
                self.refuse_constant(node, "adds a multiple of", arguments["alpha"])
            addends = self.range_of(arguments.get("src", arguments.get("source")))
        else:
            addends = self.range_of(node.args[0])
        if addends.empty or start.empty:
            raise NotThisForm(f"{node.name} ({node.target}) sums uninitialised memory; fill all of it")
        number = _number_of_addends(node, name, arguments)
        if addends.grows and math.isinf(number):
            raise NotThisForm(f"{node.name} ({node.target}) sums a growing number of growing values; {CHANGE}")
        if addends.grows:
            times = addends.factor * min(addends.copies, number) + (start.factor if start.grows else 0)
            total = growing(joined(start, addends))
            total = dataclasses.replace(total, mixed=total.mixed and not is_single(node))
            return self.counted(node, total, addends.shift * number, times)
        is_static = addends.kind is not Kind.FIXED and self.is_of_tokens(number)
        if name not in ("scatter_add", "index_add") and number < math.inf and not is_static:
            # A sum of a fixed number of masks has at most that number, which is a constant.
            ends = [end * times for end in (addends.low, addends.high) for times in (min(1, number), number)]
            kind = Kind.FIXED if addends.kind is Kind.FIXED else max(addends.kind, Kind.BOUND)
            return Range(min(ends), max(ends), kind, integral=addends.integral)
        return COUNT if addends.low >= 0 and start.low >= 0 else ANYTHING

    def is_of_tokens(self, number: float) -> bool:
        """Return whether `number` is a multiple of this rank's tokens, which are fixed in this graph."""
        slots = {tokens // self.block.experts for tokens in self.tokens if self.block.form == "all_to_all_slots"}
        return any(number == tokens * times for tokens in (*self.tokens, *slots) for times in self.structural)

    def copied(self, node: Node, values: Range) -> Range:
        """Return `values`, the range of `node`, with the number of elements that may be copies of one element."""
        value = fake_value(node)
        if not values.grows or not isinstance(value, torch.Tensor) or grows_in_size(node):
            return values
        elements, base = value.numel(), base_operation(node)
        inputs = [self.range_of(source) for source in node.all_input_nodes]
        if has_trait(node, Trait.LOOKUP):
            indices = inputs[1:]
            most = elements if any(index.uniform or index.kind is Kind.FIXED for index in indices) else inputs[0].copies
        elif base == "cumsum":
            most = elements
        else:
            most = max(
                (
                    operand.copies * _repeats(node, source)
                    for operand, source in zip(inputs, node.all_input_nodes, strict=True)
                    if operand.grows
                ),
                default=1,
            )
        return dataclasses.replace(values, copies=min(elements, most))


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


def _number_of_addends(node: Node, name: str, arguments: dict[str, Any]) -> float:
    """Return how many numbers `node` adds for each element of its result; infinity if that is not constant."""
    if name == "sym_sum":
        return len(node.args[0])  # type: ignore[arg-type]
    addends = arguments.get("src", arguments.get("source", arguments.get("self")))
    shape = fake_value(addends).shape  # type: ignore[arg-type]
    dims = arguments.get("dim")
    if name in ("scatter_add", "index_add") or dims in (None, []):
        dims = range(len(shape))
    sizes = [size_along(node, shape, dim) for dim in (dims if not isinstance(dims, int) else [dims])]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else math.inf
