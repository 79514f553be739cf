"""Proof that integers are never negative, as expert ids must be.

A pair without an expert may have an id of at least the number of experts: its row is sorted after all others. A
negative id would sort the row to the front, among the rows of the first expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.ops.arguments import all_arguments, fill_value, moved_elements
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.ops.walk import walk

# An unknown number is treated like a negative one.
_UNKNOWN = (-1,)


def never_negative(node: Node) -> bool:
    """Return whether no element of `node` is below zero; False if that is not certain."""
    values = walk([node], lambda value: _read_by(value) if isinstance(value, Node) else ())
    return all(value >= 0 if isinstance(value, (int, float)) else isinstance(value, Node) for value in values)


def _read_by(node: Node) -> Sequence[Any]:
    """Return numbers and nodes such that `node` is nonnegative if all of them are, or `_UNKNOWN`."""
    if node.op != "call_function":
        return _UNKNOWN  # a table of experts may have -1 for no expert
    value, base, arguments = fake_value(node), base_operation(node), all_arguments(node)
    if base == "getitem":
        source, position = node.args
        assert isinstance(source, Node)
        if has_trait(source, Trait.INDICES_SECOND) and position == 1:
            return []
        return [all_arguments(source)["self"]] if has_trait(source, Trait.INDICES_SECOND, Trait.SPLIT) else _UNKNOWN
    if not isinstance(value, torch.Tensor):
        return _UNKNOWN
    if value.dtype is torch.bool or has_trait(node, Trait.INDICES):
        return []
    if has_trait(node, Trait.CAST):
        source = node.all_input_nodes[0]
        # Large numbers become negative in a narrower type.
        is_exact = not fake_value(source).is_floating_point() and value.dtype in (torch.int32, torch.int64)
        return [source] if is_exact else _UNKNOWN
    if base == "add" and arguments.get("alpha", 1) != 1:
        return _UNKNOWN
    if has_trait(node, Trait.FILL, Trait.FILL_LIKE):
        return [fill_value(node)]
    if has_trait(node, Trait.ARANGE):
        return [arguments.get("start", 0), arguments.get("step", 1)]
    if base == "remainder":
        return [arguments["other"]]  # has the sign of the divisor
    if base in ("floor_divide", "div"):
        return [arguments["self"], arguments["other"]]
    least, most = arguments.get("min"), arguments.get("max")
    if base in ("clamp", "clamp_min") and isinstance(least, (int, float)) and least >= 0:
        # If the lower bound is above the upper one, the result is the upper one.
        return [0 if most is None else most]
    if base in ("clamp", "clamp_max"):
        return [arguments["self"], 0 if most is None else most]
    if base == "embedding":
        return [arguments["weight"]]
    if base in ("add", "mul", "maximum", "minimum", "sum", "cumsum"):
        return [arguments[name] for name in ("self", "other") if name in arguments]
    return moved_elements(node) or _UNKNOWN
