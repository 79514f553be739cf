"""Slices of which it is known that they are all rows, one after the other, become pieces of a split.

    start = 0
    for expert, count in zip(experts, counts.tolist()):
        outputs.append(expert(rows[start : start + count]))
        start += count

A slice ends where the rows end, so the graph does not say that each is `count` rows long. It is, where no count is
below zero and all of them add up to the number of rows; then `rows.split(counts)` is the same, and says so. Known are

    counts of chosen ids    tokens · k together
    counts that arrive      for each expert, where `rows` are as many as the same counts, added up for each rank
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.collectives import collective_of
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread, refresh_fake_values
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call
from moepass.passes.loops.known_totals import (
    KnownCounts,
    NotKnownError,
    erase_assertion,
    known_total,
    read_tables,
    reads_of,
)
from moepass.passes.ops.arguments import all_arguments, fill_number
from moepass.passes.ops.traits import Trait, base_operation, has_trait, operation
from moepass.passes.ops.walk import origin

aten = torch.ops.aten

# Some of the numbers, as those of the experts of this rank.
# The same numbers in another order, shape or dtype.
_SAME_NUMBERS = (Trait.PERMUTE, Trait.RESHAPE, Trait.COPY, Trait.CAST)
_WIDE = (torch.bool, torch.int32, torch.int64, torch.float32)


def split_known_slices(module: GraphModule) -> GraphModule:
    """A copy of `module` in which such slices are pieces of a split; `module` itself where there are none."""
    if not any(True for table in read_tables(module.graph) for _ in _slices_by(table)):
        return module
    changed = copy_graph_module(module)
    try:
        for table in read_tables(changed.graph):
            for pieces, reads in list(_slices_by(table)):
                _split(changed.graph, pieces, reads)
    except Exception:  # whatever an operator says to sizes that it was not captured for
        return module
    changed.graph.lint()
    changed.recompile()
    return changed


def _slices_by(table: Node) -> Iterator[tuple[list[Node], list[Node]]]:
    """The slices that the numbers of `table` cut all rows of a tensor into, and the nodes that read these numbers."""
    try:
        reads = reads_of(table)
    except NotKnownError:
        return
    symbols = [size_expression(read) for read in reads]
    ends = [*itertools.accumulate(symbols, lambda one, other: sympy.expand(one + other))]
    wanted = [*zip([sympy.Integer(0), *ends[:-1]], ends, strict=True)]
    found: dict[tuple[Node, int], dict[tuple[sympy.Expr, sympy.Expr], Node]] = {}
    for node in table.graph.nodes:
        if is_call(node, aten.slice.Tensor):
            given = all_arguments(node)
            if given["step"] == 1 and isinstance(given["end"], Node):
                bounds = tuple(sympy.expand(size_expression(one or 0)) for one in (given["start"], given["end"]))
                dim = given["dim"] % fake_value(node).dim()
                found.setdefault((given["self"], dim), {})[bounds] = node
    for (source, dim), by_bounds in found.items():
        pieces = [by_bounds[bounds] for bounds in wanted if bounds in by_bounds]
        is_known = [size_expression(fake_value(piece).shape[dim]) for piece in pieces] == symbols
        if len(pieces) != len(reads) or is_known or not all(read < piece for read in reads for piece in pieces):
            continue
        if _add_up_to(table, len(reads), size_expression(fake_value(source).shape[dim])):
            yield pieces, reads


def _split(graph: Graph, pieces: list[Node], reads: list[Node]) -> None:
    first = min(pieces)
    given = all_arguments(first)
    rows = size_expression(fake_value(given["self"]).shape[given["dim"]])
    writer = GraphWriter(graph, first)
    with graph.inserting_before(first):
        split = writer.emit(aten.split_with_sizes.default, given["self"], reads, given["dim"])
        parts = [writer.getitem(split, number) for number in range(len(pieces))]
    for piece, part in zip(pieces, parts, strict=True):
        piece.replace_all_uses_with(part)
    for piece in reversed(pieces):
        erase_unread(graph, piece)  # with the sums that it starts and ends at
    refresh_fake_values(graph, *parts)
    # Such as that each slice ends before the rows do: it is known now.
    for assertion, is_true in KnownCounts.of(reads, rows).assertions(graph):
        if is_true:
            erase_assertion(graph, assertion)


def _add_up_to(counts: Node, experts: int, rows: sympy.Expr) -> bool:
    """True where none of `counts` [experts] is below zero, and they add up to `rows`."""
    total = known_total(counts, experts)
    if total is not None:
        return bool(sympy.expand(total - rows) == 0)
    added = _added_up(counts)
    return _is_count(added) and any(
        sympy.expand(sympy.Add(*map(size_expression, reads)) - rows) == 0
        for reads in _reads_of_sums(counts.graph, added)
    )


def _reads_of_sums(graph: Graph, added: Node) -> Iterator[list[Node]]:
    """Reads of all numbers of each table that is computed by adding up all of `added`."""
    for table in read_tables(graph):
        if _added_up(table) is added:
            try:
                yield reads_of(table)
            except NotKnownError:
                continue


def _added_up(node: Node) -> Node:
    """Return a tensor whose sum is that of `node`; no step between them has a narrower dtype."""

    def keeps_sum(step: Node) -> bool:
        dtype = fake_value(step).dtype
        if dtype not in (torch.int32, torch.int64):
            return False
        is_sum = has_trait(step, *_SAME_NUMBERS) or operation(step) == "sum.dim_IntList"
        return is_sum and fake_value(step.all_input_nodes[0]).dtype in (torch.bool, torch.int32, dtype)

    return origin(node, passes=keeps_sum)


def _is_count(node: Node) -> bool:
    """True for numbers of which none is below zero, as far as that is seen."""
    base, value = base_operation(node), fake_value(node)
    # Narrow types may hold less than was counted, and make numbers below zero of it.
    if not isinstance(value, torch.Tensor) or value.dtype not in _WIDE:
        return False
    if value.dtype is torch.bool:
        return True
    if base in ("histc", "bincount"):
        return all_arguments(node).get("weights") is None
    if base in ("scatter", "scatter_add"):
        given = all_arguments(node)
        written = given.get("src", given.get("value"))
        return given.get("reduce") is None and _is_made(given["self"]) and _is_made(written)
    if is_call(node, aten.copy.default):  # what torch.distributed writes into memory that was given
        return _is_count(all_arguments(node)["src"])
    collective = collective_of(node)
    if collective is not None:
        return collective.kind in ("all_to_all", "all_gather") and _is_count(collective.input)
    passes_on = has_trait(node, *_SAME_NUMBERS, Trait.SLICE, Trait.WAIT) or base in ("index_select", "sum")
    return passes_on and _is_count(node.all_input_nodes[0])


def _is_made(given: object) -> bool:
    """True for a number that is not below zero, or a tensor of one."""
    number = fill_number(given) if isinstance(given, Node) else given
    return isinstance(number, (bool, int, float)) and number >= 0
