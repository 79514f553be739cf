"""Values of an expert program that are the same for all rows: weights, which may come in parts, and tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.nodes import graph_inputs
from moepass.passes.segments.expert_program import ExpertProgram, GroupedGemm, RowWork
from moepass.runtime.kernels.fp8_rows import BlockScaledWeights

# Weights [experts, in, out], cut into parts in order of experts, or in FP8.
WeightParts = tuple[torch.Tensor, ...] | BlockScaledWeights


class FixedValues:
    """Reads the fixed values of a program from the inputs of its segment.

    Weights and tables may be views of inputs, or single numbers computed from them. An input may come in parts: a tuple
    of tensors [experts, ...] in order of experts; or in FP8. Such an input is only read as weights, through views that
    keep the order of experts: see `passes/segments/bank_parts.py` and `fp8_slots.py` there. `read` has the nodes that
    `tables` returns if they are fixed; by default all inputs of row work.
    """

    def __init__(self, segment: GraphModule, program: ExpertProgram, read: Collection[Node] | None = None) -> None:
        positions = {node: position for position, node in enumerate(graph_inputs(segment.graph))}
        self._weights = {
            step.weights: _weight_view(segment, step.weights, positions)
            for step in program.steps
            if isinstance(step, GroupedGemm)
        }
        if read is None:
            read = [node for step in program.steps if isinstance(step, RowWork) for node in step.inputs]
        fixed = set(program.fixed)
        self._table_nodes = tuple(dict.fromkeys(node for node in read if node in fixed))
        self._table_graph = _graph_of(segment, self._table_nodes, list(positions))

    def weights(self, inputs: Sequence[Any]) -> dict[Node, WeightParts]:
        """Return the weights of each GEMM of the program, in parts."""
        weights = {}
        for node, (position, view) in self._weights.items():
            value = inputs[position]
            parts = value if isinstance(value, tuple) else (value,)
            views = parts if view is None else tuple(view(tensor)[0] for tensor in parts)
            weights[node] = BlockScaledWeights(*views) if isinstance(value, BlockScaledWeights) else views
        return weights

    def tables(self, inputs: Sequence[Any]) -> dict[Node, torch.Tensor]:
        """Return the fixed values that row work reads."""
        if not self._table_nodes:
            return {}
        return dict(zip(self._table_nodes, self._table_graph(*inputs), strict=True))


def weights_of(parts: WeightParts, expert: int) -> torch.Tensor:
    """Return the weights [in, out] of one expert."""
    index = expert
    for tensor in parts:
        if index < len(tensor):
            return tensor[index]
        index -= len(tensor)
    raise IndexError(f"expert {expert} is not among the weights of {sum(map(len, parts))} experts")


def _weight_view(segment: GraphModule, weights: Node, positions: dict[Node, int]) -> tuple[int, GraphModule | None]:
    """Return the position of the input that `weights` view, and the view as a graph, or None for the input itself."""
    source = weights
    while source not in positions:
        (source,) = source.all_input_nodes
    return positions[source], None if source is weights else _graph_of(segment, (weights,), [source])


def _graph_of(segment: GraphModule, wanted: Sequence[Node], inputs: Sequence[Node]) -> GraphModule:
    """Return the graph that computes the nodes `wanted` from `inputs`."""
    needed = set(wanted)
    for node in reversed(segment.graph.nodes):
        if node in needed and node not in inputs:
            needed.update(node.all_input_nodes)
    nodes = [node for node in segment.graph.nodes if node in needed and node not in inputs]
    return subgraph(inputs, nodes, wanted, segment)


def subgraph(
    inputs: Sequence[Node], nodes: Sequence[Node], outputs: Sequence[Node], root: GraphModule | None = None
) -> GraphModule:
    """Return copies of `nodes` as a graph of `inputs`, whose fake values are not set, that returns `outputs`.

    Submodules and constants come from `root`.
    """
    graph = Graph()
    values = {node: graph.placeholder(f"input_{number}") for number, node in enumerate(inputs)}
    for node in nodes:
        values[node] = graph.node_copy(node, lambda used: values[used])
    graph.output(tuple(values[node] for node in outputs))
    return GraphModule(root or {}, graph)
