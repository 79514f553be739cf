"""Stacks [experts, ..] of the parameters of single experts.

A stack is a concatenation of unsqueezed parameters, the decomposition of `torch.stack` that Inductor uses, because it
does not lower `torch.stack`. Pass lower_expert_stacks replaces it by one operator.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import is_call
from moepass.passes.ir.slot_operations import EXPERT_STACK
from moepass.passes.ops.arguments import all_arguments

aten = torch.ops.aten


def is_expert_stack(node: Node) -> bool:
    """Return whether `node` stacks different inputs of the graph."""
    inputs = _stacked_inputs(node)
    return bool(inputs) and len(set(inputs)) == len(inputs) and all(operand.op == "placeholder" for operand in inputs)


def _stacked_inputs(node: Node) -> tuple[Node, ...]:
    if is_call(node, EXPERT_STACK):
        return tuple(node.args[0])  # type: ignore[arg-type]
    if not is_call(node, aten.cat.default) or all_arguments(node)["dim"] != 0:
        return ()
    slices = all_arguments(node)["tensors"]
    if not all(is_call(unsqueezed, aten.unsqueeze.default) and unsqueezed.args[1] == 0 for unsqueezed in slices):
        return ()
    return tuple(unsqueezed.args[0] for unsqueezed in slices)


def parameters_of(tensor: Node) -> tuple[Node, ...]:
    """Return the inputs of which an expert tensor [experts, ..] consists: itself, or one for each expert."""
    return _stacked_inputs(tensor) if is_expert_stack(tensor) else (tensor,)
