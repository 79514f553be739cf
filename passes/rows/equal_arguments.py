"""Whether nodes of several branches, alike up to numbers among their arguments, compute the same in each branch.

Numbers may differ where they say no more than how many rows a branch has: the size of something that is made, of a view
or of an expanded dimension, and the end of a slice that is all of what it is cut from.
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
    """True where `nodes`, one of each branch, do the same with tensors that correspond.

    Where these `have_rows`, the rules of rows (`row_rules.py`) compare the shapes of the results, and nothing here.
    """
    base = base_operation(nodes[0])
    if base == "slice":
        return _are_equal(map(_text, nodes)) or (have_rows and all(map(_is_whole, nodes)))
    if have_rows or base == "expand":
        return True
    if has_trait(nodes[0], Trait.FILL):
        given = [all_arguments(node) for node in nodes]
        sizes = [one.pop("size", ()) for one in given]
        return _are_equal(map(_text_of, given)) and _are_alike(sizes)
    if has_trait(nodes[0], Trait.RESHAPE):
        return _are_alike([fake_value(node).shape for node in nodes])
    return _are_equal(map(_text, nodes)) and (
        has_trait(nodes[0], Trait.ELEMENTWISE) or _are_equal(map(_sizes_read, nodes))
    )


def _are_equal(texts: Any) -> bool:
    return len(set(texts)) == 1


def _are_alike(shapes: Sequence[Sequence[Any]]) -> bool:
    """True for shapes that are equal but where all of them have a size that only a run tells."""
    if not _are_equal(map(len, shapes)):
        return False
    for sizes in zip(*shapes, strict=True):
        own = {_size(size) for size in sizes}
        if len(own) != 1 and any(size.is_Integer for size in own):
            return False
    return True


def _size(size: Any) -> Any:
    return size_expression(fake_value(size) if isinstance(size, Node) else size)


def _is_whole(node: Node) -> bool:
    given = all_arguments(node)
    shapes = (fake_value(one).shape[given["dim"]] for one in (node, given["self"]))
    return given["step"] == 1 and _are_equal(map(_size, shapes))


def _text(node: Node) -> str:
    return _text_of((node.args, node.kwargs))


def _text_of(arguments: Any) -> str:
    """Arguments, of whose tensors no more than that they are some; numbers that only a run tells as expressions."""
    return str(map_nodes(arguments, lambda used: f"<{_number(fake_value(used))}>"))


def _number(value: Any) -> str:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value.node.expr)
    return "tensor" if isinstance(value, (torch.Tensor, tuple, list)) else str(value)


def _sizes_read(node: Node) -> str:
    values = [fake_value(used) for used in node.all_input_nodes]
    return str([tuple(map(_size, value.shape)) for value in values if isinstance(value, torch.Tensor)])
