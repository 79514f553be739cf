"""Replacement of consecutive slices that are known to be all rows by the pieces of a split.

    start = 0
    for expert, count in zip(experts, counts.tolist()):
        outputs.append(expert(rows[start : start + count]))
        start += count

A slice ends at the last row, so the graph does not show that it has `count` rows. If no count is negative and the sum
of all is the number of rows, then `rows.split(counts)` is the same, and shows it. This is known for

    counts of chosen ids    their sum is tokens · k
    received counts         if the number of rows is the sum of the same counts, summed by rank first
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

# The same numbers in another order, shape or dtype.
_KEEPS_NUMBERS = (Trait.PERMUTE, Trait.RESHAPE, Trait.COPY, Trait.CAST)
_WIDE = (torch.bool, torch.int32, torch.int64, torch.float32)


def split_known_slices(module: GraphModule) -> GraphModule:
    """Return a copy of `module` with splits instead of such slices, or `module` itself if it has none."""
    if not any(True for table in read_tables(module.graph) for _ in _slices_by(table)):
        return module
    changed = copy_graph_module(module)
    try:
        for table in read_tables(changed.graph):
            for pieces, reads in list(_slices_by(table)):
                _split(changed.graph, pieces, reads)
    except Exception:  # operators raise various errors for sizes that they were not captured for
        return module
    changed.graph.lint()
    changed.recompile()
    return changed


def _slices_by(table: Node) -> Iterator[tuple[list[Node], list[Node]]]:
    """Yield slices that are all rows of a tensor, with sizes from `table`, and the reads of these sizes."""
    try:
        reads = reads_of(table)
    except NotKnownError:
        return
    symbols = [size_expression(read) for read in reads]
    ends = [*itertools.accumulate(symbols, lambda left, right: sympy.expand(left + right))]
    expected = [*zip([sympy.Integer(0), *ends[:-1]], ends, strict=True)]
    slices: dict[tuple[Node, int], dict[tuple[sympy.Expr, sympy.Expr], Node]] = {}
    for node in table.graph.nodes:
        if is_call(node, aten.slice.Tensor):
            values = all_arguments(node)
            if values["step"] == 1 and isinstance(values["end"], Node):
                bounds = tuple(sympy.expand(size_expression(bound or 0)) for bound in (values["start"], values["end"]))
                dim = values["dim"] % fake_value(node).dim()
                slices.setdefault((values["self"], dim), {})[bounds] = node
    for (source, dim), by_bounds in slices.items():
        pieces = [by_bounds[bounds] for bounds in expected if bounds in by_bounds]
        is_known = [size_expression(fake_value(piece).shape[dim]) for piece in pieces] == symbols
        if len(pieces) != len(reads) or is_known or not all(read < piece for read in reads for piece in pieces):
            continue
        if _have_sum(table, len(reads), size_expression(fake_value(source).shape[dim])):
            yield pieces, reads


def _split(graph: Graph, pieces: list[Node], reads: list[Node]) -> None:
    first = min(pieces)
    arguments = all_arguments(first)
    rows = size_expression(fake_value(arguments["self"]).shape[arguments["dim"]])
    writer = GraphWriter(graph, first)
    with graph.inserting_before(first):
        split = writer.emit(aten.split_with_sizes.default, arguments["self"], reads, arguments["dim"])
        replacements = [writer.getitem(split, number) for number in range(len(pieces))]
    for piece, replacement in zip(pieces, replacements, strict=True):
        piece.replace_all_uses_with(replacement)
    for piece in reversed(pieces):
        erase_unread(graph, piece)  # with the sums that are its start and end
    refresh_fake_values(graph, *replacements)
    # For example, that each slice ends within the rows.
    for assertion, is_true in KnownCounts.of(reads, rows).assertions(graph):
        if is_true:
            erase_assertion(graph, assertion)


def _have_sum(counts: Node, experts: int, rows: sympy.Expr) -> bool:
    """Return whether `counts` [experts] are known to be nonnegative, and their sum to be `rows`."""
    total = known_total(counts, experts)
    if total is not None:
        return bool(sympy.expand(total - rows) == 0)
    source = _sum_source(counts)
    return _is_nonnegative(source) and any(
        sympy.expand(sympy.Add(*map(size_expression, reads)) - rows) == 0
        for reads in _reads_of_sums(counts.graph, source)
    )


def _reads_of_sums(graph: Graph, source: Node) -> Iterator[list[Node]]:
    """Yield the reads of each table whose sum is that of `source`, as `_sum_source` finds it."""
    for table in read_tables(graph):
        if _sum_source(table) is source:
            try:
                yield reads_of(table)
            except NotKnownError:
                continue


def _sum_source(node: Node) -> Node:
    """Return a tensor whose sum is that of `node`; no step between them has a narrower dtype."""

    def keeps_sum(step: Node) -> bool:
        dtype = fake_value(step).dtype
        if dtype not in (torch.int32, torch.int64):
            return False
        is_sum = has_trait(step, *_KEEPS_NUMBERS) or operation(step) == "sum.dim_IntList"
        return is_sum and fake_value(step.all_input_nodes[0]).dtype in (torch.bool, torch.int32, dtype)

    return origin(node, passes=keeps_sum)


def _is_nonnegative(node: Node) -> bool:
    """Return whether no number of `node` is negative; False if that is not certain."""
    base, value = base_operation(node), fake_value(node)
    # Counts may overflow in narrow types and become negative.
    if not isinstance(value, torch.Tensor) or value.dtype not in _WIDE:
        return False
    if value.dtype is torch.bool:
        return True
    if base in ("histc", "bincount"):
        return all_arguments(node).get("weights") is None
    if base in ("scatter", "scatter_add"):
        values = all_arguments(node)
        written = values.get("src", values.get("value"))
        return values.get("reduce") is None and _has_nonnegative_fill(values["self"]) and _has_nonnegative_fill(written)
    if is_call(node, aten.copy.default):  # a result that torch.distributed writes to an argument
        return _is_nonnegative(all_arguments(node)["src"])
    collective = collective_of(node)
    if collective is not None:
        return collective.kind in ("all_to_all", "all_gather") and _is_nonnegative(collective.input)
    passes_on = has_trait(node, *_KEEPS_NUMBERS, Trait.SLICE, Trait.WAIT) or base in ("index_select", "sum")
    return passes_on and _is_nonnegative(node.all_input_nodes[0])


def _has_nonnegative_fill(value: object) -> bool:
    """Return whether `value` is a nonnegative number, or a tensor filled with one."""
    number = fill_number(value) if isinstance(value, Node) else value
    return isinstance(number, (bool, int, float)) and number >= 0
