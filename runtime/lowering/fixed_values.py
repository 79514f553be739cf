"""The values of an expert program that are the same for all rows: weights, which may come in parts, and tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.nodes import graph_inputs
from moepass.passes.segments.expert_program import ExpertProgram, GroupedGemm, RowWork

# Weights [experts, in, out] in order of experts; each part has those of the experts behind the parts before it.
WeightParts = tuple[torch.Tensor, ...]


class FixedValues:
    """Reads the fixed values of a program from the inputs of its segment.

    `weights` gives the weights of each GEMM, `tables` what row work reads. Both may be views of inputs, or single
    numbers computed of them. An input may come in parts: a tuple of tensors [experts, ...] in order of experts. It is
    read as weights alone, through views that leave experts as they are: see `passes/segments/bank_parts.py`.
    """

    def __init__(self, segment: GraphModule, program: ExpertProgram, read: Collection[Node] | None = None) -> None:
        """Of values `read`, `tables` gives those that are fixed; None: of all that row work reads."""
        places = {node: place for place, node in enumerate(graph_inputs(segment.graph))}
        self._weights = {
            step.weights: _weight_view(segment, step.weights, places)
            for step in program.steps
            if isinstance(step, GroupedGemm)
        }
        if read is None:
            read = [node for step in program.steps if isinstance(step, RowWork) for node in step.inputs]
        fixed = set(program.fixed)
        self._table_nodes = tuple(dict.fromkeys(node for node in read if node in fixed))
        self._table_graph = _graph_of(segment, self._table_nodes, list(places))

    def weights(self, inputs: Sequence[Any]) -> dict[Node, WeightParts]:
        """The weights of the program's GEMMs, as the parts in which they come."""
        found = {}
        for node, (place, view) in self._weights.items():
            given = inputs[place]
            parts = given if isinstance(given, tuple) else (given,)
            found[node] = tuple(parts) if view is None else tuple(view(part)[0] for part in parts)
        return found

    def tables(self, inputs: Sequence[Any]) -> dict[Node, torch.Tensor]:
        """The fixed values that row work reads."""
        if not self._table_nodes:
            return {}
        return dict(zip(self._table_nodes, self._table_graph(*inputs), strict=True))


def weights_of(parts: WeightParts, expert: int) -> torch.Tensor:
    """The weights [in, out] of one expert."""
    for part in parts:
        if expert < len(part):
            return part[expert]
        expert -= len(part)
    raise IndexError(
        f"the weights of {sum(map(len, parts))} experts came, and number {expert} behind them is asked for"
    )


def _weight_view(segment: GraphModule, weights: Node, places: dict[Node, int]) -> tuple[int, GraphModule | None]:
    """The input that `weights` are a view of, and the view as a graph; None where it is the input itself."""
    source = weights
    while source not in places:
        (source,) = source.all_input_nodes
    return places[source], None if source is weights else _graph_of(segment, (weights,), [source])


def _graph_of(segment: GraphModule, wanted: Sequence[Node], inputs: Sequence[Node]) -> GraphModule:
    """From `inputs` to the nodes `wanted`."""
    graph = Graph()
    values = {node: graph.placeholder(f"input_{number}") for number, node in enumerate(inputs)}
    needed = set(wanted)
    for node in reversed(segment.graph.nodes):
        if node in needed and node not in values:
            needed.update(node.all_input_nodes)
    for node in segment.graph.nodes:
        if node in needed and node not in values:
            values[node] = graph.node_copy(node, lambda used: values[used])
    graph.output(tuple(values[node] for node in wanted))
    return GraphModule(segment, graph)
