"""Matrices that are repeated for every batch of rows, as torch captures a product of [.., rows, in] and a matrix."""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.ops.walk import origin

aten = torch.ops.aten


def multiplies_by_one_matrix(node: Node) -> bool:
    """Return whether `node` is `bmm(rows [batches, rows, in], weights)` with the same matrix for all batches."""
    return is_call(node, aten.bmm.default) and repeated_matrix(node.args[1]) is not node.args[1]


def repeated_matrix(node: object) -> Node:
    """Return the matrix [in, out] that `node` [.., in, out] repeats, or `node` itself."""
    assert isinstance(node, Node)
    matrix = list(fake_value(node).shape[-2:])
    repeats = (Trait.RESHAPE, Trait.EXPAND, Trait.COPY)
    source = origin(node, passes=lambda step: has_trait(step, *repeats) and _ends_in(step, matrix))
    return source if list(fake_value(source).shape) == matrix else node


def _ends_in(node: Node, matrix: list[object]) -> bool:
    """Return whether `node` and its first input end in the dimensions of the matrix, which are constants."""
    shapes = [list(fake_value(value).shape) for value in (node, node.all_input_nodes[0])]
    return all(isinstance(size, int) for size in matrix) and all(shape[-2:] == matrix for shape in shapes)
