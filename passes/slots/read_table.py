"""Lookups that read the capacity slots of a block's experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.blocks.detect import BlockMatch
from moepass.passes.graph.input_sizes import have_equal_shapes
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm, refuse
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.arguments import all_arguments, fill_number
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.ops.walk import descendants, first_inputs

aten = torch.ops.aten

# Limit for the operations between the experts and the lookups; a walk that meets more has left the block.
_MOST_NODES = 60


@dataclasses.dataclass(frozen=True)
class RowLookup:
    """A lookup `node` of rows `ids` of a `table`."""

    node: Node
    table: Node
    ids: Node


@dataclasses.dataclass(frozen=True)
class ReadTable:
    """The `lookups` of rows of a table, which are the only readers of the experts' results.

    The table has rows filled with the number `fill`: `before` of them, then the `slots` [slots, ..], then `after`.
    """

    lookups: list[RowLookup]
    slots: Node
    before: Any = 0
    after: Any = 0
    fill: float | None = None


def read_table(match: BlockMatch) -> ReadTable:
    """Return the readers of the slots of a block's experts. Raises NotThisForm unless all are lookups of rows."""
    lookups, between = _readers(match.gemms[-1].node)
    tables = {without_views(lookup.table, Trait.RESHAPE, Trait.COPY) for lookup in lookups}
    if len(tables) != 1:
        raise NotThisForm(f"its slots are read by lookups in {len(tables)} tables")
    return _table(lookups, tables.pop(), between)


def lookup_of_rows(node: Node) -> RowLookup | None:
    """Return `node` as a lookup of rows, or None."""
    if not is_call(node, aten.index_select.default, aten.index.Tensor):
        return None
    arguments = all_arguments(node)
    table = arguments["self"]
    ids = [arguments["index"]] if "index" in arguments else list(arguments["indices"])
    dims = fake_value(table).dim()
    is_of_rows = arguments.get("dim", 0) % max(1, dims) == 0 and len(ids) == 1 and dims > 1
    are_numbers = isinstance(ids[0], Node) and fake_value(ids[0]).dtype in (torch.int32, torch.int64)
    return RowLookup(node, table, ids[0]) if is_of_rows and are_numbers else None


def without_views(node: Node, *traits: Trait) -> Node:
    """Return the first tensor in the shape of `node` in the chain of operations with `traits` that ends at `node`."""
    *_, first = (
        source
        for source in first_inputs(node, lambda step: has_trait(step, *traits))
        if have_equal_shapes(source, node)
    )
    return first


def even_groups(ends: Node) -> tuple[int, Any] | None:
    """Return the number of experts, and of rows of each, if all are known to have equally many, or None."""
    chain = [*first_inputs(ends, lambda step: has_trait(step, Trait.CAST, Trait.COPY))]
    if is_call(chain[-1], aten.cumsum.default):
        chain.append(all_arguments(chain[-1])["self"])
        # The ends of many rows may overflow a smaller type.
        is_exact = all(fake_value(node).dtype in (torch.int32, torch.int64) for node in chain)
        if is_exact and is_call(chain[-1], aten.full.default):
            arguments = all_arguments(chain[-1])
            size, each = arguments["size"], arguments["fill_value"]
            if len(size) == 1 and isinstance(size[0], int) and isinstance(each, (int, Node)):
                return size[0], each
    return None


def _readers(down: Node) -> tuple[list[RowLookup], set[Node]]:
    """Return the sorted lookups at the end of every path from `down`, and all nodes before them. Raises NotThisForm."""
    lookups: list[RowLookup] = []
    between: set[Node] = set()
    for user in descendants(down, stop=lambda user: lookup_of_rows(user) is not None):
        lookup = lookup_of_rows(user)
        if lookup is not None:
            lookups.append(lookup)
        elif user.op != "call_function" or not user.users or len(between) > _MOST_NODES:
            raise NotThisForm(f"its slots are read by {named(user)}, which is not a lookup")
        else:
            between.add(user)
    for lookup in lookups:
        if lookup.table not in between or lookup.ids in between:
            refuse(lookup.node, "looks up with indices that the experts compute")
    return sorted(lookups, key=lambda lookup: lookup.node), between


def _table(lookups: list[RowLookup], table: Node, between: set[Node]) -> ReadTable:
    arguments = all_arguments(table) if table.op == "call_function" else {}
    if is_call(table, aten.cat.default) and arguments.get("dim", 0) % fake_value(table).dim() == 0:
        tensors = list(arguments["tensors"])
        fills = {tensor: fill_number(tensor) for tensor in tensors}
        (slots, *more) = [tensor for tensor in tensors if fills[tensor] is None] or [table]
        numbers = {fill for fill in fills.values() if fill is not None}
        types = {fake_value(tensor).dtype for tensor in tensors}
        if more or slots not in between or len(numbers) != 1 or len(types) != 1:
            refuse(table, "joins the slots with something other than rows of one number")
        index = tensors.index(slots)
        before, after = (_total_rows(fillers) for fillers in (tensors[:index], tensors[index + 1 :]))
        return ReadTable(lookups, slots, before, after, numbers.pop())
    if is_call(table, aten.constant_pad_nd.default):
        source, pad = arguments["self"], list(arguments["pad"])
        dims = fake_value(source).dim()
        if source in between and len(pad) == 2 * dims and not any(pad[:-2]) and all(size >= 0 for size in pad[-2:]):
            return ReadTable(lookups, source, pad[-2], pad[-1], arguments.get("value", 0))
    if table not in between:
        refuse(table, "is not a result of its experts")
    return ReadTable(lookups, table)


def _total_rows(nodes: Sequence[Node]) -> int:
    sizes = [fake_value(node).shape[0] for node in nodes]
    if not all(isinstance(size, int) for size in sizes):
        raise NotThisForm("the slots are joined with a number of rows that is only known at run time")
    return sum(sizes)
