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

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moepass.passes.dense.dense_gemms import labels_of_chain
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.ops.walk import first_inputs
from moepass.passes.slots.one_hots import Dimension, MaskReader, possible_masks

aten, prims = torch.ops.aten, torch.ops.prims


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
    graph.lint()
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
        self.is_left = node.args[0] in masks
        mask, operand = node.args if self.is_left else node.args[::-1]
        assert isinstance(mask, Node)
        assert isinstance(operand, Node)
        self.mask_node, self.operand = mask, operand
        self.mask = MaskReader(writer, masks).read(mask)
        self.tokens = next(factor.size for factor in self.mask.factors if factor.is_tokens)

    def write(self) -> Node:
        """Return the result of the GEMM. Raises NotThisForm."""
        output, summed = self.mask.dimensions[-2:] if self.is_left else self.mask.dimensions[:-3:-1]
        if _is_tokens(summed) and output and not any(factor.is_tokens for factor in output):
            result = self._fill_slots(output)
        elif _is_tokens(output) and summed and not any(factor.is_tokens for factor in summed):
            result = self._look_up(summed)
        else:
            raise NotThisForm("its mask has tokens and entries in one dimension, or no entries")
        old = fake_value(self.node)
        if fake_value(result).dtype != old.dtype:
            raise NotThisForm(f"its result would be {fake_value(result).dtype}, not {old.dtype}")
        if not self.is_left:
            result = self.writer.emit(aten.permute.default, result, [1, 0])
        if old.dim() == 3:
            result = self.writer.emit(aten.unsqueeze.default, result, 0)
        if [*map(size_expression, fake_value(result).shape)] != [*map(size_expression, old.shape)]:
            raise NotThisForm("its result would have another shape")
        return result

    def _rows(self, node: Node) -> Node:
        """Return the other operand as a matrix [summed, width], whichever side the mask is on."""
        if fake_value(node).dim() == 3:
            node = self.writer.emit(aten.squeeze.dim, node, 0)
        return node if self.is_left else self.writer.emit(aten.permute.default, node, [1, 0])

    def _fill_slots(self, output: Dimension) -> Node:
        """Return [slots, width]: for each slot the sum of the rows of its tokens."""
        writer, rows = self.writer, self._rows(self.operand)
        width, entries, total = writer.size(rows, 1), self.mask.entries, self._total(output)
        slot = self._slots(self._flat(output), total)
        if entries > 1:
            wide = writer.emit(aten.expand.default, writer.emit(aten.unsqueeze.default, rows, 1), [-1, entries, -1])
            rows = writer.emit(aten.reshape.default, wide, [-1, width])
        if not self.mask.is_boolean:
            weight = writer.emit(aten.reshape.default, self.mask.weight, [-1, 1])
            rows = writer.emit(aten.mul.Tensor, rows, weight)
        value = fake_value(rows)
        more = self._plus_one(total)
        zeros = writer.emit(aten.full.default, [more, width], 0, dtype=value.dtype, device=value.device)
        filled = writer.emit(aten.index_put.default, zeros, [slot], rows, True)
        return writer.emit(aten.slice.Tensor, filled, 0, 0, total)

    def _look_up(self, summed: Dimension) -> Node:
        """Return [tokens, width]: for each token the sum of the rows at its entries."""
        writer, entries = self.writer, self.mask.entries
        table, factors = self._table(summed)
        total, width = self._total(summed), writer.size(table, 1)
        slot = self._slots(self._flat(factors), total)
        value = fake_value(table)
        zeros = writer.emit(aten.full.default, [1, width], 0, dtype=value.dtype, device=value.device)
        padded = writer.emit(aten.cat.default, [table, zeros])
        rows = writer.emit(aten.reshape.default, writer.emit(aten.index.Tensor, padded, [slot]), [-1, entries, width])
        weight = writer.emit(aten.unsqueeze.default, self.mask.weight, -1)
        is_short = value.dtype in (torch.bfloat16, torch.float16)
        if is_short:
            # GEMMs accumulate in float32, and round once.
            rows, weight = (
                writer.emit(prims.convert_element_type.default, tensor, torch.float32) for tensor in (rows, weight)
            )
        added = writer.emit(aten.sum.dim_IntList, writer.emit(aten.mul.Tensor, rows, weight), [1])
        return writer.emit(prims.convert_element_type.default, added, value.dtype) if is_short else added

    def _flat(self, factors: Dimension) -> Node:
        """Return the flat index of each entry [tokens, k] over all factors."""
        flat = factors[0].index
        assert flat is not None
        for factor in factors[1:]:
            assert factor.index is not None
            flat = self.writer.emit(aten.mul.Tensor, flat, factor.size)
            flat = self.writer.emit(aten.add.Tensor, flat, factor.index)
        return flat

    def _total(self, factors: Dimension) -> Any:
        total: Any = 1
        for factor in factors:
            total = self.writer.product(total, factor.size)
        return total

    def _plus_one(self, total: Any) -> Any:
        return total + 1 if isinstance(total, int) else self.writer.emit(operator.add, total, 1)

    def _slots(self, flat: Node, total: Any) -> Node:
        """Return [tokens · k]: the index in `flat`, or `total`, the row after the last, if the weight is zero."""
        writer, weight = self.writer, self.mask.weight
        is_entry = weight if fake_value(weight).dtype is torch.bool else writer.emit(aten.ne.Scalar, weight, 0)
        value = fake_value(flat)
        last = writer.emit(aten.scalar_tensor.default, total, dtype=value.dtype, device=value.device)
        return writer.emit(aten.reshape.default, writer.emit(aten.where.self, is_entry, flat, last), [-1])

    def _table(self, summed: Dimension) -> tuple[Node, Dimension]:
        """Return the rows to look up [rows, width], before permuting copies, and the factors in their order."""
        for chain in _chains_before(self.operand):
            source = chain[0]
            labels = labels_of_chain(chain)
            if labels is None:
                continue
            rows, width = (labels[-2], labels[-1]) if self.is_left else (labels[-1], labels[-2])
            *outer, last = _labels(source)
            sizes = [size_expression(fake_value(source).shape[label]) for label in rows]
            if width != [last] or sorted(rows) != outer or sizes != [size_expression(factor.size) for factor in summed]:
                continue
            factors = tuple(factor for _, factor in sorted(zip(rows, summed, strict=True), key=lambda pair: pair[0]))
            table = self.writer.viewed(source, [self._total(factors), self.writer.size(source, last)])
            return table, factors
        return self._rows(self.operand), summed


def _is_tokens(dimension: Dimension) -> bool:
    return len(dimension) == 1 and dimension[0].is_tokens


def _chains_before(node: Node) -> list[list[Node]]:
    """Return the chains of views, copies and permutations from a source to `node`, longest first."""
    chain = [*first_inputs(node, lambda step: has_trait(step, Trait.RESHAPE, Trait.COPY, Trait.PERMUTE))][::-1]
    return [chain[start:] for start in range(len(chain))]


def _labels(node: Node) -> list[int]:
    return [dim for dim, size in enumerate(fake_value(node).shape) if not (isinstance(size, int) and size == 1)]
