"""Rows that a mask of an expert selects are listed by number, as `torch.where(ids == e)` lists them.

    rows[mask]           rows[tokens]
    result[mask] = ..    result[tokens] = ..
    weights[ids == e]    weights[tokens, places]

`mask` is `(ids == e).any(-1)`, or `ids == e` where each pair of a token and an expert is a row. What loops over experts
may be written in is so one form less.
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
    """A copy of `module` without selections by such masks; `module` itself where there are none."""
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
    """The mask of one expert that `node` looks up by, or writes by."""
    index = _mask_node(node)
    mask = None if index is None else expert_mask(index)
    # A turned mask selects in another order.
    return None if mask is None or mask.is_turned else mask


def _mask_node(node: Node) -> Node | None:
    if not is_call(node, aten.index.Tensor, aten.index_put.default):
        return None
    (index, *others) = all_arguments(node)["indices"]
    return index if not others and index is not None and is_mask(index) else None


@dataclasses.dataclass(frozen=True)
class _Listed:
    """What a mask selects: the token of each pair, and its place among the token's k where there are several."""

    nonzero: Node
    tokens: Node
    places: Node | None

    @property
    def all_places(self) -> list[Node]:
        return [self.tokens] if self.places is None else [self.tokens, self.places]

    @property
    def number(self) -> torch.SymInt:
        """How many pairs it selects."""
        return fake_value(self.nonzero).shape[0]  # type: ignore[no-any-return]


class _Lists:
    """The lists of what masks select, one for each mask."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._listed: dict[ExpertMask, _Listed] = {}

    def replace(self, node: Node) -> None:
        """Let what reads `node` read a list, if `node` selects something by a mask, or lists it."""
        with self.graph.inserting_before(node):
            if (new := self._written(node)) is None:
                return
        is_resized = str(fake_value(new).shape) != str(fake_value(node).shape)
        node.replace_all_uses_with(new)
        erase_unread(self.graph, node)
        if is_resized:
            # Two masks of one expert select equally many, which torch does not know.
            try:
                refresh_fake_values(self.graph, new)
            except Exception as error:  # whatever an operator says to a size that it was not captured for
                raise NotThisForm(str(error)) from error

    def erase_unread(self) -> None:
        """Erase what lists the places of pairs of which only the tokens are read."""
        for found in self._listed.values():
            for column in found.all_places:
                if not column.users:
                    self.graph.erase_node(column)

    def _written(self, node: Node) -> Node | None:
        if node.op != "call_function" or not isinstance(fake_value(node), torch.Tensor):
            return None
        writer = GraphWriter(self.graph, node)
        column = selected_column(node)
        if column is not None:
            return self._column(node, *column, writer)
        given = all_arguments(node)
        if is_call(node, aten.nonzero.default):
            self._list_all(node, writer)
            return None
        mask = _mask_of(node)
        if mask is None:
            return None
        if is_call(node, aten.index_put.default):
            return self._write(node, mask, writer)
        found = self._list(mask, node, fake_value(node).shape[0], writer)
        self._read_size_of(node, found)
        is_of_pairs = fake_value(_mask_node(node)).dim() == 2  # type: ignore[arg-type]
        return writer.emit(aten.index.Tensor, given["self"], found.all_places if is_of_pairs else [found.tokens])

    def _column(self, node: Node, mask: ExpertMask, are_tokens: bool, writer: GraphWriter) -> Node | None:
        """A list as the model has it, of tokens or places."""
        if mask.is_turned:
            return None
        found = self._list(mask, node, fake_value(node).shape[0], writer)
        return found.tokens if are_tokens else found.places

    def _list_all(self, node: Node, writer: GraphWriter) -> None:
        """The list of what `node` lists in one tensor, as soon as it does."""
        mask = expert_mask(all_arguments(node)["self"])
        if mask is not None and not mask.is_turned:
            self._read_size_of(node, self._list(mask, node, fake_value(node).shape[0], writer))

    def _write(self, node: Node, mask: ExpertMask, writer: GraphWriter) -> Node | None:
        given = all_arguments(node)
        found, values = self._listed.get(mask), fake_value(given["values"])
        # Values of another size may be repeated for each row.
        if found is None or not values.dim() or size_expression(values.shape[0]) != size_expression(found.number):
            return None
        if fake_value(given["indices"][0]).dim() != 1:
            return None
        return writer.emit(aten.index_put.default, given["self"], [found.tokens], given["values"], given["accumulate"])

    def _list(self, mask: ExpertMask, node: Node, number: torch.SymInt, writer: GraphWriter) -> _Listed:
        """What `mask` selects: `number` pairs, if `node` is the first that tells how many."""
        if mask not in self._listed:
            ids = mask.chosen.ids
            chosen = writer.emit(aten.eq.Scalar, ids, mask.expert)
            dims = fake_value(ids).dim()
            # It lies column by column, as torch says of it too, but with a size of its own.
            value = fake_value(ids).new_empty_strided((number, dims), (1, number), dtype=torch.int64)
            nonzero = writer.described(aten.nonzero.default, (chosen,), value)
            if _BINDINGS in node.meta:
                nonzero.meta[_BINDINGS] = node.meta[_BINDINGS]
            columns = [writer.emit(aten.select.int, nonzero, 1, column) for column in range(dims)]
            self._listed[mask] = _Listed(nonzero, columns[0], columns[1] if dims == 2 else None)
        return self._listed[mask]

    def _read_size_of(self, node: Node, found: _Listed) -> None:
        """Let those who read how many pairs there are from `node` read it from the list."""
        for user in list(node.users):
            if is_call(user, aten.sym_size.int) and user.args[1] == 0:
                with self.graph.inserting_before(user):
                    size = GraphWriter(self.graph, node).emit(aten.sym_size.int, found.nonzero, 0)
                user.replace_all_uses_with(size)
                self.graph.erase_node(user)


def _is_size(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(fake_value(value), torch.SymInt)


def _erase_equalities(graph: Graph) -> None:
    """Erase the assertions that two sizes are equal which are one now."""
    for node in list(graph.nodes):
        if not is_call(node, operator.eq) or not all(map(_is_size, node.args)):
            continue
        is_one = len({size_expression(one) for one in node.args}) == 1
        if is_one and all(is_call(user, aten._assert_scalar.default) for user in node.users):
            for assertion in list(node.users):
                graph.erase_node(assertion)
            erase_unread(graph, node)
