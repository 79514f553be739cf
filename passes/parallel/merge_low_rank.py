"""Add pairs of low rank to the weights that they stand beside, where experts of other ranks are exchanged.

x W + (x A) B · s is x (W + A (B · s)), and that sum is made of parameters alone: each rank computes it once, in its
first run, and the others copy it (`passes/blocks/computed_weights.py`). Fewer bytes travel than those of all three.

Contract of `merge_low_rank`
    in    a captured graph
    out   if it talks to other ranks, grouped GEMMs with such weights in place of three grouped GEMMs; equal up to the
          rounding of the sum of weights in their type

Contract of `split_low_rank`
    in    the graph, without what became banks
    out   three grouped GEMMs again for each of those that are left: what no bank took would compute its weights in
          every run
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.blocks.computed_weights import NotComputedAheadError, steps_behind
from moepass.passes.blocks.expert_gemms import ExpertGemm, expert_gemms, is_grouped_gemm
from moepass.passes.blocks.low_rank import LowRankPair, low_rank_pairs, scale_of
from moepass.passes.graph.collectives import communications_of
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass

aten = torch.ops.aten

# Of the sum of weights that was written here.
MERGED_KEY = "moepass_low_rank"


@graph_pass(conflicts={"blocks"})
def merge_low_rank(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Write one grouped GEMM for a grouped GEMM and the pair of low rank beside it."""
    if not any(True for _ in communications_of(module.graph)) or not _pairs(module.graph):
        return PassResult(module, plan)
    changed = copy_graph_module(module)
    matches: list[str] = []
    while (merged := _merge_first(changed.graph)) is not None:
        matches.append(merged)
    if not matches:
        return PassResult(module, plan)
    changed.graph.lint()
    changed.recompile()
    return PassResult(changed, plan, tuple(matches))


@graph_pass(conflicts={"blocks"})
def split_low_rank(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Take such sums of weights apart that no bank took."""
    if not any(_merged_weights(node) is not None for node in module.graph.nodes):
        return PassResult(module, plan)
    changed = copy_graph_module(module)
    matches: list[str] = []
    for node in list(changed.graph.nodes):
        merged = _merged_weights(node)
        if merged is not None:
            _split(changed.graph, node, merged)
            matches.append(node.name)
    changed.graph.lint()
    changed.recompile()
    return PassResult(changed, plan, tuple(matches))


def _pairs(graph: Graph) -> list[LowRankPair]:
    gemms, _ = expert_gemms(graph, may_compute=True)
    return low_rank_pairs([gemm for gemm in gemms if gemm.form == "grouped_mm"])


@dataclasses.dataclass(frozen=True)
class _PairSum:
    """`node` adds to `main`, a result of the GEMM beside, the products of the pair times all of `scales`."""

    node: Node
    main: Node
    scales: tuple[float | Node, ...]


def _merge_first(graph: Graph) -> str | None:
    """Merge the first pair that can be; the name of its sum."""
    for pair in _pairs(graph):
        found = _sum_of(pair)
        if found is None or not _is_exact(pair):
            continue
        weights = [_weight_operand(gemm) for gemm in (pair.main, pair.first, pair.second)]
        types = {fake_value(one).dtype for one in weights}
        fixed = [*weights, *(scale for scale in found.scales if isinstance(scale, Node))]
        if len(types) != 1 or not all(map(_is_fixed, fixed)):
            continue
        gemm = pair.main.node
        for step in sorted({step for one in fixed for step in steps_behind(one)}):
            if not step < gemm:
                gemm.prepend(step)
        writer = GraphWriter(graph, gemm)
        try:
            with graph.inserting_before(gemm):
                main, first, second = weights
                for scale in found.scales:
                    second = writer.emit(aten.mul.Tensor, second, _flat(scale, writer))
                merged = writer.emit(aten.add.Tensor, main, writer.emit(aten.bmm.default, first, second))
                if fake_value(merged).dtype not in types:
                    raise NotThisForm("its scale has another type")
        except NotThisForm:
            writer.erase()
            continue
        merged.meta[MERGED_KEY] = True
        gemm.update_arg(1, merged)
        found.node.replace_all_uses_with(found.main)
        erase_unread(graph, found.node)
        return found.node.name
    return None


def _sum_of(pair: LowRankPair) -> _PairSum | None:
    """What adds the products of the pair, times numbers, to those of the GEMM beside, and nothing else."""
    node, scales = pair.second.node, list[float | Node]()
    while len(node.users) == 1:
        (user,) = node.users
        if is_call(user, aten.mul.Tensor) and user.args[0] is node and (factor := scale_of(user)) is not None:
            node = user
            scales.append(factor)
            continue
        if not is_call(user, aten.add.Tensor) or str(fake_value(user).shape) != str(fake_value(node).shape):
            return None
        others = [used for used in user.args if used is not node]
        alpha = user.kwargs.get("alpha", 1)
        if len(others) != 1 or not isinstance(others[0], Node) or not isinstance(alpha, (int, float)):
            return None
        is_added = user.args[1] is node
        if alpha != 1 and not is_added:
            return None
        is_main = others[0] is pair.main.node or _adds_to(others[0], pair.main.node)
        if alpha != 1:
            scales.append(float(alpha))
        # A scale of one dimension promotes what it multiplies: the sum, and all behind it, have its type then.
        is_same_type = fake_value(user).dtype == fake_value(others[0]).dtype
        return _PairSum(user, others[0], tuple(scales)) if is_main and is_same_type else None
    return None


def _flat(scale: float | Node, writer: GraphWriter) -> float | Node:
    return writer.viewed(scale, []) if isinstance(scale, Node) else scale


def _adds_to(node: Node, gemm: Node) -> bool:
    """True where `node` is `gemm` and a bias, which nothing else reads."""
    return (
        is_call(node, aten.add.Tensor)
        and not node.kwargs
        and gemm in node.args
        and len(gemm.users) == 1
        and fake_value(node).dtype == fake_value(gemm).dtype
        and str(fake_value(node).shape) == str(fake_value(gemm).shape)
    )


def _is_exact(pair: LowRankPair) -> bool:
    """True where nothing but the pair and its sum read what it computes, without scales or casts in between."""
    gemms = (pair.main, pair.first, pair.second)
    return (
        all(len(gemm.node.args) > 1 for gemm in gemms)
        and pair.second.activations is pair.first.node
        and pair.first.activations is pair.main.activations
        and all(len(gemm.node.users) == 1 for gemm in gemms)
    )


def _weight_operand(gemm: ExpertGemm) -> Node:
    weight = gemm.node.args[1]
    assert isinstance(weight, Node)
    return weight


def _is_fixed(weight: Node) -> bool:
    try:
        steps_behind(weight)
    except NotComputedAheadError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class _Merged:
    main: Node
    first: Node
    second: Node


def _merged_weights(node: Node) -> _Merged | None:
    """The three weights that the GEMM `node` multiplies by the sum of."""
    if not is_grouped_gemm(node) or len(node.args) < 2:
        return None
    merged = node.args[1]
    if not isinstance(merged, Node) or not merged.meta.get(MERGED_KEY) or not is_call(merged, aten.add.Tensor):
        return None
    main, product = merged.args
    assert isinstance(product, Node)
    first, second = product.args
    assert isinstance(main, Node)
    assert isinstance(first, Node)
    assert isinstance(second, Node)
    return _Merged(main, first, second)


def _split(graph: Graph, gemm: Node, merged: _Merged) -> None:
    rows, weight, *others = gemm.args
    assert isinstance(weight, Node)
    writer = GraphWriter(graph, gemm)
    with graph.inserting_before(gemm):

        def product(of: object, weights: Node) -> Node:
            return writer.emit(gemm.target, of, weights, *others, **gemm.kwargs)  # type: ignore[arg-type]

        low = product(product(rows, merged.first), merged.second)
        total = writer.emit(aten.add.Tensor, product(rows, merged.main), low)
    gemm.replace_all_uses_with(total)
    erase_unread(graph, gemm)
