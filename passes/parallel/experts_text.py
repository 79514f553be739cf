"""Text of the experts of a local form, which ranks compare.

The local form uses this rank's activation function, biases and dtypes for the experts of all ranks, so these must be
equal on all ranks. The text contains everything between a row and the output of its expert: operators, constants with
their contents, dtypes and widths. It omits what may differ between ranks: the number of rows, device indices and names
of nodes. A number counts rows if it depends on their number (row_flow.py), not if it happens to be equal.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Node

from moepass.passes.graph.canonical_text import CanonicalText, describe_constant
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import constant_of, fake_value
from moepass.passes.ops.arguments import named_arguments
from moepass.passes.ops.walk import ancestors
from moepass.passes.parallel.local_form.local_experts import LocalForm
from moepass.passes.parallel.match.gathered_masks import OF_MASK_KEY
from moepass.passes.parallel.rows.row_flow import RowFlow


def experts_text(local: LocalForm, flow: RowFlow) -> tuple[str, ...]:
    """Return a line for every operation between a row and its expert's output, and lines for the block.

    `flow` is that of the local form (`flow_in_local_form`).
    """
    block = local.block
    leaves = {local.rows: "rows", local.ends: "where each expert's rows end"}
    if local.row_ids is not None:
        leaves[local.row_ids] = "the expert of each row"
    leaves |= {node: f"what travels with the rows, {number}" for number, node in enumerate(local.travelling)}
    leaves |= {node: f"expert tensor {number}" for number, node in enumerate(local.complete.values())}
    rows = fake_value(local.rows).shape[0]

    def describe_leaf(node: Node) -> str:
        if node in leaves:
            return f"{leaves[node]} {_described(fake_value(node))}"
        if node in flow.sizes:
            return f"a size, {_in_rows(fake_value(node), rows)}"
        return f"constant {describe_constant(constant_of(node), is_placed=False)}"

    text = CanonicalText(describe_leaf)
    for node in leaves:
        text.add_source(node)

    def is_needed(node: Node) -> bool:
        return node not in leaves and node.op == "call_function" and node not in flow.sizes

    needed = set(filter(is_needed, ancestors(local.outputs, follow=is_needed)))
    for node in local.written:
        if node in needed and node in flow.full_slices:
            text.add_alias(node, node.all_input_nodes[0])
        elif node in needed:
            text.add(node, _describe_results(node, flow, rows), arguments=_arguments(node, flow, rows))
    kinds = (call.kind + " of a mask" * (OF_MASK_KEY in call.node.meta) for call in block.exchanges)
    text.remark(
        f"{block.form} of {block.experts} experts, {', '.join(kinds)}, "
        f"shards {block.bounds}, to {fake_value(block.sink).dtype}{', some dropped' * block.drops}"
    )
    text.remark(f"casts of rows {local.types}")
    return tuple(str(text).splitlines())


def _describe_results(node: Node, flow: RowFlow, rows: Any) -> str:
    """Return the dtypes and sizes of the results of `node`, without the number of rows."""
    value, layout, places = fake_value(node), flow.layouts.get(node), flow.places.get(node, {})

    def describe(tensor: torch.Tensor, layout: Any) -> str:
        sizes = [
            _in_rows(size, rows)
            if isinstance(size, torch.SymInt) or ("size", dim) in places or (layout and layout.has_rows_along(dim))
            else str(size)
            for dim, size in enumerate(tensor.shape)
        ]
        return _typed(tensor, sizes)

    if isinstance(value, torch.Tensor):
        # GEMMs and biases of a local form are by row.
        return describe(value, layout) if node in flow.layouts else _described(value)
    if not isinstance(value, (tuple, list)):
        return type(value).__name__
    layouts = layout if isinstance(layout, tuple) else (None,) * len(value)
    return f"({'; '.join(map(describe, value, layouts))})"


def _arguments(node: Node, flow: RowFlow, rows: Any) -> tuple[Any, Any]:
    """Return the arguments of `node`, with numbers that count rows as multiples of the number of rows."""
    multiples = flow.places.get(node, {})

    def change(name: str, argument: Any, position: int = 0) -> Any:
        if isinstance(argument, (list, tuple)):
            changed = [change(name, item, number) for number, item in enumerate(argument)]
            return tuple(changed) if isinstance(argument, tuple) else changed
        if (name, position) in multiples:
            return f"{multiples[name, position]} x rows"
        if isinstance(argument, torch.device):
            return argument.type
        in_flow = isinstance(argument, Node) and argument in flow.sizes
        return _in_rows(fake_value(argument), rows) if in_flow else argument

    names = list(named_arguments(node))[: len(node.args)]
    args = tuple(change(name, argument) for name, argument in zip(names, node.args, strict=False))
    return args, {name: change(name, value) for name, value in node.kwargs.items()}


def _described(value: torch.Tensor) -> str:
    """Return the dtype and sizes of a value with one element for each row or expert."""
    return _typed(value, [".", *(str(size) if isinstance(size, int) else "?" for size in value.shape[1:])])


def _typed(value: torch.Tensor, sizes: list[str]) -> str:
    return f"{value.dtype} [{', '.join(sizes)}] on {value.device.type}"


def _in_rows(size: Any, rows: Any) -> str:
    """Return `size` as a multiple of `rows`, in the same words for numbers and symbols."""
    total, unit = size_expression(size), size_expression(rows)
    if total == unit:
        return "1 x rows"
    ratio = sympy.simplify(total / unit) if unit != 0 else sympy.Integer(1)
    return f"{ratio} x rows" if ratio.is_number else "some rows"
