"""Write products with masks of one-hot vectors as lookups.

`einsum("sec,sm->ecm", dispatch, x)` and `einsum("sec,ecm->sm", combine, y)` fill and read slots by masks [tokens,
experts, capacity] that are nearly all zeros. As GEMMs they cost the square of the tokens. By linear algebra the first
adds each token's row to the few slots that its mask names, and the second is a weighted sum of a few looked up rows.

Contract
    in    a captured graph
    out   the same graph, where a GEMM with a mask that is read as one-hot vectors (`one_hots.py`) is an addition to
          slots, or a sum of lookups: the same terms, without those that are zero. So a row that is not finite stays
          where it is looked up, where 0 · inf would have spread it to every sum. Other GEMMs stay as they are

Pseudo-code
    for each GEMM of a mask and something else:
        read the mask: weights and places of each token
        over tokens: to zeros, add the rows of tokens at their places
        over places: sum of the rows at a token's places, times its weights
        places of weight 0 are none: they go to a row beyond the last one
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moepass.passes.dense.dense_gemms import labels_behind
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
    """Replace GEMMs with masks of one-hot vectors."""
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
    """True for a GEMM, no batch of them, of a mask and something else."""
    if not is_call(node, aten.bmm.default, aten.mm.default) or sum(used in masks for used in node.args) != 1:
        return False
    shape = fake_value(node).shape
    return len(shape) == 2 or (isinstance(shape[0], int) and shape[0] == 1)


class _Product:
    def __init__(self, node: Node, masks: set[Node], writer: GraphWriter) -> None:
        self.node, self.writer = node, writer
        self.is_left = node.args[0] in masks
        mask, other = node.args if self.is_left else node.args[::-1]
        assert isinstance(mask, Node)
        assert isinstance(other, Node)
        self.mask_node, self.other = mask, other
        self.mask = MaskReader(writer, masks).read(mask)
        self.tokens = next(part.size for part in self.mask.parts if part.is_tokens)

    def write(self) -> Node:
        """What the GEMM gives. Raises NotThisForm."""
        kept, summed = self.mask.dimensions[-2:] if self.is_left else self.mask.dimensions[:-3:-1]
        if _is_tokens(summed) and kept and not any(part.is_tokens for part in kept):
            result = self._filled(kept)
        elif _is_tokens(kept) and summed and not any(part.is_tokens for part in summed):
            result = self._looked_up(summed)
        else:
            raise NotThisForm("its mask has tokens and places in one dimension, or no places")
        old = fake_value(self.node)
        if fake_value(result).dtype != old.dtype:
            raise NotThisForm(f"it gives {fake_value(result).dtype} where it gave {old.dtype}")
        if not self.is_left:
            result = self.writer.emit(aten.permute.default, result, [1, 0])
        if old.dim() == 3:
            result = self.writer.emit(aten.unsqueeze.default, result, 0)
        if [*map(size_expression, fake_value(result).shape)] != [*map(size_expression, old.shape)]:
            raise NotThisForm("it gives other sizes than before")
        return result

    def _rows(self, node: Node) -> Node:
        """The other operand as a matrix of what is summed, or kept where the mask is on its right."""
        if fake_value(node).dim() == 3:
            node = self.writer.emit(aten.squeeze.dim, node, 0)
        return node if self.is_left else self.writer.emit(aten.permute.default, node, [1, 0])

    def _filled(self, kept: Dimension) -> Node:
        """[slots, width]: to each slot, the rows of the tokens that have it."""
        writer, rows = self.writer, self._rows(self.other)
        width, places, total = writer.size(rows, 1), self.mask.places, self._total(kept)
        slot = self._slots(self._flat(kept), total)
        if places > 1:
            wide = writer.emit(aten.expand.default, writer.emit(aten.unsqueeze.default, rows, 1), [-1, places, -1])
            rows = writer.emit(aten.reshape.default, wide, [-1, width])
        if not self.mask.are_truths:
            weight = writer.emit(aten.reshape.default, self.mask.weight, [-1, 1])
            rows = writer.emit(aten.mul.Tensor, rows, weight)
        value = fake_value(rows)
        more = self._plus_one(total)
        zeros = writer.emit(aten.full.default, [more, width], 0, dtype=value.dtype, device=value.device)
        filled = writer.emit(aten.index_put.default, zeros, [slot], rows, True)
        return writer.emit(aten.slice.Tensor, filled, 0, 0, total)

    def _looked_up(self, summed: Dimension) -> Node:
        """[tokens, width]: of each token, the sum of the rows at its places."""
        writer, places = self.writer, self.mask.places
        table, parts = self._table(summed)
        total, width = self._total(summed), writer.size(table, 1)
        slot = self._slots(self._flat(parts), total)
        value = fake_value(table)
        zeros = writer.emit(aten.full.default, [1, width], 0, dtype=value.dtype, device=value.device)
        padded = writer.emit(aten.cat.default, [table, zeros])
        rows = writer.emit(aten.reshape.default, writer.emit(aten.index.Tensor, padded, [slot]), [-1, places, width])
        weight = writer.emit(aten.unsqueeze.default, self.mask.weight, -1)
        is_short = value.dtype in (torch.bfloat16, torch.float16)
        if is_short:
            # GEMMs add up in float32, and round once.
            rows, weight = (
                writer.emit(prims.convert_element_type.default, one, torch.float32) for one in (rows, weight)
            )
        added = writer.emit(aten.sum.dim_IntList, writer.emit(aten.mul.Tensor, rows, weight), [1])
        return writer.emit(prims.convert_element_type.default, added, value.dtype) if is_short else added

    def _flat(self, parts: Dimension) -> Node:
        """Numbers of the places of each token [tokens, k], counted over all parts."""
        flat = parts[0].index
        assert flat is not None
        for part in parts[1:]:
            assert part.index is not None
            flat = self.writer.emit(aten.mul.Tensor, flat, part.size)
            flat = self.writer.emit(aten.add.Tensor, flat, part.index)
        return flat

    def _total(self, parts: Dimension) -> Any:
        total: Any = 1
        for part in parts:
            total = self.writer.product(total, part.size)
        return total

    def _plus_one(self, total: Any) -> Any:
        return total + 1 if isinstance(total, int) else self.writer.emit(operator.add, total, 1)

    def _slots(self, flat: Node, total: Any) -> Node:
        """[tokens · k]: `flat` where a weight is not zero, else `total`, the row beyond the last."""
        writer, weight = self.writer, self.mask.weight
        is_place = weight if fake_value(weight).dtype is torch.bool else writer.emit(aten.ne.Scalar, weight, 0)
        value = fake_value(flat)
        nowhere = writer.emit(aten.scalar_tensor.default, total, dtype=value.dtype, device=value.device)
        return writer.emit(aten.reshape.default, writer.emit(aten.where.self, is_place, flat, nowhere), [-1])

    def _table(self, summed: Dimension) -> tuple[Node, Dimension]:
        """The rows that are looked up [rows, width], before copies in another order, and the parts in their order."""
        for chain in _chains_before(self.other):
            source = chain[0]
            found = labels_behind(chain)
            if found is None:
                continue
            rows, width = (found[-2], found[-1]) if self.is_left else (found[-1], found[-2])
            *outer, last = _labels(source)
            sizes = [size_expression(fake_value(source).shape[label]) for label in rows]
            if width != [last] or sorted(rows) != outer or sizes != [size_expression(part.size) for part in summed]:
                continue
            parts = tuple(part for _, part in sorted(zip(rows, summed, strict=True), key=lambda pair: pair[0]))
            table = self.writer.viewed(source, [self._total(parts), self.writer.size(source, last)])
            return table, parts
        return self._rows(self.other), summed


def _is_tokens(dimension: Dimension) -> bool:
    return len(dimension) == 1 and dimension[0].is_tokens


def _chains_before(node: Node) -> list[list[Node]]:
    """What `node` is the same elements of, and the views, copies and permutations up to it; the longest first."""
    chain = [*first_inputs(node, lambda step: has_trait(step, Trait.RESHAPE, Trait.COPY, Trait.PERMUTE))][::-1]
    return [chain[start:] for start in range(len(chain))]


def _labels(node: Node) -> list[int]:
    """The dimensions of more than one element."""
    return [dim for dim, size in enumerate(fake_value(node).shape) if not (isinstance(size, int) and size == 1)]
