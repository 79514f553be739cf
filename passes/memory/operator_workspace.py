"""Temporary memory of operators, if it is as large as their operands.

[Empirical] from torch 2.13 on a CPU, by the allocations that its profiler records. Other operators allocate nothing, or
memory that does not grow with their operands (attention: a block of scores for each thread).
"""

from __future__ import annotations

import sympy
import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.memory.value_bytes import elements, tensor_bytes
from moepass.passes.ops.traits import base_operation


def workspace_bytes(node: Node) -> sympy.Expr:
    """Return the bytes that `node` allocates and frees while it runs."""
    source = next((value for used in node.all_input_nodes if isinstance(value := fake_value(used), torch.Tensor)), None)
    nothing = sympy.Integer(0)
    if source is None:
        return nothing
    name = base_operation(node)
    if name in ("sort", "argsort"):
        # Sorting integers copies values and indices; sorting floating-point numbers copies only indices.
        numbers = nothing if source.dtype.is_floating_point else tensor_bytes(source)
        return numbers + elements(source) * torch.int64.itemsize
    if name == "mean" and source.dtype in (torch.bfloat16, torch.float16):
        return elements(source) * torch.float32.itemsize
    if name == "convolution":
        return 2 * tensor_bytes(fake_value(node))
    return nothing
