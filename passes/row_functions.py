"""The activation function of a block's experts as functions of a row, whose formulas do not matter.

Contract
    in    a local form, whose activation function treats every row alone (passes/row_flow.py); else NotThisForm
    out   for each node of it, in the block and in the local form, which function of which rows it is

What the block and its local form compute beside the experts is a matter of where rows go. It is proved with any
function of a row in the place of each node: the real one may be 0 on all numbers of a mock run, or do something else in
a few features than in many, and then rows that went wrong would not show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Node

from moepass.passes.local_experts import LocalForm
from moepass.passes.node_arguments import named_arguments
from moepass.passes.operations import operation
from moepass.passes.row_flow import RowFlow, flow_in_block, flow_in_local_form, nodes_in


@dataclasses.dataclass(frozen=True)
class RowFunctions:
    """Nodes of the activation function, those of the block and those of the local form.

    `calls` give for a node the number of its function, the same for a node and its copy, and what that reads.
    `masks` give what a mask that the local form does without masks, `counts` what a size counts the rows of.
    All other nodes are `constants`, which nothing but these functions reads.
    """

    calls: Mapping[Node, tuple[int, tuple[Node, ...]]]
    masks: Mapping[Node, Node]
    counts: Mapping[Node, Node]
    constants: frozenset[Node]

    def replaces(self, node: Node) -> bool:
        """True where a value has another shape than the node's."""
        return node in self.calls or node in self.constants or node in self.masks

    def mapped(self, of: Callable[[Node], Node]) -> RowFunctions:
        """The same of other nodes."""
        return RowFunctions(
            {of(node): (number, tuple(map(of, read))) for node, (number, read) in self.calls.items()},
            {of(node): of(source) for node, source in self.masks.items()},
            {of(node): of(source) for node, source in self.counts.items()},
            frozenset(map(of, self.constants)),
        )


def row_functions(local: LocalForm) -> RowFunctions:
    """Raises NotThisForm where rows are not treated alone."""
    calls: dict[Node, tuple[int, tuple[Node, ...]]] = {}
    counts: dict[Node, Node] = {}
    constants: set[Node] = set()
    numbers = {node: number for number, node in enumerate(local.block.region)}
    in_block = ((node, node) for node in local.block.region if node in local.copied)
    for flow, nodes in ((flow_in_block(local), in_block), (flow_in_local_form(local), iter(local.copies.items()))):
        for node, origin in nodes:
            read = tuple(used for used in nodes_in((node.args, node.kwargs)) if flow.has_rows(used))
            if flow.has_rows(node):
                calls[node] = (numbers[origin], read)
            elif _counts_rows(node, flow):
                counts[node] = read[0]
            else:
                constants.add(node)
    # A mask of a product's own results runs as it is.
    masks = {node: source for node, source in local.kept.items() if source in calls}
    for node in local.block.region:
        if local.kept.get(node) in masks:
            masks[node] = local.kept[node]
    return RowFunctions(calls, masks, counts, frozenset(constants))


def _counts_rows(node: Node, flow: RowFlow) -> bool:
    if node not in flow.sizes or operation(node) != "sym_size.int":
        return False
    given = named_arguments(node)
    layout: Any = flow.layouts.get(given["self"])
    return layout is not None and [part.share for part in layout.dimensions[given["dim"]]] == [()]
