"""Moved values: the sources of lookups, writes, joins and views of whole rows."""

from __future__ import annotations

from torch.fx import Node

from moepass.passes.graph.collectives import Collective, collective_of
from moepass.passes.graph.nodes import fake_value, is_float
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.ops.walk import ancestors
from moepass.passes.parallel.match.near_experts import moves_rows


def moved_values(node: Node) -> set[Node]:
    """Return the values, except filled and empty memory, whose rows `node` moves; `node` itself if it is no move."""

    def is_data(used: Node) -> bool:
        return isinstance(fake_value(used), (tuple, list)) or is_float(used)

    def is_memory(used: Node) -> bool:
        return has_trait(used, Trait.FILL, Trait.FILL_LIKE, Trait.EMPTY)

    values = ancestors(node, follow=is_data, stop=lambda used: is_memory(used) or not moves_rows(used))
    return {used for used in values if not is_memory(used) and not moves_rows(used)}


def exchanged_by(node: Node) -> Collective | None:
    """Return the collective whose result `node` is, with its rows in any order, or None."""
    values = moved_values(node)
    if len(values) != 1:
        return None
    (value,) = values
    return collective_of(value)
