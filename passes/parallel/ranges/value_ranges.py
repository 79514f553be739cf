"""Ranges of a parallel block's indices and sizes, and a check that mock runs tried everything that matters about them.

Contract
    in    a block, its data nodes (data_flow.py), and the values of all other nodes in mock runs; not its activation
          function, which reads no indices or sizes (row_flow.py)
    out   NotThisForm, naming the node and the constant, for an unknown operation on indices or sizes, a dtype that
          does not hold them exactly, a constant that they may pass with more tokens, and values that no run tried

A block that keeps 64 rows of each expert and drops the others is right in every run with fewer rows. So everything that
may hide a threshold is refused, or becomes a requirement for the runs:

    GROWS      may only be moved, counted, added a few times, and compared with growing values, -1, 0 or 1. It may be
               divided once, by the number of experts per token.
    BOUND      may be moved, added, and compared with anything.
    BY_EXPERT  may go through any integer function, since runs must try every expert id.
    masks      of values that are BOUND or GROW must be true and false in some run, in every node that computes, selects
               or joins them, and for each constant of a comparison with several. So must clamps, and masks that meet in
               one row or index in every combination (joint_masks.py).

Mock runs compute in float64 and never round, so floating-point numbers and narrow integers must be exact.
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
from moepass.passes.parallel.ranges.joint_masks import JointMasks
from moepass.passes.parallel.ranges.range_arithmetic import size_range
from moepass.passes.parallel.ranges.range_sums import RangeSums
from moepass.passes.parallel.ranges.value_range import COUNT, EMPTY, Kind, Range, computed, growing, joined

# Each element of the result is an element of one operand.
_ONE_SOURCE = (*(Trait.RESHAPE, Trait.EXPAND, Trait.PERMUTE, Trait.SLICE, Trait.SPLIT, Trait.REPEAT, Trait.FLIP),)
_JOINS = (Trait.JOIN, Trait.CHOOSE, Trait.PAD, Trait.WRITE, Trait.SLICE_WRITE)
_CHOICES = ("condition", "mask", "indices", "index")


class ValueRanges(RangeSums):
    """Ranges of a block's indices and sizes, and the values that its mock runs must try. Raises NotThisForm."""

    def __init__(self, block: ParallelBlock, data: set[Node], inside: Collection[Node]) -> None:
        super().__init__(block)
        self._add_sources()
        self._joint = JointMasks(self.range_of)
        by_row = {*inside, *(gemm.node for gemm in block.gemms)}
        for node in block.region:
            if node in inside:
                self._joint.add(node, None, by_row=True)
                continue
            if node.op == "call_function":
                check_sizes(node, self.structural, self.tokens)
            if node in data:
                self._check_indices(node, is_data=True)
                self._check_factors(node, data)
                self._joint.add(node, None, by_row=node in by_row)
                continue
            if dimensions_that_grow(node) > 1:
                # Pairs of rows grow with the square of the rows, which is a threshold without a constant.
                raise NotThisForm(f"{node.name} ({node.target}) has more than one dimension that grows; {CHANGE}")
            values = self._range(node)
            if values.kind is Kind.FIXED and not values.empty and not values.uniform and grows_in_size(node):
                values = values.at_least(Kind.BOUND)  # the order of constants depends on the number of elements
            check_type(node, values)
            self.ranges[node] = values = self.copied(node, values)
            self._require_both(node, values)
            self._joint.add(node, values)
            self._add_bound(node, values)

    def observe(self, node: Node, value: Any) -> None:
        """Record the value of `node` in a run. Raises NotThisForm if part of it is uninitialised memory."""
        if node in self.ranges and not self.ranges[node].empty:
            self.tried.observe(node, value)
        self._joint.observe(node, value)

    def check(self) -> None:
        """Raise NotThisForm for the first requirement that the runs did not meet."""
        self.tried.check()
        self._joint.check()

    def _add_sources(self) -> None:
        sources = self.block.sources
        if "ids" in sources:
            self.ranges[sources["ids"]] = Range(0, self.block.id_values - 1, Kind.BY_EXPERT, sources["ids"])
            # A graph without tokens has no ids, but may receive those of other ranks.
            if not _is_empty(sources["ids"]):
                self.tried.require_all(sources["ids"], self.block.id_values)
        if "counts" in sources:
            self.ranges[sources["counts"]] = COUNT

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
            self._check_indices(node)
            return self.summed(node, name, arguments)
        if has_trait(node, Trait.LOGICAL) or base in ("any", "all"):
            return self.logical(node)
        if base in ("add", "sub"):
            return self.added(node, base)
        if base in ("mul", "neg"):
            return self.multiplied(node, base)
        if has_trait(node, Trait.BOUND):
            return self.bounded(node, arguments)
        rounded = base == "div" and node.kwargs.get("rounding_mode") in ("floor", "trunc")
        if has_trait(node, Trait.FLOOR_DIVIDE, Trait.REMAINDER) or rounded:
            return self.divided(node)
        return self._created(node, base, arguments)

    def _created(self, node: Node, base: str, arguments: dict[str, Any]) -> Range:
        """Return the range of a created tensor, of the result of a collective, or of sorted values."""
        if has_trait(node, Trait.FILL, Trait.FILL_LIKE):
            return self.range_of(fill_value(node)).moved(node)
        if has_trait(node, Trait.EMPTY):
            return EMPTY
        if has_trait(node, Trait.SIZE):
            return size_range(fake_value(node))
        if has_trait(node, Trait.ARANGE):
            return self._arange(node, base, arguments)
        if base in ("all_gather_into_tensor", "all_to_all_single", "all_reduce"):
            sent = self.range_of(node.args[0])
            if sent.kind is Kind.BY_EXPERT:
                self.tried.require_all(node, self.block.id_values)
            # Values from other ranks were computed from their tokens.
            return sent.moved(node) if sent.kind in (Kind.BY_EXPERT, Kind.BOUND) else growing(sent)
        if base == "repeat_interleave":
            return self._repeated(node)
        if base == "sort":
            return self.range_of(node.args[0]).moved(node)
        if base == "argsort":
            return COUNT
        if base == "searchsorted":
            return self._searched(node, arguments)
        raise NotThisForm(f"{node.name} ({node.target}) is an unknown operation on indices or sizes; {CHANGE}")

    def _item(self, node: Node) -> Range:
        source, position = node.args
        is_order = isinstance(source, Node) and base_operation(source) == "sort" and position == 1
        return COUNT if is_order else self.range_of(source).moved(node)

    def _joined(self, node: Node, arguments: dict[str, Any]) -> Range:
        if is_accumulating_write(node):
            if str(fake_value(arguments["values"]).shape) != str(fake_value(arguments["indices"][0]).shape):
                raise NotThisForm(f"{node.name} ({node.target}) adds one value at several indices; {CHANGE}")
            self._check_indices(node)
            return self.summed(node, "index_add", {"self": arguments["self"], "source": arguments["values"]})
        elements = moved_elements(node) or [arguments["src"]]
        sources = [source for source in (self.range_of(element) for element in elements) if not source.empty]
        choices = [self.range_of(arguments[role]) for role in _CHOICES if role in arguments]
        self._check_indices(node)
        if any(source.grows for source in sources):
            for source in sources:
                self.check_constant(node, source)
        union = joined(*sources)
        if union.empty:
            return union
        # A choice takes operands element by element; joins and writes move them to other indices.
        by_element = has_trait(node, Trait.CHOOSE)
        choice = computed(0, 0, *choices, *(sources if by_element else ()), Range(0, 0))
        # The choice among bounded values may depend on growing values, but the result is bounded.
        union = union.at_least(choice.kind if any(source.grows for source in sources) else min(choice.kind, Kind.BOUND))
        if union.kind is Kind.BY_EXPERT:
            return dataclasses.replace(union, lane=choice.lane if by_element else node)
        if len([source for source in sources if source.grows]) > 1:
            union = dataclasses.replace(union, mixed=True)
        return growing(union) if union.grows else union

    def _looked_up(self, node: Node, arguments: dict[str, Any]) -> Range:
        self._check_indices(node)
        table, dimensions = self.range_of(node.args[0]), indexed_dimensions(arguments)
        if table.kind is not Kind.FIXED or table.uniform:
            return table.moved(node)
        kind = max(Kind.BOUND if is_mask(index) else self.range_of(index).kind for _, index in dimensions)
        if kind <= Kind.BY_EXPERT and len(dimensions) == 1:
            return dataclasses.replace(table, kind=kind, lane=node if kind is Kind.BY_EXPERT else None)
        # A run must look up every element of the table.
        for dim, index in dimensions:
            if is_mask(index) or len(dimensions) > 1:
                raise NotThisForm(f"{node.name} ({node.target}) looks up constants in several dimensions; {CHANGE}")
            size = size_along(node, fake_value(node.args[0]).shape, dim)  # type: ignore[arg-type]
            self.tried.require_all(index, int(size))
        return table.at_least(Kind.BOUND)

    def _arange(self, node: Node, base: str, arguments: dict[str, Any]) -> Range:
        if base == "iota":
            start, step, end = node.kwargs["start"], node.kwargs["step"], None
            length = self.range_of(node.args[0])
            if length.kind is Kind.FIXED and length.uniform and isinstance(start, int) and isinstance(step, int):
                last = start + step * max(0, length.low - 1)
                return Range(min(start, last), max(start, last))
        else:
            start, step, end = arguments.get("start", 0), arguments.get("step", 1), arguments["end"]
            if all(isinstance(bound, int) for bound in (start, step, end)):
                numbers = range(start, end, step)
                return Range(min(numbers, default=0), max(numbers, default=0))
            length = self.range_of(end)
        if start != 0 or step != 1:
            raise NotThisForm(f"{node.name} ({node.target}) starts at {start} with step {step}, not 0 and 1; {CHANGE}")
        if length.kind is Kind.FIXED and length.uniform:
            return Range(0, max(0, length.low - 1))
        return COUNT

    def _repeated(self, node: Node) -> Range:
        """Return the range of repeated indices or elements. Runs must have every index of a fixed number of counts."""
        if len(node.args) > 1:
            if not all(isinstance(argument, Node) for argument in node.args[:2]):
                raise NotThisForm(f"{node.name} ({node.target}) repeats by a constant; {CHANGE}")
            values = self.range_of(node.args[0])
            return values if values.uniform else values.moved(node).at_least(Kind.BOUND)
        size = fake_value(node.args[0]).shape[0]  # type: ignore[arg-type]
        if not isinstance(size, int):
            return COUNT
        self.tried.require_all(node, size)
        return Range(0, max(0, size - 1), Kind.BY_EXPERT, node)

    def _searched(self, node: Node, arguments: dict[str, Any]) -> Range:
        """Return the range of a binary search."""
        sequence, values = arguments["sorted_sequence"], self.range_of(arguments["self"])
        if arguments.get("sorter") is not None or values.empty or self.range_of(sequence).empty:
            raise NotThisForm(f"{node.name} ({node.target}) searches a sequence that may not be sorted; {CHANGE}")
        if self.range_of(sequence).kind <= Kind.BY_EXPERT and values.kind is Kind.FIXED:
            return COUNT  # of sorted expert ids
        raise NotThisForm(f"{node.name} ({node.target}) searches among growing indices or sizes; {CHANGE}")

    def _check_indices(self, node: Node, *, is_data: bool = False) -> None:
        """Check that the indices of a lookup or write stay within its tensor for every number of tokens."""
        arguments = named_arguments(node)
        if not has_trait(node, Trait.LOOKUP, Trait.WRITE, Trait.WRITE_SUM):
            return
        for dim, index in indexed_dimensions(arguments):
            if is_mask(index):
                continue
            values = self.range_of(index)
            size = size_along(node, fake_value(node.args[0]).shape, dim)  # type: ignore[arg-type]
            if is_data and isinstance(size, int) and grows_in_size(index) and self.is_of_tokens(size):
                continue  # a selection of a fixed number of rows
            check_lookup(node, node.args[0], dim, index, values)  # type: ignore[arg-type]
            elements = 1 if grows_in_size(index) else fake_value(index).numel()
            if values.grows and isinstance(size, int) and not self.is_of_tokens(elements):
                raise NotThisForm(
                    f"{node.name} ({node.target}) takes {elements} of {size} elements in an untried order; {CHANGE}"
                )

    def _check_factors(self, node: Node, data: set[Node]) -> None:
        """Check that rows are multiplied by and added to masks and constants only: runs do not try every number."""
        if base_operation(node) not in ("add", "sub", "mul"):
            return
        for used in node.all_input_nodes:
            if used not in data and self.range_of(used).kind > Kind.BY_EXPERT and not self.range_of(used).small:
                raise NotThisForm(f"{node.name} ({node.target}) computes rows with indices or sizes; {CHANGE}")

    def _require_both(self, node: Node, values: Range) -> None:
        if isinstance(fake_value(node), (tuple, list)):  # getitem on it gets the requirement
            return
        needs_both = values.kind > Kind.BY_EXPERT and values.small and not values.uniform
        if not needs_both or _is_empty(node) or self.tried.requires_both(node):
            return
        if values.low >= 0:
            self.tried.require_both(node)
        elif values.integral:  # -1, 0 and 1
            self.tried.require_all(node, int(values.high - values.low) + 1, first=int(values.low))

    def _add_bound(self, node: Node, result: Range) -> None:
        """Require that mock runs pass and do not pass each bound of a clamp, minimum or maximum."""
        if not has_trait(node, Trait.BOUND) or result.kind <= Kind.BY_EXPERT or self.tried.requires_both(node):
            return
        value, lower, upper = self.bounds_of(node, named_arguments(node))
        values = self.range_of(value)
        below = lower is not None and values.low < self.range_of(lower).high
        above = upper is not None and values.high > self.range_of(upper).low
        if below or above:
            self._joint.add_bound(node, value, below, above)


def _is_empty(node: Node) -> bool:
    value = fake_value(node)
    return isinstance(value, torch.Tensor) and 0 in [size for size in value.shape if isinstance(size, int)]
