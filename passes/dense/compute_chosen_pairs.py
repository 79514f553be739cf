"""Compute of dense experts the pairs of a token and an expert that a router chose.

Some models let every expert compute every token, and multiply what a router did not choose by zero: `bmm` over the
weights of all experts, or `einsum`, and a matrix of weights [tokens, experts] with k numbers in each row that are not
zero. Most of this is computed for nothing.

Contract
    in    a captured graph
    out   the same graph, where such experts are grouped GEMMs over the chosen pairs, sorted by expert: the same terms,
          without those that are zero. So a token whose row is not finite spoils the results of its own experts alone,
          which 0 times an infinite number would have spoiled all the same. Equal up to the rounding of GEMMs and sums.
          Experts whose results are read in another way, or may be read in full, stay as they are

Pseudo-code
    for each sum over experts of what GEMMs with the weights of all experts gave (`read_results.py`):
        what is added is zero but for the experts of a top-k (`backgrounds.py`)? else it stays
        sort the pairs by expert; write what is added for these rows alone (`rows_of_pairs.py`)
        bring them back to the order of tokens, add up the k rows of each
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import GraphModule, Node

from moepass.passes.blocks.expert_gemms import refused
from moepass.passes.dense.backgrounds import Background, Backgrounds
from moepass.passes.dense.pair_layouts import is_features, pair_factors
from moepass.passes.dense.read_results import SumOverExperts, sums_over_experts
from moepass.passes.dense.rows_of_pairs import PairRows, RowsOfPairs
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import copy_graph_module, fake_value
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import in_words, named, place_of
from moepass.passes.ir.plan import Plan, Refusal
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.masks.chosen_rows import Chosen, SortedPairs
from moepass.passes.ops.traits import mutates
from moepass.passes.ops.walk import descendants
from moepass.passes.rows.row_layout import ratio, size_of

aten, prims = torch.ops.aten, torch.ops.prims


@graph_pass(conflicts={"blocks"})
def compute_chosen_pairs(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Replace dense experts of which a router chooses k for each token."""
    if next(sums_over_experts(module.graph), None) is None:
        return PassResult(module, plan)
    changed = copy_graph_module(module)
    graph = changed.graph
    matches: list[str] = []
    refusals: list[Refusal] = []
    done: set[Node] = set()
    for found in list(sums_over_experts(graph)):
        if found.node in done:
            continue
        done.add(found.node)
        background = _background(found)
        chosen = None if background is None else _chosen(background, found)
        if chosen is None:
            continue
        writer = GraphWriter(graph, found.node)
        try:
            with graph.inserting_before(found.node):
                result = _ChosenSum(writer, found, chosen).write()
        except NotThisForm as error:
            writer.erase()
            reason = (
                f"every expert computes every token, though {named(chosen.ids)} chooses some: {error}; expected what "
                "lies between the GEMMs and the sum over experts to treat every token of every expert alone"
            )
            refusals.append(refused(found.node, in_words(reason, graph), place_of(found.node)))
            continue
        matches.append(f"{found.node.name} ({found.pairs.experts} experts)")
        found.node.replace_all_uses_with(result)
        erase_unread(graph, found.node)
        writer.erase_unread()
    if not matches and not refusals:
        return PassResult(module, plan)
    graph.lint()
    changed.recompile()
    if refusals:
        plan = dataclasses.replace(plan, refusals=plan.refusals + tuple(refusals))
    return PassResult(changed, plan, tuple(matches), tuple(refusals))


def _background(found: SumOverExperts) -> Background | None:
    """Of what is added up: zero, or None."""
    backgrounds = Backgrounds(found.pairs)
    of_value = backgrounds.of(found.value, found.layout)
    if of_value is not None and of_value.is_zero:
        return of_value
    if found.weights is not None and found.weights_layout is not None:
        weights_layout = backgrounds.of(found.weights, found.weights_layout)
        return weights_layout if weights_layout is not None and weights_layout.is_zero else None
    return None


@dataclasses.dataclass(frozen=True)
class _Ids:
    """`ids` choose `top_k` experts for each place."""

    ids: Node
    top_k: int


def _chosen(background: Background, found: SumOverExperts) -> _Ids | None:
    """The choice of a router; None where it chooses all experts, or none is known."""
    if background.ids is None:
        return None
    count = size_expression(1)
    for size in fake_value(background.ids).shape:
        count = (count * size_expression(size)).expand()
    top_k = ratio(count, found.pairs.positions)
    if top_k is None or not top_k.is_Integer or not 0 < int(top_k) < found.pairs.experts:
        return None
    return _Ids(background.ids, int(top_k))


class _ChosenSum:
    """Writes the sum over experts `found` of the pairs that `chosen` has."""

    def __init__(self, writer: GraphWriter, found: SumOverExperts, chosen: _Ids) -> None:
        self.writer, self.found, self.chosen = writer, found, chosen

    def write(self) -> Node:
        """What takes the place of the sum. Raises NotThisForm."""
        writer, found, top_k = self.writer, self.found, self.chosen.top_k
        places = self._places()
        ids = writer.viewed(self.chosen.ids, [places, top_k])
        pairs = SortedPairs.of(Chosen(ids, found.pairs.experts), writer)
        ends = writer.emit(prims.convert_element_type.default, pairs.ends, torch.int32)
        count = writer.size(pairs.order, 0)
        experts = writer.emit(aten.index.Tensor, writer.viewed(ids, [count]), [pairs.order])
        if fake_value(experts).dtype is not torch.int64:
            experts = writer.emit(prims.convert_element_type.default, experts, torch.int64)
        rows = RowsOfPairs(writer, found.pairs, PairRows(count, experts, pairs.tokens, ends))
        if not rows.reaches_gemms(found.value, found.layout):
            raise NotThisForm(f"{named(found.node)} adds up what moepass cannot follow back to the GEMMs of experts")
        written = self._weighted(rows, rows.write(found.value, found.layout))
        self._check_unread(list(rows.gemms))
        return self._added_up(written, pairs, places)

    def _places(self) -> object:
        size = self.found.pairs.positions
        if size.is_Integer:
            return int(size)
        ids = self.chosen.ids
        known = [dim for dim, own in enumerate(fake_value(ids).shape) if size_expression(own) == size]
        if known:
            return self.writer.size(ids, known[0])
        total: object = 1
        for dim in range(fake_value(ids).dim() - (self.chosen.top_k > 1)):
            total = self.writer.product(total, self.writer.size(ids, dim))
        return total

    def _weighted(self, rows: RowsOfPairs, value: Node) -> Node:
        """[rows, features] of what is added up, as float32 where a GEMM added it up in that."""
        writer, found = self.writer, self.found
        if found.gemm is not None:
            return rows.product(found.gemm, writer.viewed(value, [rows.rows.count, found.gemm.width]))
        if found.weights is None or found.weights_layout is None:
            return value
        weights = rows.write(found.weights, found.weights_layout)
        if fake_value(value).dtype in (torch.bfloat16, torch.float16):
            value, weights = (
                writer.emit(prims.convert_element_type.default, one, torch.float32) for one in (value, weights)
            )
        weights = writer.viewed(weights, [rows.rows.count, *[1] * (fake_value(value).dim() - 1)])
        return writer.emit(aten.mul.Tensor, value, weights)

    def _added_up(self, rows: Node, pairs: SortedPairs, places: object) -> Node:
        writer, found = self.writer, self.found
        device = fake_value(pairs.order).device
        count = writer.size(pairs.order, 0)
        empty = writer.emit(aten.empty.memory_format, [count], dtype=torch.int64, device=device)
        inverse = writer.emit(aten.index_put.default, empty, [pairs.order], writer.arange(count, device))
        in_order = writer.emit(aten.index.Tensor, rows, [inverse])
        features = list(map(int, fake_value(rows).shape[1:]))
        by_place = writer.viewed(in_order, [places, self.chosen.top_k, *features])
        result = writer.emit(aten.sum.dim_IntList, by_place, [1])
        old = fake_value(found.node)
        if fake_value(result).dtype != old.dtype:
            result = writer.emit(prims.convert_element_type.default, result, old.dtype)
        return writer.viewed(result, self._shape(result))

    def _shape(self, result: Node) -> list[object]:
        """The shape of the sum, whose places have to stand in front of features, in their order."""
        layout = self.found.result
        shares = [part.share for part in pair_factors(layout)]
        behind = [dim for dim in layout.dimensions if dim]
        is_in_front = [is_features(dim) for dim in behind] == sorted(is_features(dim) for dim in behind)
        mixed = any(part.is_rows != dim[0].is_rows for dim in behind for part in dim)
        if shares != sorted(shares, key=lambda share: share or ()) or not is_in_front or mixed:
            raise NotThisForm(f"{named(self.found.node)} has its tokens behind features, or in another order")
        shape: list[object] = []
        for dim, size in zip(layout.dimensions, fake_value(self.found.node).shape, strict=True):
            if size_of(dim) != size_expression(size):
                raise NotThisForm(f"{named(self.found.node)} gives sizes that cannot be followed")
            shape.append(size if isinstance(size, int) else self._size(size, result))
        return shape

    def _size(self, size: object, result: Node) -> object:
        for node in (result, self.chosen.ids, self.found.value):
            for dim, own in enumerate(fake_value(node).shape):
                if size_expression(own) == size_expression(size):
                    return self.writer.size(node, dim)
        raise NotThisForm(f"{named(self.found.node)} has a size that nothing shows")

    def _check_unread(self, gemms: list[Node]) -> None:
        """Raises NotThisForm where more than the sum reads what the GEMMs give, or the chosen pairs need it."""
        written = set(self.writer.written)
        for node in descendants(*gemms, follow=lambda user: user is not self.found.node):
            if node.op == "output" or mutates(node):
                raise NotThisForm("what each expert computes of each token is read by something else too")
            if not written.isdisjoint(node.users):
                raise NotThisForm(f"{named(node)} is computed of several tokens or experts")
