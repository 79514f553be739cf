"""Bring what treats every token alone together, so that it can run some tokens at a time.

Attention needs all tokens at once. What lies between two attentions does not: run for some tokens at a time, it needs
memory for the temporary values of these alone, and whole tensors only for what attention reads and for the residual
stream. (PrefillOnly, arXiv 2505.07203, calls that hybrid prefilling.)

Contract
    in    a canonical graph: gathers, nothing scheduled
    out   the same operations in another order. Nodes of a region stand side by side and carry its number; they and what
          they read carry the places of tokens in their values (REGION_KEY, TOKENS_KEY). A graph in which nothing can
          run some tokens at a time stays as it is, with a refusal

Pseudo-code
    sizes are computed from the graph's inputs; numbers 0, 1, ... that are written to several places are made for each
    between nodes that must keep their order (writes to inputs, exchanges with other ranks):
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
from moepass.passes.tokens.regions import Regions, find_regions, sorts_that_leave, stands_with_readers
from moepass.passes.tokens.token_flow import TokenFlow, token_count, token_flow, token_inputs

aten = torch.ops.aten


@graph_pass(provides={"regions"}, conflicts={"planned", "scheduled"})
def hybrid_prefill(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Order the graph by regions, where tokens are to run some at a time."""
    if context.chunk_tokens is None:
        return PassResult(module, plan)
    changed = copy_graph_module(module)
    inputs = token_inputs(changed.graph)
    if not inputs:
        expected = "whole numbers [sequences, tokens] or floating-point numbers [tokens, width]"
        return _refused(module, plan, f"no argument has something for each token, such as {expected}")
    tokens = token_count(inputs)
    if tokens is not None and tokens <= context.chunk_tokens:
        return PassResult(module, plan)
    _compute_sizes_from_inputs(changed.graph)
    _give_numbers_to_each(changed.graph)
    flow, regions = _flow_and_regions(changed.graph, inputs)
    if not regions.number:
        reason = next(iter(flow.reasons.values()), "nothing in the graph multiplies tokens by weights")
        return _refused(module, plan, reason)
    found = sorted(set(regions.number.values()))
    return PassResult(_written(changed, flow, regions), plan, matches=tuple(f"region {number}" for number in found))


def _refused(module: GraphModule, plan: Plan, reason: str) -> PassResult:
    refusal = Refusal("the graph", f"tokens run all at once: {reason}", "the graph")
    return PassResult(module, dataclasses.replace(plan, refusals=(*plan.refusals, refusal)), refusals=(refusal,))


def _flow_and_regions(graph: Graph, inputs: Mapping[Node, Layout]) -> tuple[TokenFlow, Regions]:
    never: frozenset[Node] = frozenset()
    while True:
        flow = token_flow(graph, inputs, never)
        order: list[Node] = []
        number: dict[Node, int] = {}
        for stretch in _stretches(graph):
            found = find_regions(stretch, flow, 1 + max(number.values(), default=-1))
            order += found.order
            number.update(found.number)
        regions = Regions(tuple(order), number)
        leaving = sorts_that_leave(regions, flow)
        if not leaving:
            return flow, regions
        never |= leaving


def _stretches(graph: Graph) -> Iterator[list[Node]]:
    """Nodes that may change places among each other: between those that others must not pass."""
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


def _give_numbers_to_each(graph: Graph) -> None:
    """Numbers of pairs are made again for some tokens: no other reader may share them."""
    for node in list(graph.nodes):
        if not is_call(node, aten.index_put.default):
            continue
        numbers = node.args[2]
        if isinstance(numbers, Node) and len(numbers.users) > 1:
            with graph.inserting_before(node):
                own = graph.node_copy(numbers, lambda used: used)
            node.update_arg(2, own)


def _compute_sizes_from_inputs(graph: Graph) -> None:
    """A size that is read from a tensor inside the graph would end a region."""
    known: dict[sympy.Expr, Node] = {}
    for node in list(graph.nodes):
        value = fake_value(node)
        if isinstance(value, torch.SymInt) and not any(
            isinstance(fake_value(used), torch.Tensor) and used.op != "placeholder" for used in node.all_input_nodes
        ):
            known.setdefault(size_expression(value), node)
        elif is_call(node, aten.sym_size.int) and node.args[0].op != "placeholder":
            with graph.inserting_before(node):
                made = _size_node(graph, size_expression(fake_value(node)), known)
            if isinstance(made, Node) and made is not node:
                node.replace_all_uses_with(made)
                graph.erase_node(node)


def _size_node(graph: Graph, size: sympy.Expr, known: Mapping[sympy.Expr, Node]) -> Node | int | None:
    """The size as a node; None where it is no sum or product of the sizes of inputs."""
    if size.is_Integer:
        return int(size)
    if size in known:
        return known[size]
    combine = {sympy.Add: operator.add, sympy.Mul: operator.mul}.get(type(size))
    if combine is None:
        return None
    parts = [_size_node(graph, part, known) for part in size.args]
    result = parts[0]
    for part in parts[1:]:
        if result is None or part is None:
            return None
        made = graph.call_function(combine, (result, part))
        values = [fake_value(one) if isinstance(one, Node) else one for one in (result, part)]
        made.meta["val"] = combine(*values)
        result = made
    return result


def _written(module: GraphModule, flow: TokenFlow, regions: Regions) -> GraphModule:
    graph = Graph()
    values: dict[Node, Node] = {}
    for node in graph_inputs(module.graph):
        values[node] = _copied(graph, node, values, flow)
    attached: dict[Node, Node] = {}
    current: int | None = None
    for node in regions.order:
        number = regions.number.get(node)
        if number != current:
            attached, current = {}, number
        for used in _attached(node, flow):
            if used not in attached:
                attached[used] = _copied(graph, used, {**values, **attached}, flow)
                _mark(attached[used], number)
        values[node] = _copied(graph, node, {**values, **attached} if attached else values, flow)
        _mark(values[node], number)
    output = module.graph.output_node()
    for used in _attached(output, flow):
        values[used] = _copied(graph, used, values, flow)
    graph.output(torch.fx.node.map_arg(output.args[0], lambda used: values[used])).meta = dict(output.meta)
    written = GraphModule(module, graph)
    written.meta = dict(module.meta)
    return written


def _mark(node: Node, number: int | None) -> None:
    if number is not None:
        node.meta[REGION_KEY] = number


def _attached(node: Node, flow: TokenFlow) -> list[Node]:
    """What stands with `node` of what it reads, each behind what that reads itself."""
    found: list[Node] = []
    for used in node.all_input_nodes:
        if stands_with_readers(used, flow):
            found += [*_attached(used, flow), used]
    return list(dict.fromkeys(found))


def _copied(graph: Graph, node: Node, values: Mapping[Node, Node], flow: TokenFlow) -> Node:
    copied = graph.node_copy(node, lambda used: values[used])
    copied.meta = dict(node.meta)
    layouts = flow.layouts.get(node, flow.aligned.get(node))
    if layouts is not None:
        copied.meta[TOKENS_KEY] = layouts
    if node in flow.all_tokens:
        copied.meta[ALL_TOKENS_KEY] = True
    return copied
