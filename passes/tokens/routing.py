"""Rules for rows that are sorted by expert.

A router gives every token k experts. The pairs of a token and an expert are sorted by expert, the rows of tokens are
looked up in that order, and grouped GEMMs multiply them, until a second lookup restores the order of tokens. A chunk of
tokens has the same results, because the weights that multiply a row depend only on the expert of its pair.

    ids        [pairs]          the expert of each pair, tokens · k pairs in the order of tokens
    SORTED     [rows]           sorted ids
    PAIRS      [rows]           the pair of each row: the sort's indices
    TOKENS     [rows]           the token of each row: pairs // k
    ROWS       [pairs]          the row of each pair: PAIRS inverted
    COUNTS     [experts]        rows of each expert, by a histogram of ids
    ENDS       [experts]        where each expert's rows end: sums of counts

These numbers differ between chunks, so only the operations below may read them, in the same region.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call, several
from moepass.passes.ops.arguments import all_arguments, is_arange, named_arguments
from moepass.passes.ops.traits import Trait, base_operation, has_trait, operation
from moepass.passes.rows.row_layout import Dimension, Layout, Part, features, features_per_row, no_rows, size_of
from moepass.passes.rows.row_rules import Layouts, RowRules
from moepass.passes.tokens.expert_ids import never_negative

PAIRS, TOKENS, ROWS, COUNTS, ENDS, EMPTY = "pairs", "tokens", "rows", "counts", "ends", "empty"


@dataclasses.dataclass(frozen=True)
class Fact:
    """The meaning of a value's numbers: its kind, the `ids` of pairs, and their `sort`.

    `sort` is None for counts and ends, which are the same for every sort of the same ids.
    """

    kind: str
    ids: Node
    sort: Node | None = None


@dataclasses.dataclass(frozen=True)
class Routed:
    layouts: Layouts


class RoutingRules(RowRules):
    """The rules of rows, with routing; `facts` has the meaning of numbers that are valid only within a chunk."""

    def __init__(self, excluded_ids: frozenset[Node]) -> None:
        super().__init__()
        self._excluded_ids = excluded_ids
        self.facts: dict[Node, Fact] = {}
        # The ids of each sort, and of each node with sorted ids.
        self._ids: dict[Node, Node] = {}
        self._sorted: dict[Node, Node] = {}
        # Pair numbers 0, 1, ..., which each chunk creates for its own pairs.
        self.recreated: set[Node] = set()

    def routed(self) -> dict[Node, Node]:
        """Return the ids for each node that has rows sorted by expert, or numbers of such rows."""
        ids_by_node = {node: fact.ids for node, fact in self.facts.items()}
        ids_of = {_share(sort): ids for sort, ids in self._ids.items()}
        for node, layouts in self._layouts.items():
            for layout in several(layouts):
                for share in layout.shares if layout is not None else ():
                    if share in ids_of:
                        ids_by_node[node] = ids_of[share]
        for node in self.recreated:
            ids_by_node[node] = next(self.facts[user].ids for user in node.users if user in self.facts)
        return ids_by_node

    def is_routing_operator(self, node: Node) -> bool:
        return is_grouped_gemm(node)

    def routing_layouts(self, node: Node) -> Routed | None:
        """Return the layouts of a routing operation's results, or None for other operations; may raise NotThisForm."""
        if is_grouped_gemm(node):
            return Routed(self._grouped(node))
        base, arguments = base_operation(node), all_arguments(node)
        routed: Routed | None = None
        if has_trait(node, Trait.SORT):
            routed = self._sort(node, arguments)
        elif operation(node) == "getitem":
            routed = self._element(node)
        elif base in ("floor_divide", "div"):
            routed = self._tokens(node, arguments)
        elif base == "index":
            routed = self._lookup(node, arguments)
        elif base == "index_put":
            routed = self._inverse(node, arguments)
        elif base == "empty_like":
            routed = self._empty(node, arguments)
        elif base == "histc":
            routed = self._counts(node, arguments)
        elif base == "cumsum":
            routed = self._ends(node, arguments)
        elif has_trait(node, Trait.CAST):
            routed = self._cast(node, arguments)
        if routed is None and any(used in self.facts for used in node.all_input_nodes):
            self._refuse(node, "computes with the indices of sorted rows")
        return routed

    def _sort(self, node: Node, arguments: dict[str, Any]) -> Routed | None:
        ids = arguments["self"]
        value = fake_value(ids)
        if value.dim() != 1:
            return None
        is_tuple = isinstance(fake_value(node), (tuple, list))
        fact = self.facts.get(ids)
        if fact is not None and fact.kind == PAIRS and not arguments.get("descending", False):
            # The indices of sorted pairs are the rows of pairs.
            layout = self._layout(fact.ids)
            self._note(node, Fact(ROWS, fact.ids, fact.sort))
            return Routed((None, layout) if is_tuple else layout)
        layout = self._layout(ids)
        # The groups of a grouped GEMM are in the order of experts.
        is_ascending = arguments.get("descending", False) is False
        are_ids = _are_pairs(layout.dimensions[0]) and not value.dtype.is_floating_point
        if fact is not None or not are_ids or not is_ascending:
            return None
        if ids in self._excluded_ids:
            self._refuse(node, "sorts rows that operations on all tokens together read")
        if not never_negative(ids):
            self._refuse(node, "sorts expert ids that may be negative")
        self._ids[node] = ids
        rows = Layout((_rows_of(node, layout.dimensions[0]),))
        if is_tuple:
            return Routed((rows, rows))
        self._note(node, Fact(PAIRS, ids, node))
        return Routed(rows)

    def _element(self, node: Node) -> Routed | None:
        source, index = node.args
        assert isinstance(source, Node)
        if source in self.facts and self.facts[source].kind == ROWS:
            if index != 1:
                self._refuse(node, "reads sorted numbers of pairs")
            self._note(node, self.facts[source])
            return Routed(self._layouts[source][1])  # type: ignore[index]
        if source not in self._ids:
            return None
        layout = self._layouts[source][index]  # type: ignore[index]
        if index == 1:
            self._note(node, Fact(PAIRS, self._ids[source], source))
        else:
            self._sorted[node] = self._ids[source]
        return Routed(layout)

    def _tokens(self, node: Node, arguments: dict[str, Any]) -> Routed | None:
        pairs, by = arguments["self"], arguments["other"]
        fact = self.facts.get(pairs) if isinstance(pairs, Node) else None
        if fact is None or fact.kind != PAIRS:
            return None
        rounds = base_operation(node) == "floor_divide" or arguments.get("rounding_mode") in ("floor", "trunc")
        if not rounds or by != features_per_row(self._layout(fact.ids).dimensions[0]):
            return None
        self._note(node, Fact(TOKENS, fact.ids, fact.sort))
        return Routed(self._layout(pairs))

    def _lookup(self, node: Node, arguments: dict[str, Any]) -> Routed | None:
        table, indices = arguments["self"], arguments["indices"]
        if len(indices) != 1 or indices[0] not in self.facts or table in self.facts or not self._has_rows(table):
            return None
        fact, layout = self.facts[indices[0]], self._layout(table)
        if fact.sort is None:  # counts and ends are numbers of rows
            return None
        ids = self._layout(fact.ids).dimensions[0]
        rows = _rows_of(fact.sort, ids)
        expected = {TOKENS: (ids[0],), PAIRS: ids, ROWS: rows}.get(fact.kind)
        if expected is None or layout.dimensions[0] != expected or len(layout.shares) != 1:
            return None
        if fact.kind == PAIRS and table is fact.ids:
            self._sorted[node] = fact.ids
        return Routed(Layout((ids if fact.kind == ROWS else rows, *layout.dimensions[1:])))

    def _empty(self, node: Node, arguments: dict[str, Any]) -> Routed | None:
        fact = self.facts.get(arguments["self"])
        if fact is None or fact.kind != PAIRS:
            return None
        self._note(node, Fact(EMPTY, fact.ids, fact.sort))
        return Routed(self._layout(arguments["self"]))

    def _inverse(self, node: Node, arguments: dict[str, Any]) -> Routed | None:
        """Read `empty[pairs] = 0, 1, ...` as the row of each pair."""
        target, indices, numbers = arguments["self"], arguments["indices"], arguments["values"]
        fact = self.facts.get(indices[0]) if len(indices) == 1 and isinstance(indices[0], Node) else None
        if fact is None or fact.kind != PAIRS or arguments.get("accumulate", False):
            return None
        layout = self._layout(fact.ids)
        size = size_of(layout.dimensions[0])
        empty = self.facts.get(target)
        is_empty = _is_empty(target, size) if empty is None else (empty.kind, empty.sort) == (EMPTY, fact.sort)
        if not is_empty or not _is_arange_to(numbers, size) or set(numbers.users) != {node}:
            return None
        for recreated in (numbers,) if empty is not None else (target, numbers):
            self.recreated.add(recreated)
            self._layouts[recreated] = layout
        self._note(node, Fact(ROWS, fact.ids, fact.sort))
        return Routed(layout)

    def _counts(self, node: Node, arguments: dict[str, Any]) -> Routed | None:
        source = arguments["self"]
        ids = self._sorted.get(source, source)
        bins, least, most = arguments["bins"], arguments["min"], arguments["max"]
        is_per_id = ids in self._ids.values() and isinstance(bins, int) and (least, most) == (0, bins - 1)
        if not is_per_id or not _holds_counts(node):
            return None
        self._note(node, Fact(COUNTS, ids))
        return Routed(no_rows(fake_value(node).shape))

    def _ends(self, node: Node, arguments: dict[str, Any]) -> Routed | None:
        fact = self.facts.get(arguments["self"])
        if fact is None or fact.kind != COUNTS or arguments["dim"] not in (0, -1) or not _holds_counts(node):
            return None
        self._note(node, Fact(ENDS, fact.ids))
        return Routed(no_rows(fake_value(node).shape))

    def _cast(self, node: Node, arguments: dict[str, Any]) -> Routed | None:
        source = next(iter(arguments.values()))
        if not _holds_counts(node):
            return None
        if source in self._sorted:
            self._sorted[node] = self._sorted[source]
            return Routed(self._layout(source))
        fact = self.facts.get(source)
        if fact is None or fact.kind not in (COUNTS, ENDS):
            return None
        self._note(node, fact)
        return Routed(no_rows(fake_value(node).shape))

    def _grouped(self, node: Node) -> Layouts:
        """Return the layout of each expert's rows times its weights, which must not depend on tokens."""
        if len(node.args) < 3:
            self._refuse(node, "has no argument that says where the rows of each expert end")
        rows, weights, ends = node.args[:3]
        assert isinstance(rows, Node)
        fact = self.facts.get(ends) if isinstance(ends, Node) else None
        layout = self._layout(rows)
        is_sorted = fact is not None and fact.kind == ENDS and len(layout.dimensions) == 2
        if not is_sorted or not any(
            self._ids[sort] is fact.ids and layout.dimensions[0] == _rows_of(sort, self._layout(fact.ids).dimensions[0])  # type: ignore[union-attr]
            for sort in self._ids
        ):
            self._refuse(node, "multiplies rows that may not be sorted by the experts of its groups")
        operands = [used for used in node.all_input_nodes if used is not rows and used is not ends]
        if rows in self.facts or any(used in self.facts or self._has_rows(used) for used in operands):
            self._refuse(node, "multiplies rows by a value that depends on tokens")
        if len(node.args) > 3 or node.kwargs:
            arguments = named_arguments(node)
            if any(isinstance(value, Node) and value not in (rows, weights, ends) for value in arguments.values()):
                self._refuse(node, "does more than multiply rows by the weights of their experts")
        assert isinstance(weights, Node)
        assert isinstance(ends, Node)
        if fake_value(weights).dim() != 3:
            self._refuse(node, "has weights without a matrix for each expert")
        if size_expression(fake_value(weights).shape[0]) != size_expression(fake_value(ends).shape[0]):
            self._refuse(node, "has another number of groups than of experts")
        return Layout((layout.dimensions[0], features(fake_value(node).shape[-1])))

    def _note(self, node: Node, fact: Fact) -> None:
        self.facts[node] = fact


def _holds_counts(node: Node) -> bool:
    """Return whether numbers of rows are exact in the node's type; rounding could differ between chunks."""
    return fake_value(node).dtype in (torch.int32, torch.int64, torch.float32, torch.float64)


def _are_pairs(dimension: Dimension) -> bool:
    """Return whether `dimension` is all tokens, each with its k experts in succession."""
    return bool(dimension) and dimension[0].share == () and features_per_row(dimension) is not None


def _rows_of(sort: Node, pairs: Dimension) -> Dimension:
    return (Part(size_of(pairs), _share(sort)),)


def _share(sort: Node) -> tuple[tuple[str, int], ...]:
    return ((f"sorted by {sort.name}", 0),)


def _is_empty(node: Any, size: Any) -> bool:
    if not is_call(node, torch.ops.aten.empty.memory_format) or len(node.users) != 1:
        return False
    value = fake_value(node)
    return bool(value.dim() == 1 and size_expression(value.shape[0]) == size)


def _is_arange_to(node: Any, size: Any) -> bool:
    """Return whether `node` is 0, 1, .., `size` - 1, by an operator whose size a chunk can change."""
    is_resizable = is_call(node, torch.ops.aten.arange.default, torch.ops.prims.iota.default)
    return bool(is_resizable and is_arange(node) and size_expression(fake_value(node).shape[0]) == size)
