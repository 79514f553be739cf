"""Compute only the pairs of token and expert that a router chose.

In some models every expert computes every token, with `bmm` or `einsum` over the weights of all experts, and weights
[tokens, experts] with k nonzero numbers per token discard the results that a router did not choose.

Contract
    in    a captured graph
    out   the same graph, in which such experts are grouped GEMMs over the chosen pairs, sorted by expert: the terms
          without the zeros. Values that are not finite affect a token only through its chosen experts, no longer as
          0 · inf. Equal up to the rounding of GEMMs and sums. Experts with other readers stay unchanged.

Pseudo-code
    for each sum over experts of the results of GEMMs with the weights of all experts (`read_results.py`):
        skip it unless its terms are zero except for the experts of a top-k (`backgrounds.py`)
        sort the pairs by expert; compute the terms of these rows only (`rows_of_pairs.py`)
        restore the order of tokens; add up the k rows of each
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
    """Replace dense experts if a router chooses k of them for each token."""
    if next(sums_over_experts(module.graph), None) is None:
        return PassResult(module, plan)
    changed = copy_graph_module(module)
    graph = changed.graph
    matches: list[str] = []
    refusals: list[Refusal] = []
    done: set[Node] = set()
    for expert_sum in list(sums_over_experts(graph)):
        if expert_sum.node in done:
            continue
        done.add(expert_sum.node)
        background = _zero_background(expert_sum)
        choice = None if background is None else _choice(background, expert_sum)
        if choice is None:
            continue
        writer = GraphWriter(graph, expert_sum.node)
        try:
            with graph.inserting_before(expert_sum.node):
                result = _ChosenSum(writer, expert_sum, choice).write()
        except NotThisForm as error:
            writer.erase()
            reason = (
                f"every expert computes every token, though {named(choice.ids)} chooses some: {error}; expected "
                "operations between the GEMMs and the sum over experts that keep tokens and experts separate"
            )
            refusals.append(refused(expert_sum.node, in_words(reason, graph), place_of(expert_sum.node)))
            continue
        matches.append(f"{expert_sum.node.name} ({expert_sum.pairs.experts} experts)")
        expert_sum.node.replace_all_uses_with(result)
        erase_unread(graph, expert_sum.node)
        writer.erase_unread()
    if not matches and not refusals:
        return PassResult(module, plan)
    graph.lint()
    changed.recompile()
    if refusals:
        plan = dataclasses.replace(plan, refusals=plan.refusals + tuple(refusals))
    return PassResult(changed, plan, tuple(matches), tuple(refusals))


def _zero_background(expert_sum: SumOverExperts) -> Background | None:
    """Return the background of the terms if it is zero, or None."""
    backgrounds = Backgrounds(expert_sum.pairs)
    value_background = backgrounds.of(expert_sum.value, expert_sum.layout)
    if value_background is not None and value_background.is_zero:
        return value_background
    if expert_sum.weights is not None and expert_sum.weights_layout is not None:
        weights_background = backgrounds.of(expert_sum.weights, expert_sum.weights_layout)
        return weights_background if weights_background is not None and weights_background.is_zero else None
    return None


@dataclasses.dataclass(frozen=True)
class _Choice:
    """The `top_k` experts of each position, in `ids`."""

    ids: Node
    top_k: int


def _choice(background: Background, expert_sum: SumOverExperts) -> _Choice | None:
    """Return the choice of a router; None if it is unknown, or chooses all experts."""
    if background.ids is None:
        return None
    count = size_expression(1)
    for size in fake_value(background.ids).shape:
        count = (count * size_expression(size)).expand()
    top_k = ratio(count, expert_sum.pairs.positions)
    if top_k is None or not top_k.is_Integer or not 0 < int(top_k) < expert_sum.pairs.experts:
        return None
    return _Choice(background.ids, int(top_k))


class _ChosenSum:
    """A writer of the terms of `expert_sum` that `choice` has, and of their sum."""

    def __init__(self, writer: GraphWriter, expert_sum: SumOverExperts, choice: _Choice) -> None:
        self.writer, self.expert_sum, self.choice = writer, expert_sum, choice

    def write(self) -> Node:
        """Return the new result of the sum. Raises NotThisForm."""
        writer, expert_sum, top_k = self.writer, self.expert_sum, self.choice.top_k
        tokens = self._token_count()
        ids = writer.viewed(self.choice.ids, [tokens, top_k])
        pairs = SortedPairs.of(Chosen(ids, expert_sum.pairs.experts), writer)
        ends = writer.emit(prims.convert_element_type.default, pairs.ends, torch.int32)
        count = writer.size(pairs.order, 0)
        experts = writer.emit(aten.index.Tensor, writer.viewed(ids, [count]), [pairs.order])
        if fake_value(experts).dtype is not torch.int64:
            experts = writer.emit(prims.convert_element_type.default, experts, torch.int64)
        rows = RowsOfPairs(writer, expert_sum.pairs, PairRows(count, experts, pairs.tokens, ends))
        if not rows.reaches_gemms(expert_sum.value, expert_sum.layout):
            raise NotThisForm(f"{named(expert_sum.node)} adds up values that cannot be traced to GEMMs of experts")
        written = self._weighted(rows, rows.write(expert_sum.value, expert_sum.layout))
        self._check_unread(list(rows.gemms))
        return self._sum_by_token(written, pairs, tokens)

    def _token_count(self) -> object:
        size = self.expert_sum.pairs.positions
        if size.is_Integer:
            return int(size)
        ids = self.choice.ids
        dims = [dim for dim, extent in enumerate(fake_value(ids).shape) if size_expression(extent) == size]
        if dims:
            return self.writer.size(ids, dims[0])
        total: object = 1
        for dim in range(fake_value(ids).dim() - (self.choice.top_k > 1)):
            total = self.writer.product(total, self.writer.size(ids, dim))
        return total

    def _weighted(self, rows: RowsOfPairs, value: Node) -> Node:
        """Return the terms [rows, features] of the sum, in float32 if a GEMM accumulated them."""
        writer, expert_sum = self.writer, self.expert_sum
        if expert_sum.gemm is not None:
            return rows.product(expert_sum.gemm, writer.viewed(value, [rows.rows.count, expert_sum.gemm.width]))
        if expert_sum.weights is None or expert_sum.weights_layout is None:
            return value
        weights = rows.write(expert_sum.weights, expert_sum.weights_layout)
        if fake_value(value).dtype in (torch.bfloat16, torch.float16):
            value, weights = (
                writer.emit(prims.convert_element_type.default, tensor, torch.float32) for tensor in (value, weights)
            )
        weights = writer.viewed(weights, [rows.rows.count, *[1] * (fake_value(value).dim() - 1)])
        return writer.emit(aten.mul.Tensor, value, weights)

    def _sum_by_token(self, rows: Node, pairs: SortedPairs, tokens: object) -> Node:
        writer, expert_sum = self.writer, self.expert_sum
        device = fake_value(pairs.order).device
        count = writer.size(pairs.order, 0)
        empty = writer.emit(aten.empty.memory_format, [count], dtype=torch.int64, device=device)
        inverse = writer.emit(aten.index_put.default, empty, [pairs.order], writer.arange(count, device))
        in_order = writer.emit(aten.index.Tensor, rows, [inverse])
        features = list(map(int, fake_value(rows).shape[1:]))
        by_token = writer.viewed(in_order, [tokens, self.choice.top_k, *features])
        result = writer.emit(aten.sum.dim_IntList, by_token, [1])
        old = fake_value(expert_sum.node)
        if fake_value(result).dtype != old.dtype:
            result = writer.emit(prims.convert_element_type.default, result, old.dtype)
        return writer.viewed(result, self._shape(result))

    def _shape(self, result: Node) -> list[object]:
        """Return the shape of the sum. Raises NotThisForm unless tokens come before features, in order."""
        layout = self.expert_sum.result_layout
        shares = [factor.share for factor in pair_factors(layout)]
        used = [dim for dim in layout.dimensions if dim]
        rows_first = [is_features(dim) for dim in used] == sorted(is_features(dim) for dim in used)
        is_mixed = any(factor.is_rows != dim[0].is_rows for dim in used for factor in dim)
        if shares != sorted(shares, key=lambda share: share or ()) or not rows_first or is_mixed:
            raise NotThisForm(f"{named(self.expert_sum.node)} has its tokens after features, or in another order")
        shape: list[object] = []
        for dim, size in zip(layout.dimensions, fake_value(self.expert_sum.node).shape, strict=True):
            if size_of(dim) != size_expression(size):
                raise NotThisForm(f"{named(self.expert_sum.node)} has sizes that cannot be followed")
            shape.append(size if isinstance(size, int) else self._size(size, result))
        return shape

    def _size(self, size: object, result: Node) -> object:
        for node in (result, self.choice.ids, self.expert_sum.value):
            for dim, extent in enumerate(fake_value(node).shape):
                if size_expression(extent) == size_expression(size):
                    return self.writer.size(node, dim)
        raise NotThisForm(f"{named(self.expert_sum.node)} has a size that is not found in the graph")

    def _check_unread(self, gemms: list[Node]) -> None:
        """Raise NotThisForm if the GEMMs' results have readers besides the sum, or its new terms need them."""
        written = set(self.writer.written)
        for node in descendants(*gemms, follow=lambda user: user is not self.expert_sum.node):
            if node.op == "output" or mutates(node):
                raise NotThisForm("the result of each expert for each token is read by something else too")
            if not written.isdisjoint(node.users):
                raise NotThisForm(f"{named(node)} is computed from several tokens or experts")
