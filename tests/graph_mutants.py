"""Small changes to captured graphs, after which they mean something else, or nothing."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from moepass.passes.collectives import KINDS
from moepass.passes.graph import copy_graph_module, fake_value

SWAPS = {
    torch.ops.aten.add.Tensor: torch.ops.aten.sub.Tensor,
    torch.ops.aten.mul.Tensor: torch.ops.aten.add.Tensor,
    torch.ops.aten.sub.Tensor: torch.ops.aten.add.Tensor,
    torch.ops.aten.ge.Scalar: torch.ops.aten.gt.Scalar,
    torch.ops.aten.ge.Tensor: torch.ops.aten.gt.Tensor,
    torch.ops.aten.lt.Scalar: torch.ops.aten.le.Scalar,
    torch.ops.aten.silu.default: torch.ops.aten.relu.default,
    torch.ops.aten.floor_divide.default: torch.ops.aten.remainder.Scalar,
    torch.ops.aten.bitwise_or.Tensor: torch.ops.aten.bitwise_and.Tensor,
}


def mutate(module: GraphModule, place: int, how: int) -> GraphModule | None:
    """The graph with one node changed in way `how`, 0 to 4; None where this change does not apply to that node."""
    changed = copy_graph_module(module)
    nodes = [node for node in changed.graph.nodes if node.op == "call_function"]
    node = nodes[place % len(nodes)]
    if how == 0 and node.target in SWAPS:
        node.target = SWAPS[node.target]
        if node.target is torch.ops.aten.remainder.Scalar:
            node.kwargs = {}
    elif how == 1 and any(isinstance(argument, int) and not isinstance(argument, bool) for argument in node.args):
        index = next(i for i, argument in enumerate(node.args) if isinstance(argument, int))
        node.update_arg(index, node.args[index] + 1)
    elif how == 2 and len(node.args) > 1 and all(isinstance(argument, torch.fx.Node) for argument in node.args[:2]):
        node.args = (node.args[1], node.args[0], *node.args[2:])
    elif how == 3 and isinstance(fake_value(node), torch.Tensor) and node.users:
        twin = [
            other
            for other in nodes[: place % len(nodes)]
            if isinstance(fake_value(other), torch.Tensor)
            and str(fake_value(other).shape) == str(fake_value(node).shape)
            and fake_value(other).dtype == fake_value(node).dtype
        ]
        if not twin:
            return None
        node.replace_all_uses_with(twin[-1])
    elif how == 4 and node.target in KINDS and isinstance(node.args[1], list):
        node.update_arg(1, list(reversed(node.args[1])))
    else:
        return None
    changed.recompile()
    return changed
