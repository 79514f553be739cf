"""Weights of a loop over experts, one for each branch.

one tensor       `weights[e]`, `weights.unbind()`, `weights.chunk(experts)`: experts in its first dimension
parameters       one in the module of each expert
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import communication_of
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.nodes import fake_value, graph_inputs
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import ARGUMENT_KEY, named
from moepass.passes.loops.pieces import pieces_of
from moepass.passes.ops.walk import ancestors

aten = torch.ops.aten


class FixedNodes:
    """The nodes that depend on no argument of the graph, such as weights and constants; and stacks of weights."""

    def __init__(self) -> None:
        self._results: dict[Node, bool] = {}
        self._stacks: dict[tuple[Node, ...], Node] = {}
        # The parameters of the stack that each parameter is in.
        self._stack_of: dict[Node, tuple[Node, ...]] = {}

    def stack(self, parameters: Sequence[Node]) -> Node:
        """Return one stack for all loops. Raises NotThisForm if `parameters` cannot be adjacent in memory."""
        key = tuple(parameters)
        if key not in self._stacks:
            self._check(key)
            graph = parameters[0].graph
            writer = GraphWriter(graph, parameters[0])
            with graph.inserting_before(graph_inputs(graph)[-1].next):
                slices = [writer.emit(aten.unsqueeze.default, parameter, 0) for parameter in parameters]
                self._stacks[key] = writer.emit(aten.cat.default, slices)
            self._results[self._stacks[key]] = True
            self._stack_of.update(dict.fromkeys(key, key))
        return self._stacks[key]

    def _check(self, parameters: tuple[Node, ...]) -> None:
        """Raise NotThisForm if `parameters` cannot be adjacent in memory."""
        for parameter in parameters:
            if parameter in self._stack_of:
                raise NotThisForm(
                    f"{named(parameter)} is a weight of two loops over experts, but can be adjacent in memory only to "
                    "those of one; give each loop its own parameters"
                )
            if not fake_value(parameter).is_contiguous():
                raise NotThisForm(
                    f"{named(parameter)} does not lie contiguously in memory, so it cannot be adjacent to the weights "
                    "of the other experts; make it contiguous"
                )

    def erase_unread(self) -> None:
        for stack in self._stacks.values():
            erase_unread(stack.graph, stack)

    def holds(self, node: Node) -> bool:
        """Return whether `node` depends on no argument of the graph."""
        for unknown in sorted(ancestors(node, follow=lambda used: used not in self._results)):
            if unknown not in self._results:
                self._results[unknown] = self._is_fixed(unknown)
        return self._results[node]

    def _is_fixed(self, node: Node) -> bool:
        value = fake_value(node)
        if node.op == "get_attr":
            return True
        if node.op == "placeholder":
            is_static = isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)
            return is_static and not node.meta.get(ARGUMENT_KEY, False)
        if isinstance(value, torch.SymInt) or communication_of(node) is not None:
            return False
        return all(self._results[used] for used in node.all_input_nodes)


def stacked_weights(nodes: Sequence[Node], fixed: FixedNodes, writer: GraphWriter) -> Node | None:
    """Return the tensor [experts, ..] with slices `nodes`, or None. Raises NotThisForm as `FixedNodes.stack`."""
    if all(node.op == "placeholder" for node in nodes):
        values = [fake_value(node) for node in nodes]
        first = values[0]
        are_alike = all(
            isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (first.shape, first.dtype)
            for value in values
        )
        are_weights = are_alike and len(set(nodes)) == len(nodes) and all(map(fixed.holds, nodes))
        return fixed.stack(nodes) if are_weights else None
    pieces = pieces_of(nodes)
    if pieces is None or pieces.dim != 0 or not fixed.holds(pieces.source):
        return None
    if not pieces.keeps_dim:
        return pieces.source
    if not pieces.is_even:
        return None
    # Each expert has `size` rows of a tensor [experts · rows, ..].
    size = int(pieces.sizes[0])
    shape = list(fake_value(pieces.source).shape)
    return writer.viewed(pieces.source, [len(nodes), size, *shape[1:]])
