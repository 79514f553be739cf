"""Move the lookup of the rows that a block's experts work on right before their first GEMM.

`rows = hidden_states[token of each pair]` is k times as large as the hidden states. As a part of the experts' segment
it can be done for some rows of one expert at a time: on a CPU by the loop over experts (`lower_experts.py`), on a GPU
by the GEMM's own loads (`lower_triton_experts.py`). Then it is never in memory as a whole.

Contract
    in    a graph of blocks
    out   the same nodes, a lookup that only a block's GEMMs read moved down to the first of them
          a lookup that another GEMM reads first, as that of an adapter does, stays
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from moepass.passes.blocks.detect import find_blocks
from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.nodes import copy_graph_module, is_call
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass


@graph_pass(requires={"blocks"}, provides={"late_lookups"}, conflicts={"planned", "scheduled"})
def sink_token_gather(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Move the lookups."""
    changed = copy_graph_module(module)
    moved: list[str] = []
    for match in find_blocks(changed.graph).matches:
        rows, gemm = match.gemms[0].activations, match.gemms[0].node
        if is_lookup(rows) and gemm.prev is not rows and min(rows.users) is gemm:
            gemm.prepend(rows)
            moved.append(match.record.name)
    if not moved:
        return PassResult(module, plan)
    changed.recompile()
    return PassResult(changed, plan, matches=tuple(moved))


def is_lookup(node: Node) -> bool:
    """True for rows of a table that grouped GEMMs alone read."""
    return is_call(node, torch.ops.aten.index.Tensor) and all(is_grouped_gemm(user) for user in node.users)


def with_lookup(gemm: Node) -> Node:
    """The first node of a block's experts: the lookup right before their first GEMM, if there is one."""
    return gemm.prev if is_lookup(gemm.prev) and gemm.prev in gemm.all_input_nodes else gemm
