"""Compute only the capacity slots that are read.

Experts with a fixed number of capacity slots, [experts, capacity, ..], compute all slots before tokens look up theirs.
With uneven routing most slots are empty, and tokens without a slot are dropped. Experts compute every row
independently, so the lookup can come first: f(x)[slot] = f(x[slot]), for any slots, read any number of times.

Contract
    in    a graph of grouped GEMMs with equally many rows for each expert, or of batched GEMMs with all experts' weights
    out   the same graph, in which a block whose slots are read only by lookups computes the rows that are looked up,
          sorted by expert; equal up to the rounding of GEMMs. Rows that are no slots, such as the row of zeros of a
          dropped token, are computed by no expert. Blocks with fewer slots than lookups stay unchanged.

Pseudo-code
    for each block whose experts have equally many rows, among the grouped GEMMs with such rows:
        find the readers of its results: lookups in one table of slots, with rows of one number before or after them
        find the expert and slot of each lookup with the same indices, so that invalid ones fail as before
        sort by expert; rows that are no slots go last, after the last expert's rows
        look up the rows of these slots, and in the same way any other operand that has one row for each slot
        compute the experts on these rows; write the number to rows that are no slots; restore the order
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.blocks.detect import BlockMatch, group_gemms
from moepass.passes.blocks.expert_gemms import expert_gemms, is_grouped_gemm
from moepass.passes.dense.group_slots import group_slots, last_gemms, lookups_of_gathers
from moepass.passes.graph.collectives import communication_of
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm, refuse
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.traits import Trait, draws_random_numbers, mutates
from moepass.passes.ops.walk import ancestors
from moepass.passes.slots.read_table import ReadTable, even_groups, lookup_of_rows, read_table, without_views
from moepass.passes.slots.rows_of_lookups import RowsOfLookups, nodes_between

aten = torch.ops.aten


@graph_pass(conflicts={"blocks"})
def compute_read_slots(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Move the lookups of slots before the experts."""
    if next(last_gemms(module.graph), None) is None and not any(map(_computes_slots, module.graph.nodes)):
        return PassResult(module, plan)
    changed = copy_graph_module(module)
    matches: list[str] = []
    # GEMMs of one block have the same ends, so blocks can be found among the GEMMs of slots alone.
    for match in _blocks_of(filter(_computes_slots, changed.graph.nodes)):
        try:
            _move_lookups(changed.graph, match)
        except NotThisForm:
            continue
        matches.append(match.record.name)
    for name in [gemm.node.name for gemm in last_gemms(changed.graph)]:
        rewritten = _rewrite_batched(changed, name)
        if rewritten is not None:
            changed, block_name = rewritten
            matches.append(block_name)
    if not matches:
        return PassResult(module, plan)
    changed.recompile()
    return PassResult(changed, plan, tuple(matches))


def _rewrite_batched(module: GraphModule, name: str) -> tuple[GraphModule, str] | None:
    """Return a copy of `module` with the batched experts of this last GEMM rewritten, and the block's name, or None."""
    trial = copy_graph_module(module)
    lookups_of_gathers(trial.graph)
    gemm = next((each for each in last_gemms(trial.graph) if each.node.name == name), None)
    try:
        if gemm is None:
            return None
        gemms = group_slots(trial.graph, gemm)
        last = gemms[gemm.node]
        match = next((block for block in _blocks_of(sorted(gemms.values())) if block.gemms[-1].node is last), None)
        if match is None:
            return None
        _move_lookups(trial.graph, match)
    except NotThisForm:
        return None
    return trial, match.record.name


def _blocks_of(gemms: Iterable[Node]) -> tuple[BlockMatch, ...]:
    return group_gemms(expert_gemms(gemms)[0]).matches


def _computes_slots(node: Node) -> bool:
    """Return whether `node` is a grouped GEMM in which each expert has equally many rows."""
    ends = all_arguments(node).get("offs") if is_grouped_gemm(node) else None
    return isinstance(ends, Node) and even_groups(ends) is not None


def _move_lookups(graph: Graph, match: BlockMatch) -> None:
    """Move the lookups of a block's slots before its experts. Raises NotThisForm, with the graph unchanged."""
    ends, rows = match.gemms[-1].key, match.gemms[0].activations
    groups = even_groups(ends)
    if groups is None:
        refuse(ends, "does not say that all experts have as many rows")
    experts, capacity = groups
    slots = size_expression(fake_value(rows).shape[0])
    if slots == 1 or sympy.expand(experts * size_expression(capacity) - slots) != 0 or experts != match.record.experts:
        raise NotThisForm("its experts compute rows that are no slots")
    reads = read_table(match)
    if not _saves_rows(reads, fake_value(rows).shape[0]):
        raise NotThisForm("more rows are looked up than there are slots")
    first = reads.lookups[0].node
    _move_ids(reads, first)
    first_gemms = [gemm.node for gemm in match.gemms if gemm.activations is rows]
    inside = nodes_between(first_gemms, reads.slots)
    writer = GraphWriter(graph, first)
    try:
        with graph.inserting_before(first):
            results = _LookupWriter(writer, match, reads, experts, capacity).write(inside)
            for lookup, result in zip(reads.lookups, results, strict=True):
                old, new = fake_value(lookup.node), fake_value(result)
                if (old.dtype, str(old.shape)) != (new.dtype, str(new.shape)):
                    raise NotThisForm(f"its result would be {list(new.shape)}, not {list(old.shape)}")
    except NotThisForm:
        writer.erase()
        raise
    for lookup, result in zip(reads.lookups, results, strict=True):
        lookup.node.replace_all_uses_with(result)
        erase_unread(graph, lookup.node)
    assert match.gemms[-1].node not in graph.nodes, "only the lookups read the slots"


def _move_ids(reads: ReadTable, first: Node) -> None:
    """Move the computation of all lookups' indices before the lookup `first`. Raises NotThisForm."""
    late_ids = (lookup.ids for lookup in reads.lookups if not lookup.ids < first)
    late = list(ancestors(*late_ids, follow=lambda used: not used < first))
    for node in late:
        if any(node is lookup.node for lookup in reads.lookups):
            raise NotThisForm("the indices of a lookup depend on the result of another one")
        if mutates(node) or draws_random_numbers(node) or communication_of(node) is not None:
            refuse(node, "cannot be moved")
    for node in sorted(late):
        first.prepend(node)


def _saves_rows(reads: ReadTable, slots: Any) -> bool:
    """Return whether at most as many rows are looked up as there are slots, by known sizes and hints."""
    read = sum(fake_value(lookup.ids).numel() for lookup in reads.lookups)
    if any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in (read, slots)):
        return True
    read_hint, slots_hint = (size.node.hint if isinstance(size, torch.SymInt) else size for size in (read, slots))
    return bool(read_hint <= slots_hint)


class _LookupWriter:
    """A writer of the lookups in `reads` before the experts of `match`, which have `capacity` slots each."""

    def __init__(self, writer: GraphWriter, match: BlockMatch, reads: ReadTable, experts: int, capacity: Any) -> None:
        self.writer, self.match, self.reads = writer, match, reads
        self.experts, self.capacity = experts, capacity
        self.rows = match.gemms[0].activations
        self.device = fake_value(self.rows).device
        self._rows_by_source: dict[Node, Node] = {}

    def write(self, inside: list[Node]) -> list[Node]:
        """Return the results of the lookups. Raises NotThisForm."""
        writer, reads = self.writer, self.reads
        expert = self._read_numbers(self._expert_of_slots())
        sorted_expert, order = writer.sort(expert)
        count = writer.size(order, 0)
        every = writer.arange(writer.size(self.rows, 0), self.device)
        slot = writer.emit(aten.index.Tensor, self._read_numbers(self._with_fillers(every, 0)), [order])
        computed = RowsOfLookups(
            writer,
            {gemm.node: gemm for gemm in self.match.gemms},
            self.rows,
            self._rows_of_slots(self.rows, slot),
            count,
            self._ends(sorted_expert),
            lambda source: self._rows_of_slots(source, slot),
        ).write(inside)
        if reads.fill is not None:
            value = fake_value(computed)
            column = writer.emit(aten.eq.Scalar, sorted_expert, self.experts)
            for _ in range(value.dim() - 1):
                column = writer.emit(aten.unsqueeze.default, column, -1)
            computed = writer.emit(aten.where.self, column, writer.scalar(reads.fill, computed), computed)
        return self._split_by_lookup(writer.restore_order(computed, order))

    def _expert_of_slots(self) -> Node:
        """Return the expert of each row of the table; the number of experts for rows that are no slots."""
        experts = self.writer.group_of_each_row(self.experts, self.capacity, self.device)
        return self._with_fillers(experts, self.experts)

    def _with_fillers(self, slot_numbers: Node, number: int) -> Node:
        """Return `slot_numbers` with `number` for each filled row of the table before or after the slots."""
        parts = [slot_numbers]
        for rows, is_before in ((self.reads.before, True), (self.reads.after, False)):
            if rows:
                parts.insert(0 if is_before else len(parts), self.writer.full([rows], number, self.device))
        return parts[0] if len(parts) == 1 else self.writer.emit(aten.cat.default, parts)

    def _read_numbers(self, table: Node) -> Node:
        """Return the numbers in `table` at the indices of all lookups, concatenated."""
        read = []
        for lookup in self.reads.lookups:
            indices = (0, lookup.ids) if is_call(lookup.node, aten.index_select.default) else ([lookup.ids],)
            numbers = self.writer.emit(lookup.node.target, table, *indices)  # type: ignore[arg-type]
            is_vector = fake_value(numbers).dim() == 1
            read.append(numbers if is_vector else self.writer.emit(aten.reshape.default, numbers, [-1]))
        return read[0] if len(read) == 1 else self.writer.emit(aten.cat.default, read)

    def _split_by_lookup(self, rows: Node) -> list[Node]:
        writer, results = self.writer, []
        start: Any = 0
        for lookup in self.reads.lookups:
            sizes = [writer.size(lookup.ids, dim) for dim in range(fake_value(lookup.ids).dim())]
            result = rows
            if len(self.reads.lookups) > 1:
                end = writer.sum(start, writer.product(*sizes))
                result = writer.emit(aten.slice.Tensor, rows, 0, start, end)
                start = end
            if len(sizes) != 1:
                result = writer.viewed(result, [*sizes, *map(int, fake_value(rows).shape[1:])])
            results.append(result)
        return results

    def _ends(self, sorted_expert: Node) -> Node:
        """Return the end of each expert's rows: int32 [experts]."""
        writer = self.writer
        # One more, for rows that no expert computes.
        counts = writer.counts(sorted_expert, self.experts + 1)
        sizes = writer.emit(aten.slice.Tensor, counts, 0, 0, self.experts)
        return writer.cast(writer.emit(aten.cumsum.default, sizes, 0), torch.int32)

    def _rows_of_slots(self, source: Node, slot: Node) -> Node:
        """Return rows `slot` of `source`, looked up in the original table if `source` is itself a lookup."""
        if source not in self._rows_by_source:
            table, ids = source, slot
            lookup = lookup_of_rows(without_views(source, Trait.RESHAPE))
            if lookup is not None and fake_value(lookup.ids).dim() == 1:
                table, ids = lookup.table, self._rows_of_slots(lookup.ids, slot)
            self._rows_by_source[source] = self.writer.emit(aten.index.Tensor, self._nonempty(table), [ids])
        return self._rows_by_source[source]

    def _nonempty(self, table: Node) -> Node:
        """Return `table`, with a row of zeros appended if it may be empty: rows that are no slots look up index 0."""
        value = fake_value(table)
        if self.reads.fill is None or _is_positive(value.shape[0]):
            return table
        row = self.writer.full([1, *map(int, value.shape[1:])], 0, self.device, value.dtype)
        return self.writer.emit(aten.cat.default, [table, row])


def _is_positive(size: Any) -> bool:
    if isinstance(size, torch.SymInt):
        return bool(size.node.shape_env.bound_sympy(size.node.expr).lower >= 1)
    return bool(size >= 1)
