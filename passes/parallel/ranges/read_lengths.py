"""Numbers up to what the host read: whether they end where a sequence of sums ends."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.node_arguments import named_arguments
from moepass.passes.graph.nodes import fake_value
from moepass.passes.graph.operations import base_operation, operation


def ends_with(values: Any, sequence: Any) -> bool:
    """Whether `values` are 0, 1, .. below the last of `sequence`, or the sum that it ends with, as the host read it."""
    if not isinstance(values, Node) or base_operation(values) not in ("arange", "iota"):
        return False
    given = named_arguments(values)
    length = given.get("length", given.get("end"))
    if not isinstance(length, Node) or base_operation(length) != "_local_scalar_dense":
        return False
    if given.get("start", 0) != 0 or given.get("step", 1) != 1:
        return False
    (read,) = length.all_input_nodes
    given = named_arguments(read)
    if operation(read) == "select.int":
        source = given["self"]
        is_same = source is sequence or (_summed(source) is not None and _summed(source) is _summed(sequence))
        return is_same and given["index"] in (-1, fake_value(source).shape[0] - 1)
    is_sum = operation(read) == "sum" or (operation(read) == "sum.dim_IntList" and given["dim"] in ([0], [-1]))
    return is_sum and _summed(sequence) is given["self"]


def _summed(node: Node) -> Any:
    """What the sums `node`, of one dimension, are those of; None where it is nothing like that."""
    is_sums = base_operation(node) == "cumsum" and fake_value(node).dtype is torch.int64 and fake_value(node).dim() == 1
    return node.args[0] if is_sums else None
