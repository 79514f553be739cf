"""Detection of sums over ranks to which this rank adds only zeros, as a rank without experts does."""

from __future__ import annotations

from collections.abc import Callable

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
    return _is_zero(collective.input, {})


def _is_zero(value: object, known: dict[Node, bool]) -> bool:
    """Return whether `value` is 0, or a node with zeros alone; adds to `known`, the nodes that were searched."""
    if not isinstance(value, Node):
        return isinstance(value, (int, float)) and value == 0
    if value not in known and len(known) < _MOST_STEPS:
        known[value] = False
        known[value] = _has_zeros_alone(value, lambda operand: _is_zero(operand, known))
    return known.get(value, False)


def _has_zeros_alone(node: Node, is_zero: Callable[[object], bool]) -> bool:
    if node.op != "call_function" or not isinstance(fake_value(node), (torch.Tensor, tuple, list)):
        return False
    base, arguments = base_operation(node), named_arguments(node)
    if has_trait(node, Trait.FILL, Trait.FILL_LIKE):
        return is_zero(fill_value(node))
    if has_trait(node, Trait.REFILL):
        return is_zero(arguments.get("value", 0))
    if base in ("mul", "div"):
        return is_zero(arguments["self"]) or (base == "mul" and is_zero(arguments["other"]))
    if base == "copy":
        return is_zero(arguments["src"])
    elements = moved_elements(node) or (node.all_input_nodes[:1] if is_view(node) else [])
    adds = base in ("add", "sub", "neg", "sum") or has_trait(node, Trait.WRITE_SUM, Trait.CAST)
    if adds or is_accumulating_write(node):
        elements = [arguments[name] for name in ("self", "other", "src", "source", "values", "a") if name in arguments]
    return bool(elements) and all(map(is_zero, elements))
