"""Repeat the computation of a block's experts, for the rows that are looked up instead of all slots.

The slots' rows are followed from the first GEMMs to the lookups, operation by operation (`passes/rows/row_rules.py`),
because the experts must keep rows separate. Every value is written as [rows, ..].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.blocks.expert_gemms import ExpertGemm, is_grouped_gemm
from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.input_sizes import size_expression, size_expressions
from moepass.passes.graph.nodes import fake_value, map_nodes, several
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.ops.walk import ancestors, descendants
from moepass.passes.rows.row_layout import Layout, no_rows, rows_first
from moepass.passes.rows.row_rules import Layouts, RowRules, fits
from moepass.passes.rows.rows_in_front import features_behind


def nodes_between(starts: Collection[Node], end: Node) -> list[Node]:
    """Return, in graph order, the nodes from `starts` to `end`, including those of `starts` that `end` needs."""
    depends = set(descendants(*starts, follow=lambda user: not end < user))
    return sorted(ancestors(end, follow=depends.__contains__, stop=starts.__contains__)) if end in depends else []


class RowsOfLookups(RowRules):
    """A writer that computes `count` new `rows` in place of the slots, which are the rows of `slots`.

    `gemms` has the experts' GEMMs, and `ends` the ends of their new rows. `look_up` returns the new rows of another
    operand that has one row for each slot.
    """

    def __init__(
        self,
        writer: GraphWriter,
        gemms: Mapping[Node, ExpertGemm],
        slots: Node,
        rows: Node,
        count: Any,
        ends: Node,
        look_up: Callable[[Node], Node],
    ) -> None:
        super().__init__([slots])
        self.writer, self.count, self.ends = writer, count, ends
        self._slot_count = size_expression(fake_value(slots).shape[0])
        self._gemms = gemms
        self._look_up = look_up
        self._values: dict[Node, Node] = {slots: rows}

    def write(self, nodes: Iterable[Node]) -> Node:
        """Write `nodes` for the new rows; return the last. Raises NotThisForm."""
        inside = list(nodes)
        for node in inside:
            self._values[node] = self._grouped_gemm(node) if node in self._gemms else self._step(node, set(inside))
        result = inside[-1]
        if not self._layout(result).is_by_row:
            self._refuse(result, "has its rows in another order, or not in its first dimension")
        return self._values[result]

    def _grouped_gemm(self, node: Node) -> Node:
        gemm = self._gemms[node]
        if not is_grouped_gemm(node) or not self._layout(gemm.activations).is_by_row:
            self._refuse(node, "is not a grouped GEMM of the slots")
        _, (_, weights), _, *others = all_arguments(node).items()
        extra = {name: value for name, value in others if value is not None}
        if any(isinstance(value, Node) for value in extra.values()):
            self._refuse(node, "adds something to its products")
        self._layouts[node] = rows_first(fake_value(node).shape)
        rows = self._values[gemm.activations]
        return self.writer.emit(node.target, rows, weights, self.ends, **extra)  # type: ignore[arg-type]

    def _step(self, node: Node, inside: set[Node]) -> Node:
        base = base_operation(node)
        if has_trait(node, Trait.ITEM):
            source, position = node.args
            assert isinstance(source, Node)
            self._layouts[node] = self.with_rows(node)
            return self.writer.getitem(self._values[source], position)  # type: ignore[arg-type]
        self._check_operator(node)
        for used in node.all_input_nodes:
            self._add_operand(used, inside)
        self._layouts[node] = layouts = self.with_rows(node)
        self._check_result(node, layouts)
        layout = several(layouts)[0]
        assert layout is not None
        if has_trait(node, Trait.RESHAPE):
            return self.writer.viewed(self._new_rows(node), [self.count, *features_behind(layout)])
        by_row = [self._layout(used).is_by_row for used in node.all_input_nodes if self._has_rows(used)]
        if not all(by_row) and not (has_trait(node, Trait.ELEMENTWISE) and len(node.all_input_nodes) == 1):
            self._refuse(node, "has its rows in several dimensions")
        if node in self._whole:
            return self._new_rows(node)
        if base == "expand":
            rows = self._new_rows(node)
            if fake_value(rows).dim() != len(layout.dimensions):
                self._refuse(node, "adds dimensions before its rows")
            written = self.writer.emit(node.target, rows, [self.count, *features_behind(layout)])  # type: ignore[arg-type]
        else:
            if any(isinstance(fake_value(used), torch.SymInt) for used in node.all_input_nodes):
                self._refuse(node, "computes with a size")
            args, kwargs = map_nodes((node.args, node.kwargs), lambda used: self._values.get(used, used))
            written = self.writer.emit(node.target, *args, **kwargs)  # type: ignore[arg-type]
        self._check_written(node, layouts, written)
        return written

    def _check_operator(self, node: Node) -> None:
        super()._check_operator(node)
        base = base_operation(node)
        if has_trait(node, Trait.GROUP_NORM, Trait.FILL) or base in ("bmm", "gather", "scatter", "scatter_add"):
            self._refuse(node, "is not an operation that moepass repeats for other rows")
        for value in several(fake_value(node)):
            # Rows that no expert computes are uninitialised, so that as indices or divisors they may fail.
            if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.dtype is torch.bool):
                self._refuse(node, "computes integers from the rows")

    def _add_operand(self, used: Node, inside: set[Node]) -> None:
        """Record the layout of an operand from outside the experts: a row for each slot, or a constant."""
        value = fake_value(used)
        if used in self._values or used in inside or not isinstance(value, torch.Tensor):
            return
        if value.dim() > 0 and size_expression(value.shape[0]) == self._slot_count:
            self._layouts[used] = rows_first(value.shape)
            self._values[used] = self._look_up(used)
        else:
            self._layouts[used] = no_rows(value.shape)
            if has_trait(used, Trait.FILL, Trait.FILL_LIKE):
                self._uniform.add(used)

    def _check_result(self, node: Node, layouts: Layouts) -> None:
        for layout, value in zip(several(layouts), several(fake_value(node)), strict=True):
            if layout is None or not layout.has_rows or not fits(layout, value):
                self._refuse(node, "has rows that cannot be followed")
            if any(size.free_symbols for size in layout.of_a_row):
                self._refuse(node, "has as many features as there are rows")

    def _check_written(self, node: Node, layouts: Layouts, written: Node) -> None:
        triples = zip(several(layouts), several(fake_value(node)), several(fake_value(written)), strict=True)
        for layout, old, new in triples:
            assert isinstance(layout, Layout)
            expected = [size_expression(self.count), *features_behind(layout)]
            if size_expressions(new.shape) != expected or new.dtype != old.dtype:
                self._refuse(node, "has another shape or type for other rows")

    def _new_rows(self, node: Node) -> Node:
        return next(self._values[used] for used in node.all_input_nodes if self._has_rows(used))
