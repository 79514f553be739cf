"""Tell which whole numbers are never below zero, as the expert of a pair has to be.

A pair without an expert may have as its id the number of experts, or more: its row stands behind all others. With an id
below zero it would stand in front of them, where rows of the first expert are looked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.ops.arguments import all_arguments, fill_value, moved_elements
from moepass.passes.ops.traits import Trait, base_operation, has_trait


def never_negative(node: Node) -> bool:
    """False where that is not known."""
    pending: list[Any] = [node]
    seen: set[Node] = set()
    while pending:
        value = pending.pop()
        if isinstance(value, (int, float)):
            if not value >= 0:
                return False
        elif not isinstance(value, Node):
            return False
        elif value not in seen:
            seen.add(value)
            read = _read_by(value)
            if read is None:
                return False
            pending += read
    return True


def _read_by(node: Node) -> list[Any] | None:
    """The numbers that must not be below zero, so that those of `node` are not; None where that is not known."""
    if node.op != "call_function":
        return None  # in a table of experts, -1 may stand for none
    value, base, given = fake_value(node), base_operation(node), all_arguments(node)
    if base == "getitem":
        source, place = node.args
        assert isinstance(source, Node)
        if has_trait(source, Trait.INDICES_SECOND) and place == 1:
            return []
        return [all_arguments(source)["self"]] if has_trait(source, Trait.INDICES_SECOND, Trait.SPLIT) else None
    if not isinstance(value, torch.Tensor):
        return None
    if value.dtype is torch.bool or has_trait(node, Trait.INDICES):
        return []
    if has_trait(node, Trait.CAST):
        source = node.all_input_nodes[0]
        # In narrower numbers large ones turn negative.
        is_whole = not fake_value(source).is_floating_point() and value.dtype in (torch.int32, torch.int64)
        return [source] if is_whole else None
    if base == "add" and given.get("alpha", 1) != 1:
        return None
    if has_trait(node, Trait.FILL, Trait.FILL_LIKE):
        return [fill_value(node)]
    if has_trait(node, Trait.ARANGE):
        return [given.get("start", 0), given.get("step", 1)]
    if base == "remainder":
        return [given["other"]]  # has the sign of the divisor
    if base in ("floor_divide", "div"):
        return [given["self"], given["other"]]
    least, most = given.get("min"), given.get("max")
    if base in ("clamp", "clamp_min") and isinstance(least, (int, float)) and least >= 0:
        # Where both are given and cross, the upper bound counts.
        return [0 if most is None else most]
    if base in ("clamp", "clamp_max"):
        return [given["self"], 0 if most is None else most]
    if base == "embedding":
        return [given["weight"]]
    if base in ("add", "mul", "maximum", "minimum", "sum", "cumsum"):
        return [given[name] for name in ("self", "other") if name in given]
    return moved_elements(node)
