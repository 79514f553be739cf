"""Predict the memory that the activations of a run take at once.

Contract
    in    a top-level graph of segments, with the requested lowering
    out   the same graph, unchanged; `plan.activations`. If runs are to choose chunks, it has the memory that the budget
          leaves for activations

Pseudo-code
    describe the graph as operations on memory (graph_operations.py), in the order in which they run
    collect the sums of bytes held at once that may be the largest (held_bytes.py), as expressions in the graph's sizes
"""

from __future__ import annotations

import dataclasses

from torch.fx import GraphModule

from moepass.passes.ir.activation_memory import ActivationMemory, ActivationPeak
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.memory.graph_operations import SegmentExecution, operations_of
from moepass.passes.memory.held_bytes import peaks

COUNTED = "counted: the results of each operator, until their last reader"
ESTIMATED = "estimated: the values that Inductor writes to memory, by a model of its fusion, until their last reader"


@graph_pass()
def activation_memory(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Count the bytes that are held during every operation."""
    execution = SegmentExecution(context.runs_by_expert, context.chunk_tokens, context.multiplies_in_fp8)
    operations, returned = operations_of(module, execution)
    all_peaks = tuple(ActivationPeak(str(peak.expression), peak.where) for peak in peaks(operations, returned))
    source = ESTIMATED if execution.is_fused else COUNTED
    memory = ActivationMemory(all_peaks, source, context.chunk_tokens, _room_bytes(context))
    return PassResult(module, dataclasses.replace(plan, activations=memory))


def _room_bytes(context: PassContext) -> float | None:
    """Return the budget without everything but activations; None if runs choose no chunks."""
    if not context.chooses_chunks:
        return None
    assert context.placed is not None
    decisions = context.placed.decisions
    assert decisions.memory is not None
    assert decisions.memory_budget_bytes is not None
    memory = decisions.memory
    return decisions.memory_budget_bytes - (memory.peak_bytes - memory.step_bytes) - memory.attention_bytes
