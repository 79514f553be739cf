"""What is moved: the values behind lookups, writes, joins and views of whole rows."""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import Collective, collective_of
from moepass.passes.graph.nodes import fake_value
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.parallel.match.near_experts import moves_rows


def moved_values(node: Node) -> set[Node]:
    """The values whose rows `node` moves, itself where it is no move; memory that was filled or not is none."""
    found: set[Node] = set()
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        if has_trait(current, Trait.FILL, Trait.FILL_LIKE, Trait.EMPTY):
            continue
        if not moves_rows(current):
            found.add(current)
            continue
        for used in current.all_input_nodes:
            value = fake_value(used)
            is_data = isinstance(value, (tuple, list)) or (
                isinstance(value, torch.Tensor) and value.is_floating_point()
            )
            if is_data and used not in seen:
                seen.add(used)
                pending.append(used)
    return found


def exchanged_by(node: Node) -> Collective | None:
    """The collective whose result `node` is, with the rows in whatever order; None where it is anything else."""
    values = moved_values(node)
    if len(values) != 1:
        return None
    (value,) = values
    return collective_of(value)
