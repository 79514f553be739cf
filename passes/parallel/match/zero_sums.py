"""Sums over ranks to which a rank adds only zeros, as a rank without experts does."""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import collective_of
from moepass.passes.graph.nodes import fake_value
from moepass.passes.ops.arguments import fill_value, is_accumulating_write, moved_elements, named_arguments
from moepass.passes.ops.traits import Trait, base_operation, has_trait, is_view

# What a rank without experts makes of no results are a few operations; the walk goes no further.
_MOST_STEPS = 128


def adds_nothing(summing: Node) -> bool:
    """Return whether a float sum over ranks, by AllReduce or ReduceScatter, adds only zeros for all inputs."""
    collective = collective_of(summing)
    if collective is None or collective.reduction != "sum" or not collective.is_float:
        return False
    return _Zeros().holds(collective.input)


class _Zeros:
    """A search over a few steps for nodes that are zero."""

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
        if has_trait(node, Trait.FILL, Trait.FILL_LIKE):
            return self.holds(fill_value(node))
        if base in ("fill", "zero"):
            return self.holds(given.get("value", 0))
        if base in ("mul", "div"):
            return self.holds(given["self"]) or (base == "mul" and self.holds(given["other"]))
        elements = moved_elements(node)
        if base in ("add", "sub", "neg", "sum") or has_trait(node, Trait.WRITE_SUM, Trait.CAST):
            elements = [given[name] for name in ("self", "other", "src", "source", "a") if name in given]
        elif base == "copy" or is_accumulating_write(node):
            elements = [given["src"]] if base == "copy" else [given["self"], given["values"]]
        elif elements is None and is_view(node):
            elements = node.all_input_nodes[:1]
        return bool(elements) and all(map(self.holds, elements))  # type: ignore[arg-type]
