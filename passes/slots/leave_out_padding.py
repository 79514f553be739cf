"""Leave out rows of padding that each branch of a loop over experts adds to its rows, and cuts off again.

Megatron-Core pads the rows of each expert in front of its GEMMs in fp8: `expert(cat([rows, zeros]))[:n]`. Each row is
computed alone, so that is `expert(rows)`, up to the rounding of GEMMs.

Contract
    in    a captured graph, in which Python's loops are unrolled
    out   the same graph, where what a loop over experts cuts to the rows that were padded is computed of these alone; a
          branch that does anything else with its rows, or reads the padding, stays as it is

Pseudo-code
    for each place where the branches of a loop over experts come together, and each cut of first rows in a branch:
        find where so many rows were padded, and what is computed of them before the cut
        write that once more, for the rows without padding (`rows_of_lookups.py`)
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.graph_writer import GraphWriter, described_sizes, erase_unread, refresh_fake_values
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.node_arguments import all_arguments
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.loops.write_grouped_gemms import ends_in_gemms, places_of_loops
from moepass.passes.slots.rows_of_lookups import RowsOfLookups, nodes_between

aten = torch.ops.aten

# Nodes that an expert computes with; a walk that meets more has left it.
_MOST_NODES = 200


@graph_pass(conflicts={"blocks"})
def leave_out_padding(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Compute the rows of experts in loops without their padding."""
    if not any(True for _ in _padded_cuts(module.graph)):
        return PassResult(module, plan)
    changed = copy_graph_module(module)
    graph = changed.graph
    matches: list[str] = []
    for cut in list(_padded_cuts(graph)):
        writer = GraphWriter(graph, cut)
        try:
            with graph.inserting_before(cut):
                result = _without_padding(cut, writer)
        except NotThisForm:
            writer.erase()
            continue
        matches.append(cut.name)
        has_other_size = described_sizes(fake_value(cut)) != described_sizes(fake_value(result))
        cut.replace_all_uses_with(result)
        erase_unread(graph, cut)
        if has_other_size:
            refresh_fake_values(graph, result)
    if not matches:
        return PassResult(module, plan)
    graph.lint()
    changed.recompile()
    return PassResult(changed, plan, tuple(matches))


def _padded_cuts(graph: Graph) -> Iterator[Node]:
    """Every cut, in the branches of loops over experts, of the rows that were padded before it."""
    told: set[Node] = set()
    for place in places_of_loops(graph):
        if not ends_in_gemms(place):
            continue
        for branch in place.branches:
            for node in _before(branch):
                if node not in told and _is_cut(node) and _paddings(node):
                    told.add(node)
                    yield node


def _before(start: Node) -> Iterator[Node]:
    """`start` and the floating tensors that it is computed from, nearest first."""
    pending, seen = [start], {start}
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop(0)
        yield node
        for used in node.all_input_nodes:
            value = fake_value(used)
            values = value if isinstance(value, (tuple, list)) else (value,)
            is_data = all(isinstance(one, torch.Tensor) and one.is_floating_point() for one in values)
            if used not in seen and used.op == "call_function" and is_data:
                seen.add(used)
                pending.append(used)


def _is_cut(node: Node) -> bool:
    """True for `rows[:n]` of a number that only a run tells."""
    if not is_call(node, aten.slice.Tensor):
        return False
    given = all_arguments(node)
    source, start = given["self"], given["start"] or 0
    is_first = given["dim"] % fake_value(source).dim() == 0 and isinstance(start, int) and start == 0
    before, after = size_expression(fake_value(source).shape[0]), _cut_to(node)
    return is_first and given["step"] == 1 and before != after and not before.is_Integer and not after.is_Integer


def _cut_to(cut: Node) -> sympy.Expr:
    """How many rows `cut` takes, where there are so many: its own size may be a number that only a run tells."""
    end = all_arguments(cut)["end"]
    return size_expression(fake_value(cut).shape[0] if end is None else end)


def _paddings(cut: Node) -> dict[Node, Node]:
    """What is padded to as many rows as `cut` is taken from, and has as many as it takes: with padding, and without."""
    source = cut.args[0]
    assert isinstance(source, Node)
    padded, rows = size_expression(fake_value(source).shape[0]), _cut_to(cut)
    found: dict[Node, Node] = {}
    pending, seen = [source], {source}
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop()
        without = _unpadded(node)
        if without is not None:
            sizes = [size_expression(fake_value(one).shape[0]) for one in (node, without)]
            # What is joined to rows makes them no fewer, as padding by less than 0 does.
            are_all = is_call(node, aten.cat.default) or size_expression(fake_value(cut).shape[0]) == rows
            if sizes == [padded, rows] and are_all:
                found[node] = without
            continue
        for used in node.all_input_nodes:
            if (
                used not in seen
                and used.op == "call_function"
                and isinstance(fake_value(used), (torch.Tensor, tuple, list))
            ):
                seen.add(used)
                pending.append(used)
    return found


def _unpadded(node: Node) -> Node | None:
    """The rows in front, where `node` puts others behind them; None where it does not."""
    if is_call(node, aten.cat.default):
        given = all_arguments(node)
        first = given["tensors"][0]
        return first if given["dim"] % fake_value(node).dim() == 0 and fake_value(first).dim() > 0 else None
    if is_call(node, aten.constant_pad_nd.default):
        source, pad = node.args[0], list(node.args[1])  # type: ignore[arg-type]
        *others, before, _ = pad
        is_of_rows = len(pad) == 2 * fake_value(node).dim() and all(
            isinstance(number, int) and number == 0 for number in (*others, before)
        )
        return source if is_of_rows else None  # type: ignore[return-value]
    return None


def _without_padding(cut: Node, writer: GraphWriter) -> Node:
    """The rows of `cut`, computed of those that were padded before it. Raises NotThisForm."""
    paddings = _paddings(cut)
    source = cut.args[0]
    assert isinstance(source, Node)
    rows = next(iter(paddings.values()))
    if source in paddings:
        return paddings[source]
    count = writer.size(rows, 0)

    def first_rows(used: Node) -> Node:
        return writer.emit(aten.slice.Tensor, used, 0, 0, count)

    repeated = [node for node in nodes_between(paddings, source) if node not in paddings]
    written = RowsOfLookups(
        writer, {}, paddings, size_expression(fake_value(source).shape[0]), count, None, first_rows
    ).write(repeated)
    old, new = fake_value(cut), fake_value(written)
    sizes = [size_expression(new.shape[0]), *map(size_expression, old.shape[1:])]
    if old.dtype != new.dtype or sizes != [_cut_to(cut), *map(size_expression, new.shape[1:])]:
        raise NotThisForm(f"it gives {list(new.shape)} where it gave {list(old.shape)}")
    return written
