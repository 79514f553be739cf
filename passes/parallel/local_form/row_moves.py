"""What is moved: the values behind lookups, writes, joins and views of whole rows."""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import WAIT, Collective, collective_of
from moepass.passes.graph.contents import MAKE_EMPTY
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.operations import base_operation

# By the names of operations without variants.
_MOVES = {
    "index", "_unsafe_index", "index_select", "index_put", "_unsafe_index_put", "index_copy", "gather", "scatter",
    "slice_scatter", "cat", "split", "split_with_sizes", "getitem", "slice", "select", "narrow", "constant_pad_nd",
    "clone", "copy", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "permute", "transpose", "expand",
    "_to_copy", "convert_element_type", "masked_fill", "where", "alias", "detach", "flip", "stack",
}  # fmt: skip
_MADE = {"zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full", "scalar_tensor", *MAKE_EMPTY}


def moved_values(node: Node) -> set[Node]:
    """The values whose rows `node` moves, itself where it is no move; memory that was filled or not is none."""
    found: set[Node] = set()
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        base = base_operation(current) if current.op == "call_function" else ""
        if base in _MADE:
            continue
        if base not in _MOVES and not is_call(current, WAIT):
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
