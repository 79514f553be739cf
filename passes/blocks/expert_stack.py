"""The tensor [experts, ..] of parameters that a model keeps one by one for its experts."""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.node_arguments import all_arguments
from moepass.passes.graph.nodes import is_call


def is_expert_stack(node: Node) -> bool:
    """True where `node` puts inputs of the graph, none of them twice, into one tensor [experts, ..]."""
    if not is_call(node, torch.ops.aten.stack.default):
        return False
    given = all_arguments(node)
    stacked = given["tensors"]
    return given["dim"] == 0 and all(one.op == "placeholder" for one in stacked) and len(set(stacked)) == len(stacked)


def parameters_of(tensor: Node) -> tuple[Node, ...]:
    """The inputs that an expert tensor [experts, ..] consists of: itself, or one for each expert."""
    return tuple(all_arguments(tensor)["tensors"]) if is_expert_stack(tensor) else (tensor,)
