"""Helpers to walk and copy FX graphs."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from moepass.passes.ir.segment import REGION_KEY


def copy_graph_module(module: GraphModule) -> GraphModule:
    """Return a copy whose graph can be edited without changing the original. Node names and metadata are kept."""
    graph = Graph()
    values: dict[Node, Node] = {}
    output = graph.graph_copy(module.graph, values)
    original_output = module.graph.output_node()
    copied = graph.output(output)
    copied.meta = dict(original_output.meta)
    # Lazy, because most copies are never run, and generating their code takes longer than copying them.
    with _use_lazy_graph_module(True):
        fresh = _make_graph_module(module, graph)
    fresh.meta = dict(module.meta)
    return fresh


def graphs_within(module: GraphModule) -> Iterator[Graph]:
    """Yield the graph of `module`, and of every branch or body that its operators run, such as `torch.cond`."""
    yield module.graph
    for node in module.graph.nodes:
        if node.op == "get_attr":
            inner = operator.attrgetter(str(node.target))(module)
            if isinstance(inner, GraphModule):
                yield from graphs_within(inner)


def is_call(node: object, *targets: object) -> bool:
    """Return whether `node` is a call of one of `targets`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def first_of_region(node: Node) -> Node:
    """Return the first node of the region of `node`, whose nodes are contiguous; `node` itself outside of regions."""
    while REGION_KEY in node.meta and node.prev.meta.get(REGION_KEY) == node.meta[REGION_KEY]:
        node = node.prev
    return node


def last_of_region(node: Node) -> Node:
    """Return the last node of the region of `node`; `node` itself outside of regions."""
    while REGION_KEY in node.meta and node.next.meta.get(REGION_KEY) == node.meta[REGION_KEY]:
        node = node.next
    return node


def positions(graph: Graph) -> dict[Node, int]:
    """Return every node's position in host order."""
    return {node: position for position, node in enumerate(graph.nodes)}


def module_path(node: Node) -> str:
    """Return the path of the node's module, such as `model.layers.3.mlp.experts`; empty if unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    # Dynamo's path begins with the variable of the model: L['self'].model, L['model'].model.
    path = re.sub(r"L\['\w+'\]\.?", "", str(list(stack.values())[-1][0]))
    return path.split(".parametrizations.")[0]


def fake_value(node: Node) -> Any:
    """Return the fake value of a node, or None."""
    return node.meta.get("val")


def several(value: Any) -> Sequence[Any]:
    """Return `value`, or a tuple of it alone if it is no tuple or list."""
    return value if isinstance(value, (tuple, list)) else (value,)


def is_float(node: object) -> bool:
    """Return whether the value of `node` is a floating-point tensor."""
    value = fake_value(node) if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def tensor_inputs(node: Node) -> list[Node]:
    """Return the inputs of `node` that are tensors, each once."""
    return [used for used in node.all_input_nodes if isinstance(fake_value(used), torch.Tensor)]


def map_nodes(value: Any, replace: Callable[[Node], Any]) -> Any:
    """Return `value` with its nodes replaced."""
    return torch.fx.node.map_arg(value, replace)


def nodes_in(value: Any) -> list[Node]:
    """Return the nodes in `value`, one entry for each occurrence."""
    nodes: list[Node] = []

    def note(node: Node) -> Node:
        nodes.append(node)
        return node

    map_nodes(value, note)
    return nodes


def constant_of(node: Node) -> Any:
    """Return the value that a `get_attr` node reads."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def graph_inputs(graph: Graph) -> list[Node]:
    """Return the placeholders of the graph."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def symbolic_sizes(nodes: Iterable[Node]) -> Iterator[torch.SymInt]:
    """Yield every symbolic size and stride of the nodes' values, and the values that are symbolic sizes."""
    for node in nodes:
        value = fake_value(node)
        for item in several(value):
            for size in (*item.shape, *item.stride()) if isinstance(item, torch.Tensor) else (item,):
                if isinstance(size, torch.SymInt):
                    yield size


def unbacked_conditions(graph: Graph) -> list[str]:
    """Return the known ranges of data-dependent sizes, and the assertions on them."""
    ranges: dict[str, str] = {}
    asserted: dict[str, None] = {}
    for size in symbolic_sizes(graph.nodes):
        env = size.node.shape_env
        for symbol in sorted(size.node.expr.free_symbols, key=str):
            if str(symbol) not in ranges and env.is_unbacked_symint(symbol):
                ranges[str(symbol)] = f"{symbol} in {env.var_to_range[symbol]}"
                asserted.update(
                    (str(condition.expr), None) for condition in env.deferred_runtime_asserts.get(symbol, ())
                )
    return [*ranges.values(), *asserted]
