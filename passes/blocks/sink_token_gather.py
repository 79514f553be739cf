"""Move the lookup of a block's rows right before its first GEMM.

`rows = hidden_states[token of each pair]` is k times as large as the hidden states. In the segment of the experts, it
can run for some rows at a time: on a CPU in the loop over experts (`lower_experts.py`), on a GPU in the loads of the
GEMM (`lower_triton_experts.py`). Then the complete result is never in memory.

Contract
    in    a graph of blocks
    out   the same nodes; lookups that only GEMMs of a block read are right before the first of these
          lookups that another GEMM reads first, such as that of an adapter, stay
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from moepass.passes.blocks.detect import blocks_in
from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.nodes import copy_graph_module, is_call
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass


@graph_pass(requires={"blocks"}, provides={"late_lookups"}, conflicts={"planned", "scheduled"})
def sink_token_gather(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Move lookups of rows to the first GEMM of their block."""
    changed = copy_graph_module(module)
    moved: list[str] = []
    for block, (gemm, *_) in blocks_in(changed.graph, plan.blocks):
        rows = gemm.args[0]
        assert isinstance(rows, Node)
        if is_lookup(rows) and gemm.prev is not rows and min(rows.users) is gemm:
            gemm.prepend(rows)
            moved.append(block.name)
    if not moved:
        return PassResult(module, plan)
    changed.recompile()
    return PassResult(changed, plan, matches=tuple(moved))


def is_lookup(node: Node) -> bool:
    """Return whether `node` looks up rows that only grouped GEMMs read."""
    return is_call(node, torch.ops.aten.index.Tensor) and all(is_grouped_gemm(user) for user in node.users)


def first_expert_node(gemm: Node) -> Node:
    """Return the first node of a block with this first GEMM: the lookup right before it, or the GEMM."""
    return gemm.prev if is_lookup(gemm.prev) and gemm.prev in gemm.all_input_nodes else gemm
