"""Follow rows through moves and casts outside the experts. The local form repeats the casts in the same order.

Mock runs use float64 and do not test casts. A cast commutes with moves of rows, so if rows are only moved and cast
between two nodes, each row goes through the casts on its path. All paths must have the same casts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import Collective, collective_of
from moepass.passes.graph.nodes import fake_value, is_call, is_float, several
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.arguments import is_accumulating_write
from moepass.passes.ops.walk import ancestors, walk
from moepass.passes.parallel.match.near_experts import is_new_memory, moves_rows

aten = torch.ops.aten


def moved_values(node: Node) -> set[Node]:
    """Return the values, except filled and empty memory, whose rows `node` moves; `node` itself if it is no move."""

    def is_data(used: Node) -> bool:
        return isinstance(fake_value(used), (tuple, list)) or is_float(used)

    values = ancestors(node, follow=is_data, stop=lambda used: not moves_rows(used))
    return {used for used in values if not is_new_memory(used) and not moves_rows(used)}


def exchanged_by(node: Node) -> Collective | None:
    """Return the collective whose result `node` is, with its rows in any order, or None."""
    values = moved_values(node)
    return collective_of(values.pop()) if len(values) == 1 else None


@dataclasses.dataclass(frozen=True)
class Casts:
    """The dtypes of rows from the first to the last, and the nodes on their paths; both empty without casts."""

    types: tuple[torch.dtype, ...]
    nodes: frozenset[Node]


def casts_between(end: Node, start: Node, region: Collection[Node]) -> Casts:
    """Return the casts of rows from `start` to `end`. Raises NotThisForm if they are cast and computed with."""

    def is_between(node: Node) -> bool:
        return node is not start and node in region

    if not any(is_between(node) and changes_type(node) for node in ancestors(end, follow=is_between)):
        return Casts((), frozenset())
    types: dict[Node, tuple[torch.dtype, ...] | None] = {}
    for node in sorted(walk([end], lambda node: () if node is start or _is_constant(node) else _data_of(node))):
        if node is start or _is_constant(node):
            types[node] = (_type(node),) if node is start else None
            continue
        sequences = {sequence for used in _data_of(node) if (sequence := types[used]) is not None}
        if len(sequences) != 1:
            raise NotThisForm(
                f"rows come to {named(node)} in {' and in '.join(map(str, sequences)) or 'no type that is known'}; "
                "expected the same casts of all rows"
            )
        (before,) = sequences
        types[node] = before if _type(node) is before[-1] else (*before, _type(node))
    result = types[end]
    if result is None:
        raise NotThisForm(f"{named(end)} holds no rows")
    return Casts(result, frozenset(types))


def changes_type(node: Node) -> bool:
    """Return whether `node` reads a floating-point tensor of another dtype than its result."""
    if node.op != "call_function" or _is_constant(node):
        return False
    dtype = _type_or_none(node)
    operands = (used for used in node.all_input_nodes if not _is_scalar(used))
    return dtype is not None and any(_type_or_none(used) not in (None, dtype) for used in operands)


def _data_of(node: Node) -> list[Node]:
    """Return the inputs from which a move takes rows. Raises NotThisForm if `node` computes."""
    collective = collective_of(node)
    if collective is not None:
        return [collective.input]
    if not moves_rows(node) or is_call(node, aten.view.dtype) or is_accumulating_write(node):
        raise NotThisForm(
            f"it casts rows, and computes with them at {named(node)}, so its local form would round differently; "
            "expected rows to be moved and cast only, outside the experts"
        )
    return [used for used in node.all_input_nodes if _type_or_none(used) is not None]


def _is_constant(node: Node) -> bool:
    """Return whether `node` is a constant or filled memory, such as padding or the fill value of a mask."""
    return node.op == "get_attr" or is_new_memory(node)


def _is_scalar(node: Node) -> bool:
    value = fake_value(node)
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _type(node: Node) -> torch.dtype:
    dtype = _type_or_none(node)
    if dtype is None:
        raise NotThisForm(f"{named(node)} has no floating-point result, but rows pass through it")
    return dtype


def _type_or_none(node: Node) -> torch.dtype | None:
    values = several(fake_value(node))
    types = {item.dtype for item in values if isinstance(item, torch.Tensor) and item.is_floating_point()}
    return types.pop() if len(types) == 1 else None
