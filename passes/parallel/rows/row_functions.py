"""The activation function of a block's experts as functions of a row, whose formulas do not matter.

Contract
    in    a local form, whose activation function treats every row alone (row_flow.py); else NotThisForm
    out   for each node of it, in the block and in the local form, which function of which rows it is

What the block and its local form compute beside the experts is a matter of where rows go. It is proved with any
function of a row in the place of each node: the real one may be 0 on all numbers of a mock run, or do something else in
a few features than in many, and then rows that went wrong would not show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import is_call, nodes_in
from moepass.passes.ops.arguments import named_arguments
from moepass.passes.ops.traits import operation
from moepass.passes.parallel.local_form.local_experts import LocalForm
from moepass.passes.parallel.rows.row_flow import RowFlow, check_equal_flow, flow_in_block, flow_in_local_form

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class RowFunctions:
    """Nodes of the activation function, those of the block and those of the local form.

    `calls` give for a node the number of its function, the same for a node and its copy, and what that reads.
    `masks` give what a mask that the local form does without masks, `counts` what a size counts the rows of.
    All other nodes are `constants`, which nothing but these functions reads. `outputs` are computed behind the experts,
    as wide as what these give.
    """

    calls: Mapping[Node, tuple[int, tuple[Node, ...]]]
    masks: Mapping[Node, Node]
    counts: Mapping[Node, Node]
    constants: frozenset[Node]
    outputs: frozenset[Node] = frozenset()

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
            frozenset(map(of, self.outputs)),
        )


def row_functions(local: LocalForm) -> RowFunctions:
    """Raises NotThisForm where rows are not treated alone."""
    calls: dict[Node, tuple[int, tuple[Node, ...]]] = {}
    counts: dict[Node, Node] = {}
    constants: set[Node] = set()
    numbers = {node: number for number, node in enumerate(local.block.region)}
    in_block = ((node, node) for node in local.block.region if node in local.copied)
    of_block, of_local_form = flow_in_block(local), flow_in_local_form(local)
    check_equal_flow(of_block, of_local_form, local.copies)
    for flow, nodes in ((of_block, in_block), (of_local_form, iter(local.copies.items()))):
        for node, origin in nodes:
            read = tuple(used for used in nodes_in((node.args, node.kwargs)) if flow.has_rows(used))
            if flow.has_rows(node):
                calls[node] = (numbers[origin], read)
            elif _counts_rows(node, flow):
                counts[node] = read[0]
            else:
                constants.add(node)
    # A mask of a GEMM's own results runs as it is.
    masks = {node: source for node, source in local.unmasked.items() if source in calls}
    for node in local.block.region:
        if local.unmasked.get(node) in masks:
            masks[node] = local.unmasked[node]
    outputs = {node for node in calls if node in local.weighting or local.copies.get(node) in local.weighting}
    return RowFunctions(calls, masks, counts, frozenset(constants), frozenset(outputs))


def _counts_rows(node: Node, flow: RowFlow) -> bool:
    if node not in flow.sizes or operation(node) != "sym_size.int":
        return False
    given = named_arguments(node)
    layout: Any = flow.layouts.get(given["self"])
    return layout is not None and [part.share for part in layout.dimensions[given["dim"]]] == [()]


# ---------------------------------------------------------------------------------------------------------- in a run


def function_of_rows(number: int, read: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Function `number` of each row of `read`, each [rows, .]: [rows, `width`].

    No row leaves it as another one does, and none as zeros. What is no number stays so.
    """
    generator = torch.Generator().manual_seed(number)
    sums = torch.zeros(len(read[0]), 1, dtype=torch.float64)
    for rows in read:
        rows = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
        sums += (rows.double() @ torch.randn(rows.shape[1], generator=generator, dtype=torch.float64)).unsqueeze(-1)
    factors, shift = torch.randn(2, width, generator=generator, dtype=torch.float64)
    outputs: torch.Tensor = (sums * factors + shift).sin_()
    return outputs


def masked_rows(node: Node, source: Node, value_of: Callable[[Node], Any]) -> torch.Tensor:
    """`node`, which masks whole rows of `source`, where a function of rows stands for that."""
    rows: torch.Tensor = value_of(source)
    given = named_arguments(node)
    is_fill = is_call(node, aten.masked_fill.Scalar)
    choice = value_of(given["mask" if is_fill else "condition"])
    other = given["value" if is_fill else "self" if given["other"] is source else "other"]
    fill = value_of(other) if isinstance(other, Node) else other
    if isinstance(fill, torch.Tensor):
        fill = fill.reshape(-1)[:1].double()  # one number everywhere
    takes_fill = choice if is_fill or given["other"] is source else ~choice
    takes_fill = takes_fill.reshape(()) if choice.dim() == 0 else takes_fill.reshape(len(choice), -1)[:, :1]
    masked: torch.Tensor = torch.where(takes_fill, fill, rows)
    return masked
