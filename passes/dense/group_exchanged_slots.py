"""Rewrite batched GEMMs over exchanged capacity slots as grouped GEMMs, the form that later passes recognise.

Contract
    in    a captured graph
    out   if the graph exchanges rows with other ranks: grouped GEMMs instead of `bmm` and `baddbmm` with the weights of
          all experts of this rank, equally many slots for each expert; equal up to the rounding of GEMMs. Others stay.
"""

from __future__ import annotations

from torch.fx import GraphModule

from moepass.passes.dense.group_slots import group_slots, last_gemms
from moepass.passes.graph.collectives import communications_of
from moepass.passes.graph.nodes import copy_graph_module
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass


@graph_pass(conflicts={"blocks"})
def group_exchanged_slots(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Replace batched GEMMs over exchanged slots with grouped GEMMs."""
    if not any(communication.is_exchange for communication in communications_of(module.graph)):
        return PassResult(module, plan)
    if next(last_gemms(module.graph), None) is None:
        return PassResult(module, plan)
    changed = copy_graph_module(module)
    matches: list[str] = []
    for gemm in list(last_gemms(changed.graph)):
        try:
            group_slots(changed.graph, gemm)
        except NotThisForm:
            continue
        matches.append(gemm.node.name)
    if not matches:
        return PassResult(module, plan)
    changed.graph.lint()
    changed.recompile()
    return PassResult(changed, plan, tuple(matches))
