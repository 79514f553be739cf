"""Tell which inputs of a graph it writes to, so that its next run finds other contents there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch.fx import Graph, Node

from moepass.passes.graph.node_arguments import named_arguments
from moepass.passes.graph.nodes import mutates, nodes_in, view_source


def writes_to_inputs(graph: Graph) -> dict[Node, tuple[Node, ...]]:
    """For each input, the nodes that write to it, or hold the values written to it, in host order.

    Such a node writes by itself, as `copy_` does, or is an output of the graph that whoever runs it writes to the
    input: what AOTAutograd makes of writes that it cannot leave in the graph.
    """
    found: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for target in _written_by(node):
            if target.op == "placeholder":
                found[target].append(node)
    for target, value in _written_outside(graph):
        found[target].append(value)
    return {node: tuple(values) for node, values in found.items()}


def _written_by(node: Node) -> Iterator[Node]:
    """The tensors that `node` writes to, views seen through."""
    if not mutates(node):
        return
    given = named_arguments(node)
    for argument in node.target._schema.arguments:  # type: ignore[union-attr]
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from map(view_source, nodes_in(given.get(argument.name)))


def _written_outside(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Inputs, and the outputs that become their contents after a run."""
    output = graph.output_node()
    values, descriptions = output.args[0], output.meta.get("desc")
    if not isinstance(values, (list, tuple)) or descriptions is None:
        return
    inputs = {str(node.meta["desc"]): node for node in graph.find_nodes(op="placeholder") if "desc" in node.meta}
    for value, description in zip(values, descriptions, strict=True):
        target = inputs.get(str(getattr(description, "mutated_input", None)))
        if target is not None and isinstance(value, Node):
            yield target, value
