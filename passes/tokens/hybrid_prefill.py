"""Group operations that treat each token independently into regions that can run in chunks of tokens.

Attention needs all tokens at once; the operations between two attentions do not. In chunks, they need temporary memory
for one chunk only, and complete tensors only for the inputs of attention and for the residual stream. (PrefillOnly,
arXiv 2505.07203, calls this hybrid prefilling.)

Contract
    in    a canonical graph: gathers, nothing scheduled
    out   the same operations in another order. Nodes of a region are adjacent and carry its number (REGION_KEY); they
          and their inputs carry the token dimensions of their values (TOKENS_KEY). A graph without regions stays
          unchanged, with a refusal

Pseudo-code
    compute sizes from the graph's inputs; copy each arange that several nodes write to memory
    between nodes that must keep their order (writes to inputs, communication with other ranks):
        follow tokens through the graph (token_flow.py), find regions (regions.py)
    write the nodes in their new order
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.collectives import communications_of
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import copy_graph_module, fake_value, graph_inputs, is_call
from moepass.passes.ir.plan import Plan, Refusal
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.ir.segment import ALL_TOKENS_KEY, REGION_KEY, TOKENS_KEY
from moepass.passes.ops.traits import draws_random_numbers, mutates
from moepass.passes.rows.row_layout import Layout
from moepass.passes.tokens.regions import Regions, find_regions, ids_leaving_regions, is_copied_to_readers
from moepass.passes.tokens.token_flow import TokenFlow, token_count, token_flow, token_inputs

aten = torch.ops.aten


@graph_pass(provides={"regions"}, conflicts={"planned", "scheduled"})
def hybrid_prefill(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Order the graph by regions, if it is to run in chunks of tokens."""
    if context.chunk_tokens is None:
        return PassResult(module, plan)
    changed = copy_graph_module(module)
    inputs = token_inputs(changed.graph)
    if not inputs:
        expected = "whole numbers [sequences, tokens] or floating-point numbers [tokens, width]"
        return _refused(module, plan, f"no argument has elements of each token, such as {expected}")
    tokens = token_count(inputs)
    if tokens is not None and tokens <= context.chunk_tokens:
        return PassResult(module, plan)
    _compute_sizes_from_inputs(changed.graph)
    _copy_shared_values(changed.graph)
    flow, regions = _flow_and_regions(changed.graph, inputs)
    if not regions.number:
        reason = next(iter(flow.reasons.values()), "nothing in the graph multiplies tokens by weights")
        return _refused(module, plan, reason)
    numbers = sorted(set(regions.number.values()))
    return PassResult(_reordered(changed, flow, regions), plan, matches=tuple(f"region {number}" for number in numbers))


def _refused(module: GraphModule, plan: Plan, reason: str) -> PassResult:
    refusal = Refusal("the graph", f"tokens run all at once: {reason}", "the graph")
    return PassResult(module, dataclasses.replace(plan, refusals=(*plan.refusals, refusal)), refusals=(refusal,))


def _flow_and_regions(graph: Graph, inputs: Mapping[Node, Layout]) -> tuple[TokenFlow, Regions]:
    excluded_ids: frozenset[Node] = frozenset()
    while True:
        flow = token_flow(graph, inputs, excluded_ids)
        order: list[Node] = []
        number: dict[Node, int] = {}
        for stretch in _stretches(graph):
            stretch_regions = find_regions(stretch, flow, 1 + max(number.values(), default=-1))
            order += stretch_regions.order
            number.update(stretch_regions.number)
        regions = Regions(tuple(order), number)
        leaving = ids_leaving_regions(regions, flow)
        if not leaving:
            return flow, regions
        excluded_ids |= leaving


def _stretches(graph: Graph) -> Iterator[list[Node]]:
    """Yield lists of nodes that may be reordered among each other; a node that must not move is alone in its list."""
    fixed = {communication.node for communication in communications_of(graph)}
    stretch: list[Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node in fixed or mutates(node) or draws_random_numbers(node) or is_call(node, aten._assert_scalar.default):
            yield stretch
            yield [node]
            stretch = []
        else:
            stretch.append(node)
    yield stretch


def _copy_shared_values(graph: Graph) -> None:
    """Give each indexed write its own copy of its values, because each chunk creates its own pair numbers."""
    for node in list(graph.nodes):
        if not is_call(node, aten.index_put.default):
            continue
        numbers = node.args[2]
        if isinstance(numbers, Node) and len(numbers.users) > 1:
            with graph.inserting_before(node):
                copy = graph.node_copy(numbers, lambda used: used)
            node.update_arg(2, copy)


def _compute_sizes_from_inputs(graph: Graph) -> None:
    """Compute sizes from those of inputs, because reading the size of a computed tensor would end a region."""
    size_nodes: dict[sympy.Expr, Node] = {}
    for node in list(graph.nodes):
        value = fake_value(node)
        if isinstance(value, torch.SymInt) and not any(
            isinstance(fake_value(used), torch.Tensor) and used.op != "placeholder" for used in node.all_input_nodes
        ):
            size_nodes.setdefault(size_expression(value), node)
        elif is_call(node, aten.sym_size.int) and node.args[0].op != "placeholder":
            with graph.inserting_before(node):
                size_node = _size_node(graph, size_expression(fake_value(node)), size_nodes)
            if isinstance(size_node, Node) and size_node is not node:
                node.replace_all_uses_with(size_node)
                graph.erase_node(node)


def _size_node(graph: Graph, size: sympy.Expr, size_nodes: Mapping[sympy.Expr, Node]) -> Node | int | None:
    """Return a node or number with the value of `size`, or None if `size` is no sum or product of sizes of inputs."""
    if size.is_Integer:
        return int(size)
    if size in size_nodes:
        return size_nodes[size]
    combine = {sympy.Add: operator.add, sympy.Mul: operator.mul}.get(type(size))
    if combine is None:
        return None
    operands = [_size_node(graph, operand, size_nodes) for operand in size.args]
    result = operands[0]
    for operand in operands[1:]:
        if result is None or operand is None:
            return None
        combined = graph.call_function(combine, (result, operand))
        values = [fake_value(value) if isinstance(value, Node) else value for value in (result, operand)]
        combined.meta["val"] = combine(*values)
        result = combined
    return result


def _reordered(module: GraphModule, flow: TokenFlow, regions: Regions) -> GraphModule:
    graph = Graph()
    values: dict[Node, Node] = {}
    for node in graph_inputs(module.graph):
        values[node] = _copy(graph, node, values, flow)
    attached: dict[Node, Node] = {}
    current: int | None = None
    for node in regions.order:
        number = regions.number.get(node)
        if number != current:
            attached, current = {}, number
        for used in _attached(node, flow):
            if used not in attached:
                attached[used] = _copy(graph, used, {**values, **attached}, flow)
                _mark(attached[used], number)
        values[node] = _copy(graph, node, {**values, **attached} if attached else values, flow)
        _mark(values[node], number)
    output = module.graph.output_node()
    for used in _attached(output, flow):
        values[used] = _copy(graph, used, values, flow)
    graph.output(torch.fx.node.map_arg(output.args[0], lambda used: values[used])).meta = dict(output.meta)
    written = GraphModule(module, graph)
    written.meta = dict(module.meta)
    return written


def _mark(node: Node, number: int | None) -> None:
    if number is not None:
        node.meta[REGION_KEY] = number


def _attached(node: Node, flow: TokenFlow) -> list[Node]:
    """Return the inputs of `node` that are copied to each region, each after its own inputs."""
    attached: list[Node] = []
    for used in node.all_input_nodes:
        if is_copied_to_readers(used, flow):
            attached += [*_attached(used, flow), used]
    return list(dict.fromkeys(attached))


def _copy(graph: Graph, node: Node, values: Mapping[Node, Node], flow: TokenFlow) -> Node:
    copied = graph.node_copy(node, lambda used: values[used])
    copied.meta = dict(node.meta)
    layouts = flow.layouts.get(node, flow.aligned.get(node))
    if layouts is not None:
        copied.meta[TOKENS_KEY] = layouts
    if node in flow.all_tokens:
        copied.meta[ALL_TOKENS_KEY] = True
    return copied
