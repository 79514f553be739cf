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

import sympy
import torch
from torch.fx import GraphModule, Node

from moepass.passes.blocks.expert_gemms import refused
from moepass.passes.dense.backgrounds import Backgrounds
from moepass.passes.dense.read_results import SumOverExperts, sums_over_experts
from moepass.passes.dense.rows_of_pairs import PairRows, RowsOfPairs
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.input_sizes import size_expressions
from moepass.passes.graph.nodes import copy_graph_module, fake_value
from moepass.passes.graph.not_this_form import NotThisForm, refuse
from moepass.passes.graph.source_lines import in_words, named, place_of
from moepass.passes.ir.plan import Plan, Refusal
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.masks.chosen_rows import Chosen, SortedPairs
from moepass.passes.ops.traits import mutates
from moepass.passes.ops.walk import descendants
from moepass.passes.rows.row_layout import is_features, ratio, size_of
from moepass.passes.rows.row_rules import fits

aten = torch.ops.aten


@graph_pass(conflicts={"blocks"})
def compute_chosen_pairs(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Replace dense experts if a router chooses k of them for each token."""
    if next(sums_over_experts(module.graph), None) is None:
        return PassResult(module, plan)
    changed = copy_graph_module(module)
    graph = changed.graph
    matches: list[str] = []
    refusals: list[Refusal] = []
    for expert_sum in list(sums_over_experts(graph)):
        choice = _choice(expert_sum)
        if choice is None:
            continue
        writer = GraphWriter(graph, expert_sum.node)
        try:
            with graph.inserting_before(expert_sum.node):
                result = _ChosenSum(writer, expert_sum, *choice).write()
        except NotThisForm as error:
            writer.erase()
            reason = (
                f"every expert computes every token, though {named(choice[0])} chooses some: {error}; expected "
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
    changed.recompile()
    if refusals:
        plan = dataclasses.replace(plan, refusals=plan.refusals + tuple(refusals))
    return PassResult(changed, plan, tuple(matches), tuple(refusals))


def _choice(expert_sum: SumOverExperts) -> tuple[Node, int] | None:
    """Return ids of experts without which the terms are zero, and how many each position has; None if it has all."""
    backgrounds = Backgrounds(expert_sum.pairs)
    zero = backgrounds.zero_of(expert_sum.value, expert_sum.layout)
    if zero is None and expert_sum.weights is not None and expert_sum.weights_layout is not None:
        zero = backgrounds.zero_of(expert_sum.weights, expert_sum.weights_layout)
    if zero is None or zero.ids is None:
        return None
    count = sympy.expand(sympy.Mul(*size_expressions(fake_value(zero.ids).shape)))
    top_k = ratio(count, expert_sum.pairs.positions)
    if top_k is None or not top_k.is_Integer or not 0 < int(top_k) < expert_sum.pairs.experts:
        return None
    return zero.ids, int(top_k)


class _ChosenSum:
    """A writer of the terms of `expert_sum` for the `top_k` experts of each position, `ids`, and of their sum."""

    def __init__(self, writer: GraphWriter, expert_sum: SumOverExperts, ids: Node, top_k: int) -> None:
        self.writer, self.expert_sum, self.ids, self.top_k = writer, expert_sum, ids, top_k

    def write(self) -> Node:
        """Return the new result of the sum. Raises NotThisForm."""
        writer, expert_sum = self.writer, self.expert_sum
        tokens = writer.find_size(expert_sum.pairs.positions, [self.ids])
        if tokens is None:
            dims = range(fake_value(self.ids).dim() - (self.top_k > 1))
            tokens = writer.product(*(writer.size(self.ids, dim) for dim in dims))
        ids = writer.viewed(self.ids, [tokens, self.top_k])
        pairs = SortedPairs.of(Chosen(ids, expert_sum.pairs.experts), writer)
        ends = writer.cast(pairs.ends, torch.int32)
        count = writer.size(pairs.order, 0)
        experts = writer.emit(aten.index.Tensor, writer.viewed(ids, [count]), [pairs.order])
        rows_of_pairs = PairRows(count, writer.cast(experts, torch.int64), pairs.tokens, ends)
        rows = RowsOfPairs(writer, expert_sum.pairs, rows_of_pairs)
        if not rows.reaches_gemms(expert_sum.value, expert_sum.layout):
            refuse(expert_sum.node, "adds up values that cannot be traced to GEMMs of experts")
        written = self._weighted(rows, rows.write(expert_sum.value, expert_sum.layout))
        self._check_unread(list(rows.gemms))
        return self._sum_by_token(written, pairs, tokens)

    def _weighted(self, rows: RowsOfPairs, value: Node) -> Node:
        """Return the terms [rows, features] of the sum, in float32 if a GEMM accumulated them."""
        writer, expert_sum = self.writer, self.expert_sum
        if expert_sum.gemm is not None:
            return rows.product(expert_sum.gemm, writer.viewed(value, [rows.rows.count, expert_sum.gemm.width]))
        if expert_sum.weights is None or expert_sum.weights_layout is None:
            return value
        weights = rows.write(expert_sum.weights, expert_sum.weights_layout)
        value, weights = (writer.cast_to_accumulate(tensor) for tensor in (value, weights))
        weights = writer.viewed(weights, [rows.rows.count, *[1] * (fake_value(value).dim() - 1)])
        return writer.emit(aten.mul.Tensor, value, weights)

    def _sum_by_token(self, rows: Node, pairs: SortedPairs, tokens: object) -> Node:
        writer = self.writer
        features = list(map(int, fake_value(rows).shape[1:]))
        by_token = writer.viewed(writer.restore_order(rows, pairs.order), [tokens, self.top_k, *features])
        result = writer.emit(aten.sum.dim_IntList, by_token, [1])
        result = writer.cast(result, fake_value(self.expert_sum.node).dtype)
        return writer.viewed(result, self._shape(result))

    def _shape(self, result: Node) -> list[object]:
        """Return the shape of the sum. Raises NotThisForm unless tokens come before features, in order."""
        node, layout = self.expert_sum.node, self.expert_sum.result_layout
        shares = [factor.share for factor in layout.factors if factor.share is not None]
        used = [dim for dim in layout.dimensions if dim]
        rows_first = [is_features(dim) for dim in used] == sorted(is_features(dim) for dim in used)
        is_mixed = any(factor.is_rows != dim[0].is_rows for dim in used for factor in dim)
        if shares != [*layout.shares] or not rows_first or is_mixed:
            refuse(node, "has its tokens after features, or in another order")
        if not fits(layout, fake_value(node)):
            refuse(node, "has sizes that cannot be followed")
        sources = (result, self.ids, self.expert_sum.value)
        shape = [self.writer.find_size(size_of(dim), sources) for dim in layout.dimensions]
        if None in shape:
            refuse(node, "has a size that is not found in the graph")
        return shape

    def _check_unread(self, gemms: list[Node]) -> None:
        """Raise NotThisForm if the GEMMs' results have readers besides the sum, or its new terms need them."""
        written = set(self.writer.written)
        for node in descendants(*gemms, follow=lambda user: user is not self.expert_sum.node):
            if node.op == "output" or mutates(node):
                raise NotThisForm("the result of each expert for each token is read by something else too")
            if not written.isdisjoint(node.users):
                refuse(node, "is computed from several tokens or experts")
