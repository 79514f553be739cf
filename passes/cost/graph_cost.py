"""Costs of the graph: FLOPs and bytes of every node, in the symbols of its shapes.

Contract
    in    a graph with `meta["val"]` on every node, and detected blocks
    out   the same nodes in the same order, each with an `OpCost` in `meta["moepass_cost"]`
          `plan.cost`            total of the graph
          `plan.blocks[i].cost`  total of the block's GEMMs
          `plan.sizes`           symbols of the graph, with their values at capture
          `plan.uncosted`        operators of unknown cost
          `plan.dtype`           dtype of the computation outside blocks

Pseudo-code
    for each node: look up its cost; an operator without an entry costs its traffic
    sum up expressions, and write the totals into the plan as text
    (`partition` later writes the total of each segment into its step)
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from moepass.models.formulas.sizes import Size

# Imported to register their costs.
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
    """Compute the cost of every node, and write totals into the plan."""
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
    """Return the dtype of most nodes with FLOPs, or else of most floating-point inputs; empty if there are neither."""
    computing: Counter[str] = Counter()
    inputs: Counter[str] = Counter()
    for node in nodes:
        tensor = next((value for value in tensors_in(fake_value(node)) if value.is_floating_point()), None)
        if tensor is None:
            continue
        if node.op == "placeholder":
            inputs[dtype_name(tensor.dtype)] += 1
        elif node.meta[COST_KEY].flops != 0:
            computing[dtype_name(tensor.dtype)] += 1
    return next((dtype for counts in (computing, inputs) for dtype, _ in counts.most_common(1)), "")


def total_cost(nodes: Iterable[Node]) -> Cost | None:
    """Return the sum of the costs of `nodes`; None if pass `cost` did not run on them."""
    costs = [cost for node in nodes if isinstance(cost := node.meta.get(COST_KEY), OpCost)]
    if not costs:
        return None
    flops, memory, moved = (
        str(_sum(getattr(cost, field) for cost in costs)) for field in ("flops", "memory_bytes", "communication_bytes")
    )
    return Cost(flops, memory, moved)


def _sum(values: Iterable[Size]) -> sympy.Expr:
    """Add up `values`.

    Equal terms are counted first: deep models have few different ones, and sympy is slow with each.
    """
    return sympy.Add(*(count * value for value, count in Counter(values).items()))


def graph_cost(graph: Graph, ranks: Mapping[str, int] | None = None) -> OpCost:
    """Return the cost of a complete graph as expressions. `ranks` are the sizes of process groups by name."""
    costs = [node_cost(node, ranks) for node in graph.nodes]
    return OpCost(
        _sum(value.flops for value in costs),
        _sum(value.memory_bytes for value in costs),
        _sum(value.communication_bytes for value in costs),
        all(value.is_known for value in costs),
    )


def captured_sizes(graph: Graph) -> dict[str, int]:
    """Return the symbols in a graph's shapes with their values at capture. Data-dependent symbols have none."""
    sizes: dict[str, int] = {}
    for node in graph.nodes:
        value = fake_value(node)
        shown = [value, *(size for tensor in tensors_in(value) for size in tensor.shape)]
        for size in shown:
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and size.node.has_hint():
                sizes[str(size.node.expr)] = int(size.node.hint)
    return sizes
