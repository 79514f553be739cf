"""Detection of sums over ranks to which this rank adds only zeros, as a rank without experts does."""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import collective_of
from moepass.passes.graph.nodes import fake_value
from moepass.passes.ops.arguments import fill_value, is_accumulating_write, moved_elements, named_arguments
from moepass.passes.ops.traits import Trait, base_operation, has_trait, is_view

# A rank without experts computes its zeros in a few operations, so the search gives up after this many.
_MOST_STEPS = 128


def adds_only_zeros(summing: Node) -> bool:
    """Return whether this rank adds only zeros, for all inputs, to a float sum by AllReduce or ReduceScatter."""
    collective = collective_of(summing)
    if collective is None or collective.reduction != "sum" or not collective.is_float:
        return False
    return _Zeros().contains(collective.input)


class _Zeros:
    """A search with a limited number of steps for nodes that are zero."""

    def __init__(self) -> None:
        self._known: dict[Node, bool] = {}

    def contains(self, value: object) -> bool:
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
        base, arguments = base_operation(node), named_arguments(node)
        if has_trait(node, Trait.FILL, Trait.FILL_LIKE):
            return self.contains(fill_value(node))
        if base in ("fill", "zero"):
            return self.contains(arguments.get("value", 0))
        if base in ("mul", "div"):
            return self.contains(arguments["self"]) or (base == "mul" and self.contains(arguments["other"]))
        elements = moved_elements(node)
        if base in ("add", "sub", "neg", "sum") or has_trait(node, Trait.WRITE_SUM, Trait.CAST):
            elements = [arguments[name] for name in ("self", "other", "src", "source", "a") if name in arguments]
        elif base == "copy" or is_accumulating_write(node):
            elements = [arguments["src"]] if base == "copy" else [arguments["self"], arguments["values"]]
        elif elements is None and is_view(node):
            elements = node.all_input_nodes[:1]
        return bool(elements) and all(map(self.contains, elements))  # type: ignore[arg-type]
