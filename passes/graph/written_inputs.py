"""Inputs of a graph that it writes to, so that the next run reads other contents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch.fx import Graph, Node

from moepass.passes.graph.nodes import nodes_in
from moepass.passes.ops.arguments import named_arguments
from moepass.passes.ops.traits import mutates
from moepass.passes.ops.walk import view_source


def writes_to_inputs(graph: Graph) -> dict[Node, tuple[Node, ...]]:
    """Return for each input the nodes that write to it, or whose values are written to it, in host order.

    A node writes itself, like `copy_`, or it is an output that the caller writes to the input after the run:
    AOTAutograd moves writes out of the graph in this way.
    """
    writers: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for target in _written_by(node):
            if target.op == "placeholder":
                writers[target].append(node)
    for target, value in _written_outside(graph):
        writers[target].append(value)
    return {node: tuple(values) for node, values in writers.items()}


def _written_by(node: Node) -> Iterator[Node]:
    """Yield the tensors that `node` writes to, seen through views."""
    if not mutates(node):
        return
    arguments = named_arguments(node)
    for argument in node.target._schema.arguments:  # type: ignore[union-attr]
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from map(view_source, nodes_in(arguments.get(argument.name)))


def _written_outside(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Yield inputs with the outputs that are written to them after a run."""
    output = graph.output_node()
    values, descriptions = output.args[0], output.meta.get("desc")
    if not isinstance(values, (list, tuple)) or descriptions is None:
        return
    inputs = {str(node.meta["desc"]): node for node in graph.find_nodes(op="placeholder") if "desc" in node.meta}
    for value, description in zip(values, descriptions, strict=True):
        target = inputs.get(str(getattr(description, "mutated_input", None)))
        if target is not None and isinstance(value, Node):
            yield target, value
