"""Tell sums over ranks to which a rank adds nothing but zeros: so does one that holds none of the experts."""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import collective_of
from moepass.passes.graph.node_arguments import named_arguments
from moepass.passes.graph.nodes import fake_value, is_view
from moepass.passes.graph.operations import base_operation

_ZEROS = {"zeros", "zeros_like", "new_zeros", "zero"}
_FILLS = {"full", "full_like", "new_full", "fill", "scalar_tensor"}
# What a rank without experts makes of no results are a few operations; the walk goes no further.
_MOST_STEPS = 128
# Zero where all of these arguments are; the others say where, how often or in what shape.
_ALL_ARE_NEEDED = {
    "add": ("self", "other"), "sub": ("self", "other"), "where": ("self", "other"), "masked_fill": ("self", "value"),
    "index_put": ("self", "values"), "_unsafe_index_put": ("self", "values"), "index_add": ("self", "source"),
    "index_copy": ("self", "source"), "scatter": ("self", "src", "value"), "scatter_add": ("self", "src"),
    "slice_scatter": ("self", "src"), "cat": ("tensors",), "stack": ("tensors",), "constant_pad_nd": ("self", "value"),
    "copy": ("src",), "neg": ("self",), "sum": ("self",), "clone": ("self",), "index": ("self",),
    "_unsafe_index": ("self",), "index_select": ("self",), "gather": ("self",), "repeat": ("self",),
    "_to_copy": ("self",), "convert_element_type": ("a",),
}  # fmt: skip


def adds_nothing(summing: Node) -> bool:
    """True where a float sum over ranks, by AllReduce or ReduceScatter, is given zeros whatever the inputs are."""
    collective = collective_of(summing)
    if collective is None or collective.reduction != "sum" or not collective.is_float:
        return False
    return _Zeros().holds(collective.input)


class _Zeros:
    """Which nodes are zeros, followed back a few steps."""

    def __init__(self) -> None:
        self._known: dict[Node, bool] = {}

    def holds(self, value: object) -> bool:
        if not isinstance(value, Node):
            return isinstance(value, (int, float)) and value == 0
        if value not in self._known:
            if len(self._known) >= _MOST_STEPS:
                return False
            self._known[value] = False
            self._known[value] = self._follow(value)
        return self._known[value]

    def _follow(self, node: Node) -> bool:
        if node.op != "call_function" or not isinstance(fake_value(node), (torch.Tensor, tuple, list)):
            return False
        base, given = base_operation(node), named_arguments(node)
        if base in _ZEROS:
            return True
        if base in _FILLS:
            return self.holds(next((given[name] for name in ("fill_value", "value", "s") if name in given), None))
        if base in ("mul", "div"):
            return self.holds(given["self"]) or (base == "mul" and self.holds(given["other"]))
        if base in _ALL_ARE_NEEDED:
            parts = [given[name] for name in _ALL_ARE_NEEDED[base] if name in given]
            flat = [item for part in parts for item in (part if isinstance(part, (list, tuple)) else (part,))]
            return bool(flat) and all(map(self.holds, flat))
        return is_view(node) and bool(node.all_input_nodes) and self.holds(node.all_input_nodes[0])
