"""Replacement of masks of an expert by the indices that `torch.where(ids == e)` lists.

    rows[mask]           -->  rows[tokens]
    result[mask] = ..    -->  result[tokens] = ..
    weights[ids == e]    -->  weights[tokens, choices]

`mask` is `(ids == e).any(-1)`, or `ids == e` if each pair of a token and an expert is a row. Passes on loops over
experts then need not know masks.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.graph_writer import GraphWriter, erase_unread, refresh_fake_values
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.masks.chosen_rows import ExpertMask, expert_mask, selected_column
from moepass.passes.ops.arguments import all_arguments, is_mask

aten = torch.ops.aten

_BINDINGS = "unbacked_bindings"


def list_masked_rows(module: GraphModule) -> GraphModule:
    """Return a copy of `module` without selections by such masks, or `module` itself if it has none."""
    if not any(_mask_of(node) is not None for node in module.graph.nodes):
        return module
    changed = copy_graph_module(module)
    lists = _Lists(changed.graph)
    try:
        for node in list(changed.graph.nodes):
            if not node._erased:
                lists.replace(node)
    except NotThisForm:
        return module
    lists.erase_unread()
    _erase_equalities(changed.graph)
    changed.graph.lint()
    changed.recompile()
    return changed


def _mask_of(node: Node) -> ExpertMask | None:
    """Return the mask of one expert by which `node` reads or writes, or None."""
    index = _mask_node(node)
    mask = None if index is None else expert_mask(index)
    # A transposed mask selects in another order.
    return None if mask is None or mask.is_transposed else mask


def _mask_node(node: Node) -> Node | None:
    if not is_call(node, aten.index.Tensor, aten.index_put.default):
        return None
    (index, *more_indices) = all_arguments(node)["indices"]
    return index if not more_indices and index is not None and is_mask(index) else None


@dataclasses.dataclass(frozen=True)
class _Listed:
    """The pairs that a mask selects: the token of each, and its choice if k > 1."""

    nonzero: Node
    tokens: Node
    choices: Node | None

    @property
    def columns(self) -> list[Node]:
        return [self.tokens] if self.choices is None else [self.tokens, self.choices]

    @property
    def number(self) -> torch.SymInt:
        """Return the number of selected pairs."""
        return fake_value(self.nonzero).shape[0]  # type: ignore[no-any-return]


class _Lists:
    """The lists of selected pairs, one for each mask."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._listed: dict[ExpertMask, _Listed] = {}

    def replace(self, node: Node) -> None:
        """Replace `node` by a read of a list, if it selects by a mask or lists what a mask selects."""
        with self.graph.inserting_before(node):
            if (new := self._replacement(node)) is None:
                return
        is_resized = str(fake_value(new).shape) != str(fake_value(node).shape)
        node.replace_all_uses_with(new)
        erase_unread(self.graph, node)
        if is_resized:
            # torch does not know that two masks of one expert select the same number of pairs.
            try:
                refresh_fake_values(self.graph, new)
            except Exception as error:  # operators raise various errors for sizes that they were not captured for
                raise NotThisForm(str(error)) from error

    def erase_unread(self) -> None:
        """Erase unread columns of the lists."""
        for listed in self._listed.values():
            for column in listed.columns:
                if not column.users:
                    self.graph.erase_node(column)

    def _replacement(self, node: Node) -> Node | None:
        if node.op != "call_function" or not isinstance(fake_value(node), torch.Tensor):
            return None
        writer = GraphWriter(self.graph, node)
        column = selected_column(node)
        if column is not None:
            return self._column(node, *column, writer)
        arguments = all_arguments(node)
        if is_call(node, aten.nonzero.default):
            self._list_all(node, writer)
            return None
        mask = _mask_of(node)
        if mask is None:
            return None
        if is_call(node, aten.index_put.default):
            return self._write(node, mask, writer)
        listed = self._list(mask, node, fake_value(node).shape[0], writer)
        self._read_sizes_from(node, listed)
        is_of_pairs = fake_value(_mask_node(node)).dim() == 2  # type: ignore[arg-type]
        return writer.emit(aten.index.Tensor, arguments["self"], listed.columns if is_of_pairs else [listed.tokens])

    def _column(self, node: Node, mask: ExpertMask, are_tokens: bool, writer: GraphWriter) -> Node | None:
        """Return the replacement of a list of tokens or choices that the model has."""
        if mask.is_transposed:
            return None
        listed = self._list(mask, node, fake_value(node).shape[0], writer)
        return listed.tokens if are_tokens else listed.choices

    def _list_all(self, node: Node, writer: GraphWriter) -> None:
        """Create the list for the mask of which `node` lists all indices in one tensor, if there is one."""
        mask = expert_mask(all_arguments(node)["self"])
        if mask is not None and not mask.is_transposed:
            self._read_sizes_from(node, self._list(mask, node, fake_value(node).shape[0], writer))

    def _write(self, node: Node, mask: ExpertMask, writer: GraphWriter) -> Node | None:
        inputs = all_arguments(node)
        pairs, values = self._listed.get(mask), fake_value(inputs["values"])
        # Values of another size may be broadcast.
        if pairs is None or not values.dim() or size_expression(values.shape[0]) != size_expression(pairs.number):
            return None
        if fake_value(inputs["indices"][0]).dim() != 1:
            return None
        return writer.emit(
            aten.index_put.default, inputs["self"], [pairs.tokens], inputs["values"], inputs["accumulate"]
        )

    def _list(self, mask: ExpertMask, node: Node, number: torch.SymInt, writer: GraphWriter) -> _Listed:
        """Return the list of the pairs that `mask` selects; `number` and `node` say how many if the list is new."""
        if mask not in self._listed:
            ids = mask.chosen.ids
            chosen = writer.emit(aten.eq.Scalar, ids, mask.expert)
            dims = fake_value(ids).dim()
            # nonzero returns column-major indices.
            value = fake_value(ids).new_empty_strided((number, dims), (1, number), dtype=torch.int64)
            nonzero = writer.described(aten.nonzero.default, (chosen,), value)
            if _BINDINGS in node.meta:
                nonzero.meta[_BINDINGS] = node.meta[_BINDINGS]
            columns = [writer.emit(aten.select.int, nonzero, 1, column) for column in range(dims)]
            self._listed[mask] = _Listed(nonzero, columns[0], columns[1] if dims == 2 else None)
        return self._listed[mask]

    def _read_sizes_from(self, node: Node, listed: _Listed) -> None:
        for user in list(node.users):
            if is_call(user, aten.sym_size.int) and user.args[1] == 0:
                with self.graph.inserting_before(user):
                    size = GraphWriter(self.graph, node).emit(aten.sym_size.int, listed.nonzero, 0)
                user.replace_all_uses_with(size)
                self.graph.erase_node(user)


def _is_size(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(fake_value(value), torch.SymInt)


def _erase_equalities(graph: Graph) -> None:
    """Erase assertions that two sizes are equal, if they have become the same size."""
    for node in list(graph.nodes):
        if not is_call(node, operator.eq) or not all(map(_is_size, node.args)):
            continue
        is_same = len({size_expression(size) for size in node.args}) == 1
        if is_same and all(is_call(user, aten._assert_scalar.default) for user in node.users):
            for assertion in list(node.users):
                graph.erase_node(assertion)
            erase_unread(graph, node)
