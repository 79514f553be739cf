"""Lookups that read the capacity slots of a block's experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from moepass.passes.blocks.detect import BlockMatch
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.arguments import all_arguments, fill_number
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.ops.walk import descendants, first_inputs, origin

aten = torch.ops.aten

# Limit for the operations between the experts and the lookups; a walk that meets more has left the block.
_MOST_NODES = 60


@dataclasses.dataclass(frozen=True)
class ReadTable:
    """The `lookups` of rows of a `table`, which are the only readers of the experts' results.

    The table has rows filled with the number `fill`: `before` of them, then the `slots` [slots, ..], then `after`.
    """

    lookups: tuple[Node, ...]
    table: Node
    slots: Node
    before: Any = 0
    after: Any = 0
    fill: float | None = None

    @property
    def ids(self) -> tuple[Node, ...]:
        return tuple(ids_of_lookup(lookup)[1] for lookup in self.lookups)


def read_table(match: BlockMatch) -> ReadTable:
    """Return the readers of the slots of a block's experts. Raises NotThisForm unless all are lookups of rows."""
    lookups, between = _readers(match.gemms[-1].node)
    tables = {_without_views(ids_of_lookup(lookup)[0]) for lookup in lookups}
    if len(tables) != 1:
        raise NotThisForm(f"its slots are read by lookups in {len(tables)} tables")
    (table,) = tables
    return _table(tuple(lookups), table, between)


def ids_of_lookup(node: Node) -> tuple[Node, Node]:
    """Return the table whose rows `node` looks up, and the indices. Raises NotThisForm for other nodes."""
    if is_call(node, aten.index_select.default, aten.index.Tensor):
        arguments = all_arguments(node)
        source = arguments["self"]
        ids = [arguments["index"]] if "index" in arguments else list(arguments["indices"])
        dims = fake_value(source).dim()
        is_of_rows = arguments.get("dim", 0) % max(1, dims) == 0 and len(ids) == 1 and dims > 1
        if is_of_rows and isinstance(ids[0], Node) and fake_value(ids[0]).dtype in (torch.int32, torch.int64):
            return source, ids[0]
    raise NotThisForm(f"{named(node)} is not a lookup of rows")


def is_lookup_of_rows(node: Node) -> bool:
    try:
        ids_of_lookup(node)
    except NotThisForm:
        return False
    return True


def even_groups(ends: Node) -> tuple[int, Any]:
    """Return the number of experts, and of rows of each, if all have equally many. Raises NotThisForm."""
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
    raise NotThisForm(f"{named(ends)} does not say that all experts have as many rows")


def _readers(down: Node) -> tuple[list[Node], set[Node]]:
    """Return the sorted lookups at the end of every path from `down`, and all nodes before them. Raises NotThisForm."""
    lookups: dict[Node, None] = {}
    between: set[Node] = set()
    for user in descendants(down, stop=is_lookup_of_rows):
        if is_lookup_of_rows(user):
            lookups[user] = None
            continue
        if user.op != "call_function" or not user.users or len(between) > _MOST_NODES:
            raise NotThisForm(f"its slots are read by {named(user)}, which is not a lookup")
        between.add(user)
    for lookup in lookups:
        table, ids = ids_of_lookup(lookup)
        if table not in between or ids in between:
            raise NotThisForm(f"{named(lookup)} looks up with indices that the experts compute")
    return sorted(lookups), between


def _without_views(node: Node) -> Node:
    """Return `node` without operations that return the same elements in the same shape."""

    def is_same(step: Node) -> bool:
        return has_trait(step, Trait.COPY, Trait.RESHAPE) and _sizes(step.all_input_nodes[0]) == _sizes(step)

    return origin(node, passes=is_same)


def _table(lookups: tuple[Node, ...], table: Node, between: set[Node]) -> ReadTable:
    arguments = all_arguments(table) if table.op == "call_function" else {}
    if is_call(table, aten.cat.default) and arguments.get("dim", 0) % fake_value(table).dim() == 0:
        tensors = list(arguments["tensors"])
        fills = {tensor: fill_number(tensor) for tensor in tensors}
        (slots, *more) = [tensor for tensor in tensors if fills[tensor] is None] or [table]
        numbers = {fill for fill in fills.values() if fill is not None}
        types = {fake_value(tensor).dtype for tensor in tensors}
        if more or slots not in between or len(numbers) != 1 or len(types) != 1:
            raise NotThisForm(f"{named(table)} joins the slots with something other than rows of one number")
        index = tensors.index(slots)
        before, after = (_total_rows(fillers) for fillers in (tensors[:index], tensors[index + 1 :]))
        return ReadTable(lookups, table, slots, before, after, numbers.pop())
    if is_call(table, aten.constant_pad_nd.default):
        source, pad = arguments["self"], list(arguments["pad"])
        dims = fake_value(source).dim()
        if source in between and len(pad) == 2 * dims and not any(pad[:-2]) and all(size >= 0 for size in pad[-2:]):
            return ReadTable(lookups, table, source, pad[-2], pad[-1], arguments.get("value", 0))
    if table not in between:
        raise NotThisForm(f"{named(table)} is not a result of its experts")
    return ReadTable(lookups, table, table)


def _total_rows(nodes: Sequence[Node]) -> int:
    sizes = [fake_value(node).shape[0] for node in nodes]
    if not all(isinstance(size, int) for size in sizes):
        raise NotThisForm("the slots are joined with a number of rows that is only known at run time")
    return sum(sizes)


def _sizes(node: Node) -> list[sympy.Expr]:
    return [*map(size_expression, fake_value(node).shape)]
