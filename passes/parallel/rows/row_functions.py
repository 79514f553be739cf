"""Replacement of the activation function by arbitrary functions of a row, for mock runs.

Contract
    in    a local form whose activation function computes every row independently (row_flow.py); else NotThisForm
    out   for each node of the activation function, in the block and in the local form, its function and operands

A proof must show that each row goes to the right expert and back. The model's own function could hide an error: it may
be 0 on all numbers of a mock run, or need more features than a small copy has.
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
from moepass.passes.parallel.rows.row_flow import RowFlow, check_equal_flow, flow_in_block

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class RowFunctions:
    """The nodes of the activation function, in the block and in the local form.

    Attributes:
        calls: by node, the number of its function, equal for a node and its copy, and the operands with rows
        masks: by mask that the local form omits, the masked operand
        counts: by size that is the number of rows, the tensor with these rows
        constants: all other nodes, which only these functions read
        outputs: the nodes that weight the experts' outputs, and have their width
    """

    calls: Mapping[Node, tuple[int, tuple[Node, ...]]]
    masks: Mapping[Node, Node]
    counts: Mapping[Node, Node]
    constants: frozenset[Node]
    outputs: frozenset[Node]

    def replaces(self, node: Node) -> bool:
        """Return whether mock runs replace the value of `node` by one of another shape."""
        return node in self.calls or node in self.constants or node in self.masks


def row_functions(local: LocalForm, of_local_form: RowFlow) -> RowFunctions:
    """Return the functions of the nodes of the activation function. Raises NotThisForm if rows are not independent."""
    calls: dict[Node, tuple[int, tuple[Node, ...]]] = {}
    counts: dict[Node, Node] = {}
    constants: set[Node] = set()
    numbers = {node: number for number, node in enumerate(local.block.region)}
    of_block = flow_in_block(local)
    check_equal_flow(of_block, of_local_form, local.copies)
    nodes = [(node, node, of_block) for node in local.block.region if node in local.copied]
    nodes += ((copy, node, of_local_form) for copy, node in local.copies.items())
    for node, origin, flow in nodes:
        operands = tuple(used for used in nodes_in((node.args, node.kwargs)) if flow.has_rows(used))
        if flow.has_rows(node):
            calls[node] = (numbers[origin], operands)
        elif _counts_rows(node, flow):
            counts[node] = operands[0]
        else:
            constants.add(node)
    # A mask directly on the results of a GEMM is not replaced in mock runs.
    masks: dict[Node, Node] = {}
    for node, source in sorted(local.unmasked.items()):
        if source in calls or source in masks:
            masks[node] = source
    outputs = {node for node in calls if local.copies.get(node, node) in local.weighting}
    return RowFunctions(calls, masks, counts, frozenset(constants), frozenset(outputs))


def _counts_rows(node: Node, flow: RowFlow) -> bool:
    if node not in flow.sizes or operation(node) != "sym_size.int":
        return False
    arguments = named_arguments(node)
    layout: Any = flow.layouts.get(arguments["self"])
    return layout is not None and [factor.share for factor in layout.dimensions[arguments["dim"]]] == [()]


def function_of_rows(number: int, operands: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Return nonzero results [rows, width] of function `number` that differ by row of `operands`, each [rows, .]."""
    generator = torch.Generator().manual_seed(number)
    sums = torch.zeros(len(operands[0]), 1, dtype=torch.float64)
    for rows in operands:
        rows = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
        sums += (rows.double() @ torch.randn(rows.shape[1], generator=generator, dtype=torch.float64)).unsqueeze(-1)
    # NaN in a row stays NaN.
    factors, shift = torch.randn(2, width, generator=generator, dtype=torch.float64)
    outputs: torch.Tensor = (sums * factors + shift).sin_()
    return outputs


def masked_rows(node: Node, source: Node, value_of: Callable[[Node], Any]) -> torch.Tensor:
    """Return the result of `node`, which masks whole rows of `source`, if `source` has been replaced."""
    rows: torch.Tensor = value_of(source)
    arguments = named_arguments(node)
    is_fill = is_call(node, aten.masked_fill.Scalar)
    condition = value_of(arguments["mask" if is_fill else "condition"])
    argument = arguments["value" if is_fill else "self" if arguments["other"] is source else "other"]
    fill = value_of(argument) if isinstance(argument, Node) else argument
    if isinstance(fill, torch.Tensor):
        fill = fill.reshape(-1)[:1].double()  # all elements are equal
    takes_fill = condition if is_fill or arguments["other"] is source else ~condition
    takes_fill = takes_fill.reshape(()) if condition.dim() == 0 else takes_fill.reshape(len(condition), -1)[:, :1]
    masked: torch.Tensor = torch.where(takes_fill, fill, rows)
    return masked
