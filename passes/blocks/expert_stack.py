"""The tensor [experts, ..] of parameters that a model keeps one by one for its experts.

It is written as Inductor takes `torch.stack` apart, which it does not lower itself.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.node_arguments import all_arguments
from moepass.passes.graph.nodes import is_call

aten = torch.ops.aten


def is_expert_stack(node: Node) -> bool:
    """True where `node` puts inputs of the graph, none of them twice, into one tensor [experts, ..]."""
    if not is_call(node, aten.cat.default) or all_arguments(node)["dim"] != 0:
        return False
    parts = all_arguments(node)["tensors"]
    if not all(is_call(part, aten.unsqueeze.default) and part.args[1] == 0 for part in parts):
        return False
    inputs = {part.args[0] for part in parts}
    return len(inputs) == len(parts) and all(one.op == "placeholder" for one in inputs)


def parameters_of(tensor: Node) -> tuple[Node, ...]:
    """The inputs that an expert tensor [experts, ..] consists of: itself, or one for each expert."""
    if not is_expert_stack(tensor):
        return (tensor,)
    return tuple(part.args[0] for part in all_arguments(tensor)["tensors"])
