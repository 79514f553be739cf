"""A matrix that is repeated for every batch of rows, as torch writes a product of [.., rows, in] and a matrix."""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.traits import Trait, has_trait

aten = torch.ops.aten


def multiplies_by_one_matrix(node: Node) -> bool:
    """True for `bmm(rows [batches, rows, in], weights)` where all batches have the same matrix."""
    return is_call(node, aten.bmm.default) and repeated_matrix(node.args[1]) is not node.args[1]


def repeated_matrix(node: object) -> Node:
    """The matrix [in, out] that `node` [.., in, out] repeats; `node` itself where it repeats none."""
    assert isinstance(node, Node)
    matrix = list(fake_value(node).shape[-2:])
    current = node
    while has_trait(current, Trait.RESHAPE, Trait.EXPAND, Trait.COPY) and _ends_in(current, matrix):
        current = current.all_input_nodes[0]
    return current if list(fake_value(current).shape) == matrix and current is not node else node


def _ends_in(node: Node, matrix: list[object]) -> bool:
    """True where `node`, and what it is made of, end in the dimensions of the matrix, which are constants."""
    shapes = [list(fake_value(one).shape) for one in (node, node.all_input_nodes[0])]
    return all(isinstance(size, int) for size in matrix) and all(shape[-2:] == matrix for shape in shapes)
