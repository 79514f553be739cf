"""Tell which whole numbers are never below zero, as the expert of a pair has to be.

A pair without an expert may have as its id the number of experts, or more: its row stands behind all others. With an id
below zero it would stand in front of them, where rows of the first expert are looked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.node_arguments import all_arguments
from moepass.passes.graph.nodes import fake_value
from moepass.passes.graph.operations import CASTS, base_operation

# One of several results, or the only one, are places.
_GIVE_PLACES = {"topk", "sort", "max", "min", "kthvalue", "mode", "median"}
_ARE_PLACES = {"argsort", "argmax", "argmin"}
_MOVES = {
    "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "t", "permute", "transpose", "expand", "clone", "alias",
    "detach", "slice", "select", "index", "_unsafe_index", "index_select", "gather", "flip", "roll", "repeat", "split",
    "split_with_sizes", "unbind",
}  # fmt: skip
# They give numbers of these arguments, or sums and products of them.
_PASS_ON = {
    **dict.fromkeys({*_MOVES, "cumsum", "sum"}, ("self",)),
    **dict.fromkeys(("add", "mul", "maximum", "minimum"), ("self", "other")),
    "embedding": ("weight",),
    "cat": ("tensors",),
    "stack": ("tensors",),
    "where": ("self", "other"),
    "masked_fill": ("self", "value"),
}
_MADE = {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"}
_FULL = {"full", "full_like", "new_full", "scalar_tensor"}


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
        if base_operation(source) in _GIVE_PLACES:
            return [] if place == 1 else [all_arguments(source)["self"]]
        return [all_arguments(source)["self"]] if base_operation(source) in _PASS_ON else None
    if not isinstance(value, torch.Tensor):
        return None
    if value.dtype is torch.bool or base in _ARE_PLACES | _MADE:
        return []
    if base in CASTS:
        source = node.all_input_nodes[0]
        # In narrower numbers large ones turn negative.
        is_whole = not fake_value(source).is_floating_point() and value.dtype in (torch.int32, torch.int64)
        return [source] if is_whole else None
    if base == "add" and given.get("alpha", 1) != 1:
        return None
    if base in _FULL:
        return [next(one for name, one in given.items() if name in ("fill_value", "s"))]
    if base in ("arange", "iota"):
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
    return [one for name in _PASS_ON[base] for one in _each(given[name])] if base in _PASS_ON else None


def _each(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
