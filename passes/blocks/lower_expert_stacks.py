"""Replace stacks of the parameters of single experts by an operator that needs no copy in later runs.

Contract
    in    a graph with grouped GEMMs, whose weights are stacks of the parameters of single experts
    out   the same graph with one `expert_stack` for each stack, right before its first reader: the executor moves the
          parameters into one memory in the first run, and copies nothing in later runs

A stack stays if the graph writes to one of its parameters, because it has the values from before the write.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from moepass.passes.blocks.expert_stack import is_expert_stack, parameters_of
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.nodes import copy_graph_module, positions
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.ir.slot_operations import EXPERT_STACK
from moepass.passes.ops.traits import mutates


@graph_pass(conflicts={"blocks"})
def lower_expert_stacks(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Replace every stack of parameters of single experts by one operator."""
    if not any(map(is_expert_stack, module.graph.nodes)):
        return PassResult(module, plan)
    lowered = copy_graph_module(module)
    graph = lowered.graph
    position = positions(graph)
    matches: list[str] = []
    for stack in [node for node in graph.nodes if is_expert_stack(node)]:
        parameters = parameters_of(stack)
        if not stack.users or any(mutates(user) for parameter in parameters for user in parameter.users):
            continue
        first: Node = min(stack.users, key=position.__getitem__)
        with graph.inserting_before(first):
            written = GraphWriter(graph, first).emit(EXPERT_STACK, list(parameters))
        stack.replace_all_uses_with(written)
        erase_unread(graph, stack)
        matches.append(f"{written.name} ({len(parameters)} parameters)")
    graph.lint()
    lowered.recompile()
    return PassResult(lowered, plan, tuple(matches))
