"""Let the executor keep together the parameters that a graph reads as one tensor [experts, ..].

Contract
    in    a graph in which loops over experts are grouped GEMMs, whose weights are parameters of single experts, put
          together in the graph; those that other ranks read too are a bank already
    out   the same graph, where every such tensor is one `expert_stack`, right before its first reader: the executor
          moves the parameters into one memory in the first run, and copies nothing in later ones

A graph that writes to one of the parameters keeps its copies, which hold what was there before.
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
    """Write one operator for every tensor that is made of the parameters of single experts."""
    if not any(map(is_expert_stack, module.graph.nodes)):
        return PassResult(module, plan)
    lowered = copy_graph_module(module)
    graph = lowered.graph
    place = positions(graph)
    matches: list[str] = []
    for stack in [node for node in graph.nodes if is_expert_stack(node)]:
        parameters = parameters_of(stack)
        if not stack.users or any(mutates(user) for parameter in parameters for user in parameter.users):
            continue
        first: Node = min(stack.users, key=place.__getitem__)
        with graph.inserting_before(first):
            written = GraphWriter(graph, first).emit(EXPERT_STACK, list(parameters))
        stack.replace_all_uses_with(written)
        erase_unread(graph, stack)
        matches.append(f"{written.name} ({len(parameters)} parameters)")
    graph.lint()
    lowered.recompile()
    return PassResult(lowered, plan, tuple(matches))
