"""Write down by which decisions the graph runs, and what they are predicted to take.

Contract
    in    a graph whose plan has slots where banks stream, and steps with their costs where pass partition ran
    out   the same graph, untouched; `plan.sequences` and `plan.decisions`

Pseudo-code
    the number of sequences and their tokens: the sizes of the argument that holds token ids
    the planner's decisions, with what was fixed before: residents when the model was placed, slots by its ring
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch.fx import Graph, GraphModule

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, graph_inputs
from moepass.passes.graph.source_lines import ARGUMENT_KEY
from moepass.passes.ir.decisions import Decisions
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.planner.graph_problem import plan_graph


@graph_pass()
def predict(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Ask the planner. Raises InputError where the profile lacks a rate or a link."""
    plan = dataclasses.replace(plan, sequences=_sequences(module.graph))
    decisions = decisions_for(plan, dict(plan.sizes), context)
    return PassResult(module, dataclasses.replace(plan, decisions=decisions))


def decisions_for(plan: Plan, sizes: Mapping[str, float], context: PassContext) -> Decisions:
    """By which decisions a run with these sizes goes. Raises InputError where the profile lacks a rate or a link."""
    bounds = next((bank.expert_bounds for bank in plan.banks if bank.group), (0, 0))
    ranks = len(bounds) - 1
    return plan_graph(plan, sizes, context.placed, context.hardware, context.transport, ranks)


def _sequences(graph: Graph) -> tuple[str, ...]:
    """Token ids are whole numbers [sequences, tokens], and so are masks and positions.

    Positions may be given once for all sequences, so the largest such argument counts; buffers of the model do not.
    """
    found = {}
    for node in graph_inputs(graph):
        value = fake_value(node)
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.dtype not in (torch.int64, torch.int32):
            continue
        if node.meta.get(ARGUMENT_KEY, True):
            known = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]
            found[tuple(str(size_expression(size)) for size in value.shape)] = math.prod(size or 0 for size in known)
    return max(found, key=lambda sizes: found[sizes], default=())
