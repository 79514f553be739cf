"""The tensor [experts, ..] of parameters that a model keeps one by one for its experts.

It is written as Inductor takes `torch.stack` apart, which it does not lower itself. Behind pass lower_expert_stacks it
is one operator.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import is_call
from moepass.passes.ir.slot_operations import EXPERT_STACK
from moepass.passes.ops.arguments import all_arguments

aten = torch.ops.aten


def is_expert_stack(node: Node) -> bool:
    """True where `node` puts inputs of the graph, none of them twice, into one tensor [experts, ..]."""
    inputs = _parts(node)
    return bool(inputs) and len(set(inputs)) == len(inputs) and all(one.op == "placeholder" for one in inputs)


def _parts(node: Node) -> tuple[Node, ...]:
    if is_call(node, EXPERT_STACK):
        return tuple(node.args[0])  # type: ignore[arg-type]
    if not is_call(node, aten.cat.default) or all_arguments(node)["dim"] != 0:
        return ()
    parts = all_arguments(node)["tensors"]
    if not all(is_call(part, aten.unsqueeze.default) and part.args[1] == 0 for part in parts):
        return ()
    return tuple(part.args[0] for part in parts)


def parameters_of(tensor: Node) -> tuple[Node, ...]:
    """The inputs that an expert tensor [experts, ..] consists of: itself, or one for each expert."""
    return _parts(tensor) if is_expert_stack(tensor) else (tensor,)
