"""Record the planner's decisions for the graph, and its predictions.

Contract
    in    a graph and its plan: slots if banks stream, steps with costs if pass partition ran
    out   the same graph, untouched; `plan.sequences` and `plan.decisions`

Pseudo-code
    read the number of sequences and their tokens from the sizes of the argument with token ids
    ask the planner, with the decisions already made: residents from the placement of the model, slots from its ring
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
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.planner_decisions import Decisions
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.planner.graph_problem import plan_graph


@graph_pass()
def predict(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Ask the planner. Raises InputError if the profile lacks a rate or a link."""
    plan = dataclasses.replace(plan, sequences=_sequences(module.graph))
    decisions = decisions_for(plan, dict(plan.sizes), context)
    return PassResult(module, dataclasses.replace(plan, decisions=decisions))


def decisions_for(plan: Plan, sizes: Mapping[str, float], context: PassContext) -> Decisions:
    """Return the decisions for a run with these sizes. Raises InputError if the profile lacks a rate or a link."""
    bounds = next((bank.expert_bounds for bank in plan.banks if bank.group), (0, 0))
    ranks = len(bounds) - 1
    return plan_graph(plan, sizes, context.placed, context.hardware, context.transport, ranks)


def _sequences(graph: Graph) -> tuple[str, ...]:
    """Return the sizes [sequences, tokens] of the token ids as expressions, or an empty tuple.

    Token ids are integer arguments with two dimensions, like masks and positions. Positions may have one row for all
    sequences, so the largest argument counts. Buffers of the model do not count.
    """
    elements = {}
    for node in graph_inputs(graph):
        value = fake_value(node)
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.dtype not in (torch.int64, torch.int32):
            continue
        if node.meta.get(ARGUMENT_KEY, True):
            hints = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]
            elements[tuple(str(size_expression(size)) for size in value.shape)] = math.prod(hint or 0 for hint in hints)
    return max(elements, key=lambda sizes: elements[sizes], default=())
