"""Describe the experts of a local form so that ranks can compare them.

A rank writes its own activation function, biases and types into the local form for the experts of all ranks. That is
what the model computes only if every rank would write the same. The text holds everything that is computed from a row
to the output of its expert: operators, constants with their contents, types and widths. It does not hold what ranks and
shapes may differ in: how many rows there are, which of several devices of a kind computes, and what nodes are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from moepass.passes.canonical_text import CanonicalText, describe_constant
from moepass.passes.graph import constant_of, fake_value
from moepass.passes.input_sizes import size_expression
from moepass.passes.local_experts import LocalForm


def experts_text(local: LocalForm) -> tuple[str, ...]:
    """A line for every operation between a row and its expert's output, and one for what stands around them."""
    block = local.block
    leaves = {local.rows: "rows", local.ends: "where each expert's rows end"}
    if local.row_ids is not None:
        leaves[local.row_ids] = "the expert of each row"
    for number, complete in enumerate(local.complete.values()):
        leaves[complete] = f"expert tensor {number}"

    def describe_leaf(node: Node) -> str:
        if node in leaves:
            return f"{leaves[node]} {_describe(fake_value(node))}"
        if _is_size(node):
            return f"a size, {_in_rows(fake_value(node), rows)}"
        return f"constant {describe_constant(constant_of(node), is_placed=False)}"

    rows = fake_value(local.rows).shape[0]
    needed = _needed(local, leaves)
    text = CanonicalText(describe_leaf)
    for node in leaves:
        text.add_source(node)
    for node in local.written:
        if node in needed:
            text.add(node, _describe(fake_value(node)), arguments=_without_rows(node, rows))
    text.remark(
        f"{block.form} of {block.experts} experts, {', '.join(exchange.kind for exchange in block.exchanges)}, "
        f"shards {block.bounds}, to {fake_value(block.sink).dtype}"
    )
    return tuple(str(text).splitlines())


def _needed(local: LocalForm, leaves: Mapping[Node, str]) -> set[Node]:
    needed: set[Node] = set()
    pending = [local.outputs]
    while pending:
        node = pending.pop()
        if node not in needed and node not in leaves and node.op == "call_function" and not _is_size(node):
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return needed


def _is_size(node: Node) -> bool:
    return isinstance(fake_value(node), (int, torch.SymInt))


def _describe(value: Any) -> str:
    """Type and widths, without the number of rows."""
    if isinstance(value, (list, tuple)):
        return f"({'; '.join(map(_describe, value))})"
    widths = [str(size) if isinstance(size, int) else "?" for size in value.shape[1:]]
    return f"{value.dtype} [., {', '.join(widths)}] on {value.device.type}"


def _without_rows(node: Node, rows: Any) -> tuple[Any, Any]:
    """The arguments of `node`, with sizes of the first dimension in units of `rows`."""
    value = fake_value(node)
    first = value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else None

    def change(argument: Any, may_be_size: bool) -> Any:
        if isinstance(argument, (list, tuple)):
            changed = [change(item, position == 0) for position, item in enumerate(argument)]
            return tuple(changed) if isinstance(argument, tuple) else changed
        if isinstance(argument, torch.device):
            return argument.type
        if not may_be_size:
            return argument
        size = fake_value(argument) if isinstance(argument, Node) else argument
        is_size = isinstance(size, (int, torch.SymInt)) and not isinstance(size, bool) and str(size) == str(first)
        return _in_rows(size, rows) if is_size else argument

    args = tuple(change(argument, position == 0) for position, argument in enumerate(node.args))
    return args, {name: change(value, False) for name, value in node.kwargs.items()}


def _in_rows(size: Any, rows: Any) -> str:
    """`size` as a multiple of `rows`: the same words for numbers and for symbols."""
    total, unit = size_expression(size), size_expression(rows)
    ratio = sympy.simplify(total / unit) if unit != 0 else sympy.Integer(1)
    return f"{ratio} x rows" if ratio.is_number else "some rows"
