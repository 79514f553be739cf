"""The ranges of sums and counts, and how often the same number of tokens may be in one of them.

A sum over a fixed number of elements is no way to a constant: what was added to each of them is in it as often, and so
are elements that are the same one.
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
from moepass.passes.parallel.ranges.joint_truths import is_single
from moepass.passes.parallel.ranges.range_arithmetic import RangeArithmetic
from moepass.passes.parallel.ranges.value_range import ANYTHING, COUNT, Kind, Range, growing, joined


class RangeSums(RangeArithmetic):
    """The ranges of sums. Raises NotThisForm."""

    def summed(self, node: Node, name: str, arguments: dict[str, Any]) -> Range:
        """Of a sum, a count, or sums by place."""
        if has_trait(node, Trait.COUNT):
            counted = self.range_of(node.args[0])
            if counted.kind > Kind.CHOSEN or arguments.get("weights") is not None:
                raise NotThisForm(f"{node.name} ({node.target}) counts what are no expert ids; {CHANGE}")
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
            raise NotThisForm(f"{node.name} ({node.target}) adds up memory that nobody has written")
        number = _addends(node, name, arguments)
        if addends.grows and math.isinf(number):
            raise NotThisForm(f"{node.name} ({node.target}) adds up a growing number of what grows itself; {CHANGE}")
        if addends.grows:
            times = addends.factor * min(addends.copies, number) + (start.factor if start.grows else 0)
            found = growing(joined(start, addends))
            found = dataclasses.replace(found, mixed=found.mixed and not is_single(node))
            return self.counted(node, found, addends.shift * number, times)
        is_static = addends.kind is not Kind.FIXED and self.is_of_tokens(number)
        if name not in ("scatter_add", "index_add") and number < math.inf and not is_static:
            # Truths, as often as a constant says, are that constant.
            ends = [end * times for end in (addends.low, addends.high) for times in (min(1, number), number)]
            kind = Kind.FIXED if addends.kind is Kind.FIXED else max(addends.kind, Kind.BOUND)
            return Range(min(ends), max(ends), kind, whole=addends.whole)
        return COUNT if addends.low >= 0 and start.low >= 0 else ANYTHING

    def is_of_tokens(self, number: float) -> bool:
        """Whether a graph for a fixed number of tokens has so many of what another has a growing number of."""
        each = {tokens // self.block.experts for tokens in self.tokens if self.block.form == "all_to_all_slots"}
        return any(number == tokens * times for tokens in (*self.tokens, *each) for times in self.structural)

    def copied(self, node: Node, found: Range) -> Range:
        """`found` with how many elements of `node`, where that is a fixed number, may be the same one."""
        value = fake_value(node)
        if not found.grows or not isinstance(value, torch.Tensor) or grows_in_size(node):
            return found
        elements, base = value.numel(), base_operation(node)
        used = [self.range_of(other) for other in node.all_input_nodes]
        if has_trait(node, Trait.LOOKUP):
            places = used[1:]
            again = elements if any(part.uniform or part.kind is Kind.FIXED for part in places) else used[0].copies
        elif base == "cumsum":
            again = elements
        else:
            again = max(
                (
                    part.copies * _times(node, other)
                    for part, other in zip(used, node.all_input_nodes, strict=True)
                    if part.grows
                ),
                default=1,
            )
        return dataclasses.replace(found, copies=min(elements, again))


def _times(node: Node, used: Node) -> float:
    """How many elements `node` has for each of `used`. An AllGather has each of them once."""
    collective = collective_of(node)
    if collective is not None and collective.kind == "all_gather":
        return 1.0
    given = fake_value(used)
    if isinstance(given, (list, tuple)):
        return 1.0  # `node` is one of several results
    if not isinstance(given, torch.Tensor):
        return float(fake_value(node).numel())
    return 1.0 if grows_in_size(used) else max(1.0, fake_value(node).numel() / max(1, given.numel()))


def _addends(node: Node, name: str, arguments: dict[str, Any]) -> float:
    """How many numbers go into each that `node` gives; without bound where that is not constant."""
    if name == "sym_sum":
        return len(node.args[0])  # type: ignore[arg-type]
    added = arguments.get("src", arguments.get("source", arguments.get("self")))
    shape = fake_value(added).shape  # type: ignore[arg-type]
    dims = arguments.get("dim")
    if name in ("scatter_add", "index_add") or dims in (None, []):
        dims = range(len(shape))
    sizes = [size_along(node, shape, dim) for dim in (dims if not isinstance(dims, int) else [dims])]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else math.inf
