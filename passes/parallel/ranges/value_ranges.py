"""What places and sizes a parallel block computes with, and whether its mock runs tried all that these may do.

Contract
    in    a block, its data nodes (data_flow.py), and what the mock runs saw of all others; not its activation
          function, which knows nothing of places and sizes (row_flow.py)
    out   NotThisForm, naming the node and the constant, for an operation on places or sizes that is not known, for a
          type that cannot hold them exactly, for a constant that more tokens may pass, and for what no run tried

A block that keeps 64 rows for each expert and drops the rest is right on every run with fewer. So whatever could hide a
threshold is refused, or asks for something that the runs must have tried:

    GROWS    is only moved, counted, added up a few times, and compared with what grows too, or with -1, 0 and 1. It is
             divided by the number of experts that each token has, once, and by nothing else.
    BOUND    is moved, added, and compared with anything.
    CHOSEN   every expert id must have been tried; so functions of one may do what they like, in integers
    truths   of what GROWS or is BOUND must have come out both ways in every node that computes, selects or joins them;
             compared with many constants, for each of these. So must bounds, and truths that meet in one row or place
             in every combination (joint_truths.py)

Floating point numbers and narrow integers must hold what they are given exactly. Mock runs, in float64, do not see it.

Pseudo-code
    for each node of the region, in host order: no constant may meet a dimension that grows (growing_sizes.py)
        where it is no data: its range (value_range.py) from those of its inputs, and what must be tried of it
    after the mock runs: was it (tried_values.py)?
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ops.arguments import (
    fill_value,
    indexed_dimensions,
    is_accumulating_write,
    is_mask,
    moved_elements,
    named_arguments,
)
from moepass.passes.ops.traits import Trait, base_operation, has_trait, operation
from moepass.passes.parallel.match.parallel_block import ParallelBlock
from moepass.passes.parallel.ranges.exact_types import check_type
from moepass.passes.parallel.ranges.growing_sizes import (
    CHANGE,
    check_lookup,
    check_sizes,
    dimensions_that_grow,
    grows_in_size,
    size_along,
)
from moepass.passes.parallel.ranges.joint_truths import JointTruths
from moepass.passes.parallel.ranges.range_arithmetic import size_range
from moepass.passes.parallel.ranges.range_sums import RangeSums
from moepass.passes.parallel.ranges.value_range import (
    COUNT,
    EMPTY,
    Kind,
    Range,
    computed,
    growing,
    joined,
)

# These take one element, or a part, of one operand.
_ONE_SOURCE = (*(Trait.RESHAPE, Trait.EXPAND, Trait.PERMUTE, Trait.SLICE, Trait.SPLIT, Trait.REPEAT, Trait.FLIP),)
_JOINS = (Trait.JOIN, Trait.CHOOSE, Trait.PAD, Trait.WRITE, Trait.SLICE_WRITE)
_CHOICES = ("condition", "mask", "indices", "index")


class ValueRanges(RangeSums):
    """The ranges of a block's places and sizes, and what its mock runs must try of them. Raises NotThisForm."""

    def __init__(self, block: ParallelBlock, data: set[Node], inside: Collection[Node]) -> None:
        super().__init__(block)
        self._add_sources()
        self._joint = JointTruths(self.range_of)
        by_row = {*inside, *(gemm.node for gemm in block.gemms)}
        for node in block.region:
            if node in inside:
                self._joint.add(node, None, by_row=True)
                continue
            if node.op == "call_function":
                check_sizes(node, self.structural, self.tokens)
            if node in data:
                self._check_places(node, is_data=True)
                self._check_factors(node, data)
                self._joint.add(node, None, by_row=node in by_row)
                continue
            if dimensions_that_grow(node) > 1:
                # Pairs of rows grow as their square: beside what grows as they do, a threshold without a constant.
                raise NotThisForm(f"{node.name} ({node.target}) has more than one dimension that grows; {CHANGE}")
            found = self._range(node)
            if found.kind is Kind.FIXED and not found.empty and not found.uniform and grows_in_size(node):
                found = found.at_least(Kind.BOUND)  # which element has which constant depends on how many there are
            check_type(node, found)
            self.ranges[node] = found = self.copied(node, found)
            self._require_both(node, found)
            self._joint.add(node, found)
            self._add_bound(node, found)

    def observe(self, node: Node, value: Any) -> None:
        """Note what `node` had in a run. Raises NotThisForm where that is memory that nobody has written."""
        if node in self.ranges and not self.ranges[node].empty:
            self.tried.observe(node, value)
        self._joint.observe(node, value)

    def check(self) -> None:
        """Raises NotThisForm for the first of what the runs had to try and did not."""
        self.tried.check()
        self._joint.check()

    # --------------------------------------------------------------------------------------------------- inputs

    def _add_sources(self) -> None:
        sources = self.block.sources
        if "ids" in sources:
            self.ranges[sources["ids"]] = Range(0, self.block.id_values - 1, Kind.CHOSEN, sources["ids"])
            # A graph for no tokens has no ids of its own, and may have those of other ranks.
            if not _has_nothing(sources["ids"]):
                self.tried.require_all(sources["ids"], self.block.id_values)
        if "counts" in sources:
            self.ranges[sources["counts"]] = COUNT

    # --------------------------------------------------------------------------------------------------- ranges

    def _range(self, node: Node) -> Range:
        name, base, arguments = operation(node), base_operation(node), named_arguments(node)
        if has_trait(node, Trait.COMPARE):
            return self.compared(node, base)
        if name == "getitem":
            return self._item(node)
        if has_trait(node, Trait.COPY, Trait.CAST, Trait.WAIT) or name == "_local_scalar_dense":
            return self.range_of(node.args[0])
        if has_trait(node, *_ONE_SOURCE):
            return self.range_of(node.args[0]).moved(node)
        if name in ("amax", "amin", "max", "min"):
            return self.range_of(node.args[0]).at_least(Kind.BOUND)
        if has_trait(node, *_JOINS) or name == "copy":
            return self._joined(node, arguments)
        if has_trait(node, Trait.LOOKUP):
            return self._looked_up(node, arguments)
        if has_trait(node, Trait.SUM) or name == "sym_sum":
            self._check_places(node)
            return self.summed(node, name, arguments)
        if has_trait(node, Trait.LOGICAL) or base in ("any", "all"):
            return self.truth(node)
        if base in ("add", "sub"):
            return self.added(node, base)
        if base in ("mul", "neg"):
            return self.multiplied(node, base)
        if has_trait(node, Trait.BOUND):
            return self.bounded(node, arguments)
        rounded = base == "div" and node.kwargs.get("rounding_mode") in ("floor", "trunc")
        if has_trait(node, Trait.FLOOR_DIVIDE, Trait.REMAINDER) or rounded:
            return self.divided(node)
        return self._made(node, base, arguments)

    def _made(self, node: Node, base: str, arguments: dict[str, Any]) -> Range:
        """Of what has no operands that are places, or puts them in order."""
        if has_trait(node, Trait.FILL, Trait.FILL_LIKE):
            return self.range_of(fill_value(node)).moved(node)
        if has_trait(node, Trait.EMPTY):
            return EMPTY
        if has_trait(node, Trait.SIZE):
            return size_range(fake_value(node))
        if has_trait(node, Trait.ARANGE):
            return self._counted(node, base, arguments)
        if base in ("all_gather_into_tensor", "all_to_all_single", "all_reduce"):
            given = self.range_of(node.args[0])
            if given.kind is Kind.CHOSEN:
                self.tried.require_all(node, self.block.id_values)
            # Values from other ranks were computed from their tokens.
            return given.moved(node) if given.kind in (Kind.CHOSEN, Kind.BOUND) else growing(given)
        if base == "repeat_interleave":
            return self._repeated(node)
        if base == "sort":
            return self.range_of(node.args[0]).moved(node)
        if base == "argsort":
            return COUNT
        if base == "searchsorted":
            return self._searched(node, arguments)
        raise NotThisForm(
            f"{node.name} ({node.target}) is no operation on places or sizes that moepass knows; {CHANGE}"
        )

    def _item(self, node: Node) -> Range:
        source, position = node.args
        is_order = isinstance(source, Node) and base_operation(source) == "sort" and position == 1
        return COUNT if is_order else self.range_of(source).moved(node)

    def _joined(self, node: Node, arguments: dict[str, Any]) -> Range:
        if is_accumulating_write(node):
            if str(fake_value(arguments["values"]).shape) != str(fake_value(arguments["indices"][0]).shape):
                raise NotThisForm(f"{node.name} ({node.target}) adds one value to several places; {CHANGE}")
            self._check_places(node)
            return self.summed(node, "index_add", {"self": arguments["self"], "source": arguments["values"]})
        elements = moved_elements(node) or [arguments["src"]]
        parts = [part for part in (self.range_of(each) for each in elements) if not part.empty]
        choices = [self.range_of(arguments[role]) for role in _CHOICES if role in arguments]
        self._check_places(node)
        if any(part.grows for part in parts):
            for part in parts:
                self.check_constant(node, part)
        found = joined(*parts)
        if found.empty:
            return found
        # An operand is taken element by element, or goes to places of its own.
        by_element = has_trait(node, Trait.CHOOSE)
        choice = computed(0, 0, *choices, *(parts if by_element else ()), Range(0, 0))
        # Which of some bounded values it is may depend on what grows; the value is bounded all the same.
        found = found.at_least(choice.kind if any(part.grows for part in parts) else min(choice.kind, Kind.BOUND))
        if found.kind is Kind.CHOSEN:
            return dataclasses.replace(found, lane=choice.lane if by_element else node)
        if len([part for part in parts if part.grows]) > 1:
            found = dataclasses.replace(found, mixed=True)
        return growing(found) if found.grows else found

    def _looked_up(self, node: Node, arguments: dict[str, Any]) -> Range:
        self._check_places(node)
        table, places = self.range_of(node.args[0]), indexed_dimensions(arguments)
        if table.kind is not Kind.FIXED or table.uniform:
            return table.moved(node)
        kind = max(Kind.BOUND if is_mask(index) else self.range_of(index).kind for _, index in places)
        if kind <= Kind.CHOSEN and len(places) == 1:
            return dataclasses.replace(table, kind=kind, lane=node if kind is Kind.CHOSEN else None)
        # What a table holds where no run looked is not known.
        for dim, index in places:
            if is_mask(index) or len(places) > 1:
                raise NotThisForm(f"{node.name} ({node.target}) looks up constants in several dimensions; {CHANGE}")
            size = size_along(node, fake_value(node.args[0]).shape, dim)  # type: ignore[arg-type]
            self.tried.require_all(index, int(size))
        return table.at_least(Kind.BOUND)

    def _counted(self, node: Node, base: str, arguments: dict[str, Any]) -> Range:
        if base == "iota":
            start, step, end = node.kwargs["start"], node.kwargs["step"], None
            length = self.range_of(node.args[0])
            if length.kind is Kind.FIXED and length.uniform and isinstance(start, int) and isinstance(step, int):
                last = start + step * max(0, length.low - 1)
                return Range(min(start, last), max(start, last))
        else:
            start, step, end = arguments.get("start", 0), arguments.get("step", 1), arguments["end"]
            if all(isinstance(part, int) for part in (start, step, end)):
                numbers = range(start, end, step)
                return Range(min(numbers, default=0), max(numbers, default=0))
            length = self.range_of(end)
        if start != 0 or step != 1:
            raise NotThisForm(
                f"{node.name} ({node.target}) counts from {start} in steps of {step}, which was not tried for every "
                f"size; {CHANGE}"
            )
        if length.kind is Kind.FIXED and length.uniform:
            return Range(0, max(0, length.low - 1))
        return COUNT

    def _repeated(self, node: Node) -> Range:
        """Each place, or each element, as often as counts say: a place among a fixed number must come in some run."""
        if len(node.args) > 1:
            if not all(isinstance(part, Node) for part in node.args[:2]):
                raise NotThisForm(f"{node.name} ({node.target}) repeats by a constant; {CHANGE}")
            values = self.range_of(node.args[0])
            return values if values.uniform else values.moved(node).at_least(Kind.BOUND)
        size = fake_value(node.args[0]).shape[0]  # type: ignore[arg-type]
        if not isinstance(size, int):
            return COUNT
        self.tried.require_all(node, size)
        return Range(0, max(0, size - 1), Kind.CHOSEN, node)

    def _searched(self, node: Node, arguments: dict[str, Any]) -> Range:
        """How many elements of a sequence lie below each value."""
        sequence, values = arguments["sorted_sequence"], self.range_of(arguments["self"])
        if arguments.get("sorter") is not None or values.empty or self.range_of(sequence).empty:
            raise NotThisForm(f"{node.name} ({node.target}) searches what is not known to be sorted; {CHANGE}")
        if self.range_of(sequence).kind <= Kind.CHOSEN and values.kind is Kind.FIXED:
            return COUNT  # of sorted expert ids
        raise NotThisForm(f"{node.name} ({node.target}) searches places that grow with tokens; {CHANGE}")

    # --------------------------------------------------------------------------------------------------- checks

    def _check_places(self, node: Node, *, is_data: bool = False) -> None:
        """Places that `node` looks up, or writes to, stay in what it looks up in for every number of tokens."""
        arguments = named_arguments(node)
        if not has_trait(node, Trait.LOOKUP, Trait.WRITE, Trait.WRITE_SUM):
            return
        for dim, index in indexed_dimensions(arguments):
            if is_mask(index):
                continue
            places = self.range_of(index)
            size = size_along(node, fake_value(node.args[0]).shape, dim)  # type: ignore[arg-type]
            if is_data and isinstance(size, int) and grows_in_size(index) and self.is_of_tokens(size):
                continue  # rows of a fixed number of tokens, some of which a run takes
            check_lookup(node, node.args[0], dim, index, places)  # type: ignore[arg-type]
            elements = 1 if grows_in_size(index) else fake_value(index).numel()
            if places.grows and isinstance(size, int) and not self.is_of_tokens(elements):
                raise NotThisForm(
                    f"{node.name} ({node.target}) takes {elements} of {size} by sizes, of which not every order was "
                    f"tried; {CHANGE}"
                )

    def _check_factors(self, node: Node, data: set[Node]) -> None:
        """Rows are weighed and added up with truths and constants alone: of a number not every value was tried."""
        if base_operation(node) not in ("add", "sub", "mul"):
            return
        for used in node.all_input_nodes:
            if used not in data and self.range_of(used).kind > Kind.CHOSEN and not self.range_of(used).small:
                raise NotThisForm(f"{node.name} ({node.target}) computes rows with places or sizes; {CHANGE}")

    def _require_both(self, node: Node, found: Range) -> None:
        if isinstance(fake_value(node), (tuple, list)):  # whoever takes an element of it is asked for that
            return
        truth = found.kind > Kind.CHOSEN and found.small and not found.uniform
        if not truth or _has_nothing(node) or self.tried.requires_both(node):
            return
        if found.low >= 0:
            self.tried.require_both(node)
        elif found.whole:  # of three numbers the one in the middle may be all that comes
            self.tried.require_all(node, int(found.high - found.low) + 1, first=int(found.low))

    def _add_bound(self, node: Node, found: Range) -> None:
        """A bound that what is computed from the tokens may pass, or not, is a truth about it."""
        if not has_trait(node, Trait.BOUND) or found.kind <= Kind.CHOSEN or self.tried.requires_both(node):
            return
        value, lower, upper = self.bounds_of(node, named_arguments(node))
        given = self.range_of(value)
        below = lower is not None and given.low < self.range_of(lower).high
        above = upper is not None and given.high > self.range_of(upper).low
        if below or above:
            self._joint.add_bound(node, value, below, above)


def _has_nothing(node: Node) -> bool:
    value = fake_value(node)
    return isinstance(value, torch.Tensor) and 0 in [size for size in value.shape if isinstance(size, int)]
