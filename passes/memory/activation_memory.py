"""Predict how much memory the activations of a run take at once.

Contract
    in    a top-level graph of segments, as they are wanted to run
    out   the same graph, untouched; `plan.activations`. Where runs are to choose chunks, with what the memory budget
          leaves for activations

Pseudo-code
    the graph as operations on memory (graph_operations.py), in the order in which they run
    the sums of what is held at once that may be the largest (held_bytes.py), as expressions in the graph's sizes
"""

from __future__ import annotations

import dataclasses

from torch.fx import GraphModule

from moepass.passes.ir.activation_memory import ActivationMemory, ActivationPeak
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.memory.graph_operations import HowSegmentsRun, operations_of
from moepass.passes.memory.held_bytes import peaks

COUNTED = "counted: what each operator of the graph gives, until its last reader"
ESTIMATED = "estimated: what Inductor writes to memory by a model of its fusion, until its last reader"


@graph_pass()
def activation_memory(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Count what every operation holds."""
    how = HowSegmentsRun(context.runs_by_expert, context.chunk_tokens)
    operations, returned = operations_of(module, how)
    found = tuple(ActivationPeak(str(peak.expression), peak.where) for peak in peaks(operations, returned))
    source = ESTIMATED if how.is_fused else COUNTED
    memory = ActivationMemory(found, source, context.chunk_tokens, _room_bytes(context))
    return PassResult(module, dataclasses.replace(plan, activations=memory))


def _room_bytes(context: PassContext) -> float | None:
    """What the budget leaves beside weights, resident banks and slots; None where runs choose no chunks."""
    if not context.chooses_chunks:
        return None
    assert context.placed is not None
    decisions = context.placed.decisions
    assert decisions.memory is not None
    assert decisions.memory_budget_bytes is not None
    return decisions.memory_budget_bytes - (decisions.memory.peak_bytes - decisions.memory.activation_bytes)
