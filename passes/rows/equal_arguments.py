"""Comparison of nodes from several branches: whether they differ only in the branch's number of rows.

A number of rows may be a size in a fill, a view or an expand, or the end of a slice that keeps the whole dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, map_nodes
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.traits import Trait, base_operation, has_trait


def compute_the_same(nodes: Sequence[Node], *, have_rows: bool) -> bool:
    """Return whether `nodes`, one from each branch, compute the same function of corresponding tensors.

    If they `have_rows`, the caller must compare the result shapes with the rules of `row_rules.py`.
    """
    base = base_operation(nodes[0])
    if base == "slice":
        return _are_equal(map(_text, nodes)) or (have_rows and all(map(_keeps_dimension, nodes)))
    if have_rows or base == "expand":
        return True
    if has_trait(nodes[0], Trait.FILL):
        arguments = [all_arguments(node) for node in nodes]
        sizes = [each.pop("size", ()) for each in arguments]
        return _are_equal(map(_text_of, arguments)) and _are_alike(sizes)
    if has_trait(nodes[0], Trait.RESHAPE):
        return _are_alike([fake_value(node).shape for node in nodes])
    return _are_equal(map(_text, nodes)) and (
        has_trait(nodes[0], Trait.ELEMENTWISE) or _are_equal(map(_sizes_read, nodes))
    )


def _are_equal(texts: Any) -> bool:
    return len(set(texts)) == 1


def _are_alike(shapes: Sequence[Sequence[Any]]) -> bool:
    """Return whether the shapes are equal, except for sizes that are symbols in all of them."""
    if not _are_equal(map(len, shapes)):
        return False
    for sizes in zip(*shapes, strict=True):
        distinct = {_size(size) for size in sizes}
        if len(distinct) != 1 and any(size.is_Integer for size in distinct):
            return False
    return True


def _size(size: Any) -> Any:
    return size_expression(fake_value(size) if isinstance(size, Node) else size)


def _keeps_dimension(node: Node) -> bool:
    arguments = all_arguments(node)
    shapes = (fake_value(tensor).shape[arguments["dim"]] for tensor in (node, arguments["self"]))
    return arguments["step"] == 1 and _are_equal(map(_size, shapes))


def _text(node: Node) -> str:
    return _text_of((node.args, node.kwargs))


def _text_of(arguments: Any) -> str:
    """Return the arguments as text: symbolic numbers as expressions, every tensor as the same word."""
    return str(map_nodes(arguments, lambda used: f"<{_number(fake_value(used))}>"))


def _number(value: Any) -> str:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value.node.expr)
    return "tensor" if isinstance(value, (torch.Tensor, tuple, list)) else str(value)


def _sizes_read(node: Node) -> str:
    values = [fake_value(used) for used in node.all_input_nodes]
    return str([tuple(map(_size, value.shape)) for value in values if isinstance(value, torch.Tensor)])
