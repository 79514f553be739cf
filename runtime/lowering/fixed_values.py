"""The values of an expert program that are the same for all rows."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from moepass.passes.segments.expert_program import ExpertProgram


def graph_of_fixed(segment: GraphModule, program: ExpertProgram) -> GraphModule:
    """From the segment's inputs to the program's fixed values: inputs, views of them, and single numbers."""
    graph = Graph()
    values: dict[Node, Node] = {}
    needed = set(program.fixed)
    for node in reversed(segment.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in segment.graph.nodes:
        if node.op == "placeholder" or node in needed:
            values[node] = graph.node_copy(node, lambda used: values[used])
    graph.output(tuple(values[node] for node in program.fixed))
    return GraphModule(segment, graph)
