"""Compute of the slots of experts those that are read.

Where experts have fixed numbers of slots, [experts, capacity, ..], most are empty when routing is uneven, and tokens
that found no slot are dropped. All slots are computed before each token looks its own up. But an expert computes every
row alone, so the lookup can go first: f(x)[slot] = f(x[slot]), whichever slots are read, and however often.

Contract
    in    a graph of grouped GEMMs, as many rows for each expert, or of batches with the weights of all experts
    out   the same graph, where a block whose slots are read by lookups alone computes the rows that are looked up,
          sorted by expert; equal up to the rounding of GEMMs. What is looked up beside the slots, as the row of
          zeros of a dropped token, is computed by no expert. Blocks with fewer slots than lookups stay as they are

Pseudo-code
    for each block whose experts have as many rows each:
        find what reads its results: lookups in one table of slots, and rows of one number beside them
        of each lookup the expert and the slot, by the same lookup in tables of numbers: it fails where it failed
        sort by expert; what is no slot goes last, beyond the last expert's rows
        rows, and whatever has something for each slot, of the slots in this order
        the experts once more on these rows; the number in place of what they did not compute; back in order
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.blocks.detect import BlockMatch, find_blocks
from moepass.passes.dense.group_slots import group_slots, last_gemms, lookups_of_gathers
from moepass.passes.graph.collectives import communication_of
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.ops.traits import Trait, draws_random_numbers, has_trait, mutates
from moepass.passes.ops.walk import ancestors, first_inputs
from moepass.passes.slots.read_table import ReadTable, even_groups, ids_of_lookup, is_lookup_of_rows, read_table
from moepass.passes.slots.rows_of_lookups import RowsOfLookups, nodes_between

aten, prims = torch.ops.aten, torch.ops.prims


@graph_pass(conflicts={"blocks"})
def compute_read_slots(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Look slots up before the experts compute them."""
    if next(last_gemms(module.graph), None) is None and not any(map(_has_slots, find_blocks(module.graph).matches)):
        return PassResult(module, plan)
    changed = copy_graph_module(module)
    matches: list[str] = []
    for match in find_blocks(changed.graph).matches:
        if not _has_slots(match):
            continue
        try:
            _take(changed.graph, match)
        except NotThisForm:
            continue
        matches.append(match.record.name)
    for name in [gemm.node.name for gemm in last_gemms(changed.graph)]:
        taken = _of_batches(changed, name)
        if taken is not None:
            changed, of_block = taken
            matches.append(of_block)
    if not matches:
        return PassResult(module, plan)
    changed.graph.lint()
    changed.recompile()
    return PassResult(changed, plan, tuple(matches))


def _of_batches(module: GraphModule, name: str) -> tuple[GraphModule, str] | None:
    """A copy of `module` where the experts whose last GEMM has that name, slot by slot in a batch of all experts,
    compute what is read; None where they cannot, or need not.
    """
    trial = copy_graph_module(module)
    lookups_of_gathers(trial.graph)
    gemm = next((one for one in last_gemms(trial.graph) if one.node.name == name), None)
    try:
        if gemm is None:
            return None
        last = group_slots(trial.graph, gemm)
        match = next((one for one in find_blocks(trial.graph).matches if one.gemms[-1].node is last), None)
        if match is None:
            return None
        _take(trial.graph, match)
    except NotThisForm:
        return None
    return trial, match.record.name


def _has_slots(match: BlockMatch) -> bool:
    try:
        even_groups(match.gemms[-1].key)
    except NotThisForm:
        return False
    return match.record.form == "grouped_mm"


def _take(graph: Graph, match: BlockMatch) -> None:
    """Let the lookups of a block's slots go before its experts. Raises NotThisForm; the graph is then as before."""
    experts, each = even_groups(match.gemms[-1].key)
    slots = size_expression(fake_value(match.gemms[0].activations).shape[0])
    if slots == 1 or sympy.expand(experts * size_expression(each) - slots) != 0 or experts != match.record.experts:
        raise NotThisForm("its experts have other rows than its slots")
    found = read_table(match)
    if not _pays(found, fake_value(match.gemms[0].activations).shape[0]):
        raise NotThisForm("more is looked up than there are slots")
    first = found.lookups[0]
    _bring_forward(found, first)
    first_gemms = [gemm.node for gemm in match.gemms if gemm.activations is match.gemms[0].activations]
    inside = nodes_between(first_gemms, found.slots)
    writer = GraphWriter(graph, first)
    try:
        with graph.inserting_before(first):
            results = _Lookups(writer, match, found, experts, each).write(inside)
            for lookup, result in zip(found.lookups, results, strict=True):
                old, new = fake_value(lookup), fake_value(result)
                if (old.dtype, str(old.shape)) != (new.dtype, str(new.shape)):
                    raise NotThisForm(f"it gives {list(new.shape)} where it gave {list(old.shape)}")
    except NotThisForm:
        writer.erase()
        raise
    for lookup, result in zip(found.lookups, results, strict=True):
        lookup.replace_all_uses_with(result)
        erase_unread(graph, lookup)
    assert match.gemms[-1].node not in graph.nodes, "nothing but the lookups read the slots"


def _bring_forward(found: ReadTable, first: Node) -> None:
    """Let what the ids of all lookups are computed from stand before the first of them. Raises NotThisForm."""
    late = list(ancestors(*(ids for ids in found.ids if not ids < first), follow=lambda used: not used < first))
    for node in late:
        if node in found.lookups:
            raise NotThisForm("a lookup reads numbers that are computed of what another one gives")
        if mutates(node) or draws_random_numbers(node) or communication_of(node) is not None:
            raise NotThisForm(f"{named(node)} has to stay where it is")
    for node in sorted(late):
        first.prepend(node)


def _pays(found: ReadTable, slots: Any) -> bool:
    """True where no more is looked up than there are slots, by the sizes at the capture as far as these are known."""
    read = sum(fake_value(ids).numel() for ids in found.ids)
    if any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in (read, slots)):
        return True
    of_lookups, of_slots = (size.node.hint if isinstance(size, torch.SymInt) else size for size in (read, slots))
    return bool(of_lookups <= of_slots)


class _Lookups:
    """Writes the lookups of `found` before the experts of `match`, each of which has `each` slots."""

    def __init__(self, writer: GraphWriter, match: BlockMatch, found: ReadTable, experts: int, each: Any) -> None:
        self.writer, self.match, self.found = writer, match, found
        self.experts, self.each = experts, each
        self.rows = match.gemms[0].activations
        self.device = fake_value(self.rows).device
        self._known: dict[Node, Node] = {}

    def write(self, inside: list[Node]) -> list[Node]:
        """What the lookups give. Raises NotThisForm."""
        writer, found = self.writer, self.found
        expert = self._of_all(self._expert_of_slots())
        sorted_experts = writer.emit(aten.sort.stable, expert, stable=True)
        sorted_expert, order = writer.getitem(sorted_experts, 0), writer.getitem(sorted_experts, 1)
        count = writer.size(order, 0)
        every = writer.arange(self._slots(), self.device)
        slot = writer.emit(aten.index.Tensor, self._of_all(self._with_others(every, 0)), [order])
        computed = RowsOfLookups(
            writer,
            {gemm.node: gemm for gemm in self.match.gemms},
            {self.rows: self._looked_up(self.rows, slot)},
            size_expression(fake_value(self.rows).shape[0]),
            count,
            self._ends(sorted_expert, count),
            lambda used: self._looked_up(used, slot),
        ).write(inside)
        if found.fill is not None:
            value = fake_value(computed)
            column = writer.emit(aten.eq.Scalar, sorted_expert, self.experts)
            for _ in range(value.dim() - 1):
                column = writer.emit(aten.unsqueeze.default, column, -1)
            fill = writer.emit(aten.scalar_tensor.default, found.fill, dtype=value.dtype, device=self.device)
            computed = writer.emit(aten.where.self, column, fill, computed)
        memory = writer.emit(aten.empty_like.default, order)
        inverse = writer.emit(aten.index_put.default, memory, [order], writer.arange(count, self.device))
        return self._apart(writer.emit(aten.index.Tensor, computed, [inverse]))

    def _slots(self) -> Any:
        return self.writer.size(self.rows, 0)

    def _expert_of_slots(self) -> Node:
        """The expert of each row of the table; of rows that are no slots, one more than there are."""
        writer = self.writer
        column = writer.emit(aten.unsqueeze.default, writer.arange(self.experts, self.device), -1)
        wide = writer.emit(aten.expand.default, column, [self.experts, self.each])
        return self._with_others(writer.emit(aten.reshape.default, wide, [-1]), self.experts)

    def _with_others(self, of_slots: Node, number: int) -> Node:
        """A table of numbers: those of the slots, and `number` where the table of rows has others."""
        parts = [of_slots]
        for rows, is_before in ((self.found.before, True), (self.found.behind, False)):
            if rows:
                other = self.writer.emit(aten.full.default, [rows], number, dtype=torch.int64, device=self.device)
                parts.insert(0 if is_before else len(parts), other)
        return parts[0] if len(parts) == 1 else self.writer.emit(aten.cat.default, parts)

    def _of_all(self, table: Node) -> Node:
        """What all lookups would find in a `table` of numbers, one after the other."""
        found = []
        for lookup, ids in zip(self.found.lookups, self.found.ids, strict=True):
            given = (0, ids) if is_call(lookup, aten.index_select.default) else ([ids],)
            numbers = self.writer.emit(lookup.target, table, *given)  # type: ignore[arg-type]
            is_vector = fake_value(numbers).dim() == 1
            found.append(numbers if is_vector else self.writer.emit(aten.reshape.default, numbers, [-1]))
        return found[0] if len(found) == 1 else self.writer.emit(aten.cat.default, found)

    def _apart(self, rows: Node) -> list[Node]:
        """What each lookup gives, of what all of them give."""
        writer, found = self.writer, []
        start: Any = 0
        for ids in self.found.ids:
            value, own = fake_value(ids), rows
            if len(self.found.lookups) > 1:
                sizes = [writer.size(ids, dim) for dim in range(value.dim())]
                count: Any = 1
                for size in sizes:
                    count = writer.product(count, size)
                is_number = isinstance(start, int) and isinstance(count, int)
                end = start + count if is_number else writer.emit(operator.add, start, count)
                own = writer.emit(aten.slice.Tensor, rows, 0, start, end)
                start = end
            if value.dim() != 1:
                features = [int(size) for size in fake_value(rows).shape[1:]]
                own = writer.viewed(own, [*(writer.size(ids, dim) for dim in range(value.dim())), *features])
            found.append(own)
        return found

    def _ends(self, sorted_expert: Node, count: Any) -> Node:
        """Where each expert's rows end: int32 [experts]."""
        writer = self.writer
        like = {"dtype": torch.int64, "device": self.device}
        # One more for what no expert computes.
        counts = writer.emit(aten.full.default, [self.experts + 1], 0, **like)
        ones = writer.emit(aten.full.default, [count], 1, **like)
        counts = writer.emit(aten.scatter_add.default, counts, 0, sorted_expert, ones)
        own = writer.emit(aten.slice.Tensor, counts, 0, 0, self.experts)
        return writer.emit(prims.convert_element_type.default, writer.emit(aten.cumsum.default, own, 0), torch.int32)

    def _looked_up(self, source: Node, slot: Node) -> Node:
        """The rows `slot` of `source`; where that is looked up itself, from where it is looked up."""
        if source not in self._known:
            table, ids = source, slot
            origin = _before_views(source)
            if is_lookup_of_rows(origin) and fake_value(ids_of_lookup(origin)[1]).dim() == 1:
                table, numbers = ids_of_lookup(origin)
                ids = self._looked_up(numbers, slot)
            self._known[source] = self.writer.emit(aten.index.Tensor, self._with_a_row(table), [ids])
        return self._known[source]

    def _with_a_row(self, table: Node) -> Node:
        """`table`; with a row behind it where lookups of what is no slot, which read its first row, may find none."""
        value = fake_value(table)
        if self.found.fill is None or _is_positive(value.shape[0]):
            return table
        features = [int(size) for size in value.shape[1:]]
        row = self.writer.emit(aten.full.default, [1, *features], 0, dtype=value.dtype, device=self.device)
        return self.writer.emit(aten.cat.default, [table, row])


def _is_positive(size: Any) -> bool:
    if isinstance(size, torch.SymInt):
        return bool(size.node.shape_env.bound_sympy(size.node.expr).lower >= 1)
    return bool(size >= 1)


def _before_views(node: Node) -> Node:
    """What `node` is the same elements of, in the same shape; itself where it is no view back to its own shape."""
    shape = [*map(size_expression, fake_value(node).shape)]
    viewed = first_inputs(node, lambda step: has_trait(step, Trait.RESHAPE))
    return [source for source in viewed if [*map(size_expression, fake_value(source).shape)] == shape][-1]
