"""Write a loop over experts as grouped GEMMs.

Contract
    in    a captured graph with unrolled Python loops: for each expert, rows of a tensor are selected, multiplied by the
          weights of that expert, and combined with the rows of the other experts
    out   the same graph with grouped GEMMs over the rows of all experts; equal up to the rounding of GEMMs. Unsupported
          loops stay unchanged, each with a refusal

Pseudo-code
    merge equal views, list masked rows (`masks/list_masked_rows.py`), split rows by counts (`known_slices.py`)
    for each node that concatenates or stacks values (`joins.py`), or sums them by token (`sums_by_token.py`):
        follow the values back in lockstep (`branches.py`)
        skip the node if the branches have no GEMMs with weights of their experts
        replace the node by a value computed from the rows of all experts
    erase unread nodes, and host reads of numbers of which only the sum is needed (`known_totals.py`)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import cast

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.blocks.expert_gemms import refused
from moepass.passes.graph.graph_writer import GraphWriter, described_sizes, erase_unread, refresh_fake_values
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm, refuse
from moepass.passes.graph.refusals import first_line
from moepass.passes.graph.source_lines import in_words, place_of
from moepass.passes.ir.plan import Plan, Refusal
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.loops.branches import Branches, RowsOfAll
from moepass.passes.loops.equal_views import merge_equal_views
from moepass.passes.loops.expert_weights import FixedNodes
from moepass.passes.loops.joins import Join, joined, joins
from moepass.passes.loops.known_slices import split_known_slices
from moepass.passes.loops.known_totals import without_known_reads
from moepass.passes.loops.sums_by_token import SumByToken, sum_rows_by_token, sums_by_token
from moepass.passes.masks.list_masked_rows import list_masked_rows
from moepass.passes.masks.unread_masks import erase_unread_masks
from moepass.passes.ops.walk import ancestors

aten = torch.ops.aten

# The nodes of an expert are fewer; a walk that meets more has left it.
_MOST_NODES = 200


@graph_pass(conflicts={"blocks"})
def write_grouped_gemms(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Replace every loop over experts by grouped GEMMs."""
    if not any(map(_has_own_gemms, _possible_joins(module.graph))):
        return PassResult(module, plan)
    written = copy_graph_module(module)
    merge_equal_views(written.graph)
    written = split_known_slices(list_masked_rows(written))
    matches: list[str] = []
    refusals: list[Refusal] = []
    fixed = FixedNodes()
    for join in _possible_joins(written.graph):
        if not _has_own_gemms(join):
            continue
        writer = GraphWriter(written.graph, join.node)
        branches = Branches(writer, fixed, len(join.branches))
        try:
            with written.graph.inserting_before(join.node):
                result = _result(join, branches, writer)
        except NotThisForm as error:
            writer.erase()
            if isinstance(join, SumByToken) or _are_of_experts(join, branches, fixed):
                refusals.append(refused(join.node, in_words(str(error), written.graph), place_of(join.node)))
            continue
        matches.append(f"{join.node.name} ({len(join.branches)} experts)")
        join.node.replace_all_uses_with(result)
        has_other_size = described_sizes(fake_value(join.node)) != described_sizes(fake_value(result))
        try:
            if has_other_size:
                refresh_fake_values(written.graph, result)
        except Exception as error:  # operators raise various errors for sizes that they were not captured for
            reason = f"what reads the results of a loop over experts does not take their sizes ({first_line(error)})"
            refusal = refused(join.node, reason, place_of(join.node))
            plan = dataclasses.replace(plan, refusals=(*plan.refusals, refusal))
            return PassResult(module, plan, refusals=(refusal,))
        erase_unread(written.graph, join.node)
        erase_unread_masks(written.graph)
    fixed.erase_unread()
    if not matches and not refusals:
        return PassResult(module, plan)
    written.graph.lint()
    written.recompile()
    if matches:
        written = without_known_reads(written)
    if refusals:
        plan = dataclasses.replace(plan, refusals=plan.refusals + tuple(refusals))
    return PassResult(written, plan, tuple(matches), tuple(refusals))


def _possible_joins(graph: Graph) -> Iterator[Join | SumByToken]:
    return itertools.chain(joins(graph), sums_by_token(graph))


def _result(join: Join | SumByToken, branches: Branches, writer: GraphWriter) -> Node:
    if isinstance(join, SumByToken) and join.refusal is not None:
        refuse(join.node, join.refusal)
    rows = branches.together(join.branches)
    if not isinstance(rows, RowsOfAll) or not branches.gemms:
        raise NotThisForm("its branches have no GEMMs with their own weights")
    assert branches.groups is not None
    if isinstance(join, SumByToken):
        result = sum_rows_by_token(join, branches, writer)
    else:
        if branches.chosen is not None and branches.chosen[1]:
            refuse(join.node, "reads the rows of each mask in the order of that mask")
        result = joined(join, rows, branches.groups, writer)
    old, new = fake_value(join.node), fake_value(result)
    is_same = old.dtype == new.dtype and old.dim() == new.dim()
    if not is_same or not all(map(branches.groups.are_equal, old.shape, new.shape)):
        raise NotThisForm(f"the results of all experts together are {list(new.shape)}; expected {list(old.shape)}")
    return result


def _has_own_gemms(join: Join | SumByToken) -> bool:
    """Return whether the first two branches each have a nearby GEMM that the other does not have."""
    first, *later = (_gemms_before(branch) for branch in join.branches[:2])
    return bool(first) and all(first - gemms and gemms - first for gemms in later)


def _are_of_experts(join: Join, branches: Branches, fixed: FixedNodes) -> bool:
    """Return whether the operands of `join` are results of experts.

    Either weights of each expert were found, or each branch multiplies its own rows by its own weights, which are
    equal in number and shapes.
    """
    gemms = [_gemms_before(branch) for branch in join.branches]
    shared = set.intersection(*gemms)  # the router's
    rows, weights = (
        [{cast("Node", gemm.args[side]) for gemm in nodes - shared} for nodes in gemms] for side in (-2, -1)
    )
    if set.intersection(*rows):
        return False  # queries, keys and values, of the same rows
    if branches.has_weights:
        return True
    if any(len(set().union(*all_nodes)) != sum(map(len, all_nodes)) for all_nodes in (rows, weights)):
        return False
    shapes = {str(sorted(str(fake_value(weight).shape) for weight in nodes)) for nodes in weights}
    return len(shapes) == 1 and all(fixed.holds(weight) for nodes in weights for weight in nodes)


def _gemms_before(branch: Node) -> set[Node]:
    def is_gemm(node: Node) -> bool:
        return is_call(node, aten.mm.default, aten.addmm.default)

    def is_value(node: Node) -> bool:
        return not isinstance(fake_value(node), torch.SymInt)

    return set(filter(is_gemm, ancestors(branch, follow=is_value, stop=is_gemm, most=_MOST_NODES)))
