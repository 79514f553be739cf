"""Ranges of values that are moved, looked up, created, or received from other ranks. Functions raise NotThisForm."""

from __future__ import annotations

import dataclasses
import math

from torch.fx import Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.ops.arguments import (
    fill_value,
    indexed_dimensions,
    is_accumulating_write,
    is_mask,
    moved_elements,
    named_arguments,
)
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.parallel.ranges.growing_sizes import refuse, size_along
from moepass.passes.parallel.ranges.known_ranges import KnownRanges, Rules
from moepass.passes.parallel.ranges.range_arithmetic import summed
from moepass.passes.parallel.ranges.value_range import COUNT, EMPTY, Kind, Range, computed, growing, joined


def moved(node: Node, known: KnownRanges) -> Range:
    """Return the range of elements of one operand in another order."""
    return known.range_of(node.args[0]).moved(node)


def item(node: Node, known: KnownRanges) -> Range:
    """Return the range of one of several results."""
    source, position = node.args
    return COUNT if has_trait(source, Trait.SORT) and position == 1 else moved(node, known)


def chosen(node: Node, known: KnownRanges) -> Range:
    """Return the range of a value with elements of several operands, or of a write that accumulates."""
    arguments = named_arguments(node)
    if is_accumulating_write(node):
        if str(fake_value(arguments["values"]).shape) != str(fake_value(arguments["indices"][0]).shape):
            refuse(node, "adds one value at several indices")
        return summed(node, known)
    known.check_indices(node)
    elements = moved_elements(node) or [arguments["src"]]
    sources = [source for source in map(known.range_of, elements) if not source.empty]
    known.check_constants(node, *sources)
    union = joined(*sources)
    if union.empty:
        return union
    growing_sources = sum(source.grows for source in sources)
    choices = [known.range_of(arguments.get(role)) for role in ("condition", "mask", "indices", "index")]
    # A choice takes operands element by element; joins and writes move them to other indices.
    by_element = has_trait(node, Trait.CHOOSE)
    choice = computed(0, 0, *choices, *(sources if by_element else ()), Range(0, 0))
    # The choice among bounded values may depend on growing values, but the result is bounded.
    union = union.at_least(choice.kind if growing_sources else min(choice.kind, Kind.BOUND))
    if union.kind is Kind.BY_EXPERT:
        return dataclasses.replace(union, lane=choice.lane if by_element else node)
    if growing_sources > 1:
        union = dataclasses.replace(union, mixed=True)
    return growing(union) if union.grows else union


def looked_up(node: Node, known: KnownRanges) -> Range:
    """Return the range of a lookup. Runs must look up every element of a table of constants."""
    known.check_indices(node)
    table, dimensions = known.range_of(node.args[0]), indexed_dimensions(named_arguments(node))
    if table.kind is not Kind.FIXED or table.uniform:
        return table.moved(node)
    kind = max(Kind.BOUND if is_mask(index) else known.range_of(index).kind for _, index in dimensions)
    if kind <= Kind.BY_EXPERT and len(dimensions) == 1:
        return dataclasses.replace(table, kind=kind, lane=node if kind is Kind.BY_EXPERT else None)
    for dim, index in dimensions:
        if is_mask(index) or len(dimensions) > 1:
            refuse(node, "looks up constants in several dimensions")
        size = size_along(node, fake_value(node.args[0]).shape, dim)  # type: ignore[arg-type]
        known.tried.require_all(index, int(size))
    return table.at_least(Kind.BOUND)


def counted_up(node: Node, known: KnownRanges) -> Range:
    """Return the range of an arange."""
    arguments = named_arguments(node)
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    is_iota = base_operation(node) == "iota"
    length = known.range_of(node.args[0] if is_iota else arguments["end"])
    is_known = length.kind is Kind.FIXED and length.uniform
    if is_known and isinstance(start, int) and isinstance(step, int):
        number = math.ceil(length.low)
        numbers = range(start, start + step * number if is_iota else number, step)
        return Range(min(numbers, default=0), max(numbers, default=0))
    if start != 0 or step != 1:
        refuse(node, f"starts at {start} with step {step}, not 0 and 1")
    return COUNT


def received(node: Node, known: KnownRanges) -> Range:
    """Return the range of the result of a collective. Other ranks computed their values from their tokens."""
    sent = known.range_of(node.args[0])
    if sent.kind is Kind.BY_EXPERT:
        known.tried.require_all(node, known.block.id_values)
    return sent.moved(node) if sent.kind in (Kind.BY_EXPERT, Kind.BOUND) else growing(sent)


def repeated(node: Node, known: KnownRanges) -> Range:
    """Return the range of repeated indices or elements. Runs must have every index of a fixed number of counts."""
    if len(node.args) > 1:
        if not all(isinstance(argument, Node) for argument in node.args[:2]):
            refuse(node, "repeats by a constant")
        values = known.range_of(node.args[0])
        return values if values.uniform else values.moved(node).at_least(Kind.BOUND)
    size = fake_value(node.args[0]).shape[0]  # type: ignore[arg-type]
    if not isinstance(size, int):
        return COUNT
    known.tried.require_all(node, size)
    return Range(0, max(0, size - 1), Kind.BY_EXPERT, node)


MOVE_RULES: Rules = (
    ((Trait.COPY, Trait.CAST, Trait.WAIT, "_local_scalar_dense"), lambda node, known: known.range_of(node.args[0])),
    ((Trait.RESHAPE, Trait.EXPAND, Trait.PERMUTE, Trait.SLICE, Trait.SPLIT, Trait.REPEAT, Trait.FLIP, "sort"), moved),
    ((Trait.ITEM,), item),
    ((Trait.JOIN, Trait.CHOOSE, Trait.PAD, Trait.WRITE, Trait.SLICE_WRITE, "copy"), chosen),
    ((Trait.LOOKUP,), looked_up),
    (("all_gather_into_tensor", "all_to_all_single", "all_reduce"), received),
    (("repeat_interleave",), repeated),
    ((Trait.FILL, Trait.FILL_LIKE), lambda node, known: known.range_of(fill_value(node)).moved(node)),
    ((Trait.EMPTY,), lambda node, known: EMPTY),
    ((Trait.ARANGE,), counted_up),
    ((Trait.SIZE,), lambda node, known: known.range_of(node)),
    (("argsort",), lambda node, known: COUNT),
)
