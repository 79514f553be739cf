"""Costs of the graph: FLOPs and bytes of every node, in the symbols of its shapes.

Contract
    in    a graph with `meta["val"]` on every node, and blocks found
    out   the same nodes in the same order, each with `meta["moepass_cost"]`, an `OpCost`
          `plan.cost` is the graph's total, `plan.blocks[i].cost` that of a block's GEMMs, `plan.sizes` the symbols
          and the values they had when the graph was captured, `plan.uncosted` the operators nobody knows the cost
          of, `plan.dtype` what the graph computes in outside its blocks

Pseudo-code
    for each node: its cost by the registry; an operator without an entry costs its traffic
    totals: sums of expressions, written into the plan as text
    partition then writes the total of each segment into its step
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from moepass.models.formulas.sizes import Size

# Registered by import.
from moepass.passes.cost import attention_costs as attention_costs
from moepass.passes.cost import collective_costs as collective_costs
from moepass.passes.cost.op_costs import OpCost, node_cost, tensors_in
from moepass.passes.graph.nodes import copy_graph_module, fake_value
from moepass.passes.ir.cost import Cost
from moepass.passes.ir.plan import Plan, dtype_name
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass

COST_KEY = "moepass_cost"


@graph_pass(requires={"blocks"}, provides={"costs"})
def cost(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Cost every node, and write totals into the plan."""
    costed = copy_graph_module(module)
    ranks = {name: group.ranks for name, group in context.groups.items()}
    for node in costed.graph.nodes:
        node.meta[COST_KEY] = node_cost(node, ranks)
    by_name = {node.name: node for node in costed.graph.nodes}
    blocks = tuple(
        dataclasses.replace(block, cost=total_cost(by_name[name] for name in block.gemms if name in by_name))
        for block in plan.blocks
    )
    in_blocks = {name for block in plan.blocks for name in block.gemms}
    plan = dataclasses.replace(
        plan,
        dtype=_computing_dtype(node for node in costed.graph.nodes if node.name not in in_blocks),
        blocks=blocks,
        cost=total_cost(costed.graph.nodes),
        sizes=tuple(sorted(captured_sizes(costed.graph).items())),
        uncosted=tuple(sorted({str(node.target) for node in costed.graph.nodes if not node.meta[COST_KEY].is_known})),
    )
    return PassResult(costed, plan)


def _computing_dtype(nodes: Iterable[Node]) -> str:
    """The type of most nodes that compute more than they move, GEMMs and attention; else that of most floating inputs.
    Empty where there is neither."""
    computing: Counter[str] = Counter()
    given: Counter[str] = Counter()
    for node in nodes:
        found = next((value for value in tensors_in(fake_value(node)) if value.is_floating_point()), None)
        if found is None:
            continue
        if node.op == "placeholder":
            given[dtype_name(found.dtype)] += 1
        elif node.meta[COST_KEY].flops != 0:
            computing[dtype_name(found.dtype)] += 1
    return next((dtype for counts in (computing, given) for dtype, _ in counts.most_common(1)), "")


def total_cost(nodes: Iterable[Node]) -> Cost | None:
    """The costs of `nodes` together; None where pass cost did not see them."""
    found = [node.meta.get(COST_KEY) for node in nodes]
    known = [value for value in found if isinstance(value, OpCost)]
    if not known:
        return None
    flops, memory, moved = (
        str(_sum(getattr(value, field) for value in known))
        for field in ("flops", "memory_bytes", "communication_bytes")
    )
    return Cost(flops, memory, moved)


def _sum(values: Iterable[Size]) -> sympy.Expr:
    """Equal terms are counted first: deep models have few different ones, and sympy takes its time with each."""
    return sympy.Add(*(count * value for value, count in Counter(values).items()))


def graph_cost(graph: Graph, ranks: Mapping[str, int] | None = None) -> OpCost:
    """The cost of a whole graph as expressions. `ranks`: the sizes of process groups by name."""
    costs = [node_cost(node, ranks) for node in graph.nodes]
    return OpCost(
        _sum(value.flops for value in costs),
        _sum(value.memory_bytes for value in costs),
        _sum(value.communication_bytes for value in costs),
        all(value.is_known for value in costs),
    )


def captured_sizes(graph: Graph) -> dict[str, int]:
    """The symbols of a graph's shapes, and the sizes that the example inputs had; none for data-dependent ones."""
    sizes: dict[str, int] = {}
    for node in graph.nodes:
        value = fake_value(node)
        shown = [value, *(size for tensor in tensors_in(value) for size in tensor.shape)]
        for size in shown:
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and size.node.has_hint():
                sizes[str(size.node.expr)] = int(size.node.hint)
    return sizes
