"""Rewrite GEMMs with one-hot masks as lookups.

`einsum("sec,sm->ecm", dispatch, x)` and `einsum("sec,ecm->sm", combine, y)` fill and read capacity slots through masks
[tokens, experts, capacity] that are nearly all zeros, at a cost that is quadratic in the number of tokens. The first
adds each token's row to the few slots that its mask selects; the second is a weighted sum of a few rows.

Contract
    in    a captured graph
    out   the same graph, in which a GEMM with a mask that can be read as one-hot vectors (`one_hots.py`) is an addition
          to slots, or a sum of lookups: the same terms without the zeros. A row that is not finite affects only its own
          slots or tokens, whereas 0 · inf affected every sum. Other GEMMs stay unchanged.

Pseudo-code
    for each GEMM of a mask and another operand:
        read the mask: the entries of each token, with weights and indices
        sum over tokens: add the rows of tokens to zeros, at the indices of their entries
        sum over slots: add up the rows at the indices of a token's entries, times the weights
        entries of weight 0 use a row after the last one
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from moepass.passes.dense.dense_gemms import labelled_sources
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.input_sizes import have_equal_shapes, size_expressions
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.ops.arguments import matrix_operands
from moepass.passes.slots.one_hots import Dimension, MaskReader, possible_masks

aten = torch.ops.aten


@graph_pass(conflicts={"blocks"})
def look_up_one_hots(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Replace GEMMs with one-hot masks."""
    masks = possible_masks(module.graph)
    if not any(_is_product(node, masks) for node in module.graph.nodes):
        return PassResult(module, plan)
    changed = copy_graph_module(module)
    graph = changed.graph
    masks = possible_masks(graph)
    matches: list[str] = []
    for node in [node for node in graph.nodes if _is_product(node, masks)]:
        writer = GraphWriter(graph, node)
        try:
            with graph.inserting_before(node):
                result = _Product(node, masks, writer).write()
        except NotThisForm:
            writer.erase()
            continue
        matches.append(node.name)
        node.replace_all_uses_with(result)
        erase_unread(graph, node)
    if not matches:
        return PassResult(module, plan)
    for node in reversed(graph.nodes):
        if node in masks and not node.users:
            graph.erase_node(node)
    changed.recompile()
    return PassResult(changed, plan, tuple(matches))


def _is_product(node: Node, masks: set[Node]) -> bool:
    """Return whether `node` is a GEMM, with batch size 1, of one mask and another operand."""
    if not is_call(node, aten.bmm.default, aten.mm.default) or sum(used in masks for used in node.args) != 1:
        return False
    shape = fake_value(node).shape
    return len(shape) == 2 or (isinstance(shape[0], int) and shape[0] == 1)


class _Product:
    def __init__(self, node: Node, masks: set[Node], writer: GraphWriter) -> None:
        self.node, self.writer = node, writer
        left, right, _ = matrix_operands(node)
        self.is_left = left in masks
        mask, self.operand = (left, right) if self.is_left else (right, left)
        self.mask = MaskReader(writer, masks).read(mask)

    def write(self) -> Node:
        """Return the result of the GEMM. Raises NotThisForm."""
        output, summed = self.mask.dimensions[-2:] if self.is_left else self.mask.dimensions[:-3:-1]
        if _is_tokens(summed) and output:
            result = self._fill_slots(output)
        elif _is_tokens(output) and summed:
            result = self._look_up(summed)
        else:
            raise NotThisForm("its mask has tokens and entries in one dimension, or no entries")
        old = fake_value(self.node)
        if fake_value(result).dtype != old.dtype:
            raise NotThisForm(f"its result would be {fake_value(result).dtype}, not {old.dtype}")
        if not self.is_left:
            result = self.writer.permuted(result, [1, 0])
        if old.dim() == 3:
            result = self.writer.emit(aten.unsqueeze.default, result, 0)
        if not have_equal_shapes(result, self.node):
            raise NotThisForm("its result would have another shape")
        return result

    def _rows(self) -> Node:
        """Return the other operand as a matrix [summed, width], whichever side the mask is on."""
        rows = self.operand
        if fake_value(rows).dim() == 3:
            rows = self.writer.emit(aten.squeeze.dim, rows, 0)
        return rows if self.is_left else self.writer.permuted(rows, [1, 0])

    def _fill_slots(self, output: Dimension) -> Node:
        """Return [slots, width]: for each slot the sum of the rows of its tokens."""
        writer, rows, entries = self.writer, self._rows(), self.mask.entries
        width, total = writer.size(rows, 1), writer.product(*(factor.size for factor in output))
        slot = self._slots(output, total)
        if entries > 1:
            wide = writer.emit(aten.expand.default, writer.emit(aten.unsqueeze.default, rows, 1), [-1, entries, -1])
            rows = writer.emit(aten.reshape.default, wide, [-1, width])
        if not self.mask.is_boolean:
            weight = writer.emit(aten.reshape.default, self.mask.weight, [-1, 1])
            rows = writer.emit(aten.mul.Tensor, rows, weight)
        filled = writer.emit(aten.index_put.default, self._zeros(writer.sum(total, 1), rows), [slot], rows, True)
        return writer.emit(aten.slice.Tensor, filled, 0, 0, total)

    def _look_up(self, summed: Dimension) -> Node:
        """Return [tokens, width]: for each token the sum of the rows at its entries."""
        writer = self.writer
        table, factors = self._table(summed)
        slot = self._slots(factors, writer.product(*(factor.size for factor in factors)))
        padded = writer.emit(aten.cat.default, [table, self._zeros(1, table)])
        shape = [-1, self.mask.entries, writer.size(table, 1)]
        rows = writer.emit(aten.reshape.default, writer.emit(aten.index.Tensor, padded, [slot]), shape)
        weight = writer.emit(aten.unsqueeze.default, self.mask.weight, -1)
        # GEMMs accumulate in float32, and round once.
        product = writer.emit(aten.mul.Tensor, writer.cast_to_accumulate(rows), writer.cast_to_accumulate(weight))
        return writer.cast(writer.emit(aten.sum.dim_IntList, product, [1]), fake_value(table).dtype)

    def _zeros(self, count: Any, rows: Node) -> Node:
        value = fake_value(rows)
        return self.writer.full([count, self.writer.size(rows, 1)], 0, value.device, value.dtype)

    def _slots(self, factors: Dimension, total: Any) -> Node:
        """Return [tokens · k]: the flat index over all factors, or `total`, the row after the last, for weight zero."""
        writer, weight = self.writer, self.mask.weight
        flat, *indices = (cast(Node, factor.index) for factor in factors)
        for factor, index in zip(factors[1:], indices, strict=True):
            flat = writer.emit(aten.add.Tensor, writer.emit(aten.mul.Tensor, flat, factor.size), index)
        is_entry = weight if fake_value(weight).dtype is torch.bool else writer.emit(aten.ne.Scalar, weight, 0)
        last = writer.scalar(total, flat)
        return writer.emit(aten.reshape.default, writer.emit(aten.where.self, is_entry, flat, last), [-1])

    def _table(self, summed: Dimension) -> tuple[Node, Dimension]:
        """Return the rows to look up [rows, width], before permuting copies, and the factors in their order."""
        for source, labels in labelled_sources(self.operand):
            rows, width = labels[-2:] if self.is_left else labels[:-3:-1]
            sizes = size_expressions(fake_value(source).shape[label] for label in rows)
            if width != [max(rows + width)] or sizes != size_expressions(factor.size for factor in summed):
                continue
            factors = tuple(factor for _, factor in sorted(zip(rows, summed, strict=True), key=lambda pair: pair[0]))
            count = self.writer.product(*(factor.size for factor in factors))
            return self.writer.viewed(source, [count, self.writer.size(source, *width)]), factors
        return self._rows(), summed


def _is_tokens(dimension: Dimension) -> bool:
    return len(dimension) == 1 and dimension[0].is_tokens
