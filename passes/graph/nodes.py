"""Walking and copying FX graphs: what several passes need and none should write twice."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from moepass.passes.ir.segment import REGION_KEY

aten = torch.ops.aten

# Views whose schema declares no alias although they share memory with their input, always or for some arguments. Found
# by running every operator of torch 2.13 (tests/helpers/graphs/undeclared_views.py).
_UNDECLARED_VIEWS = {
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.lift.default,
    aten.dequantize.self,  # of a tensor that is not quantised
}


def copy_graph_module(module: GraphModule) -> GraphModule:
    """A copy whose graph can be edited without touching the original's. Node names and metadata stay."""
    graph = Graph()
    values: dict[Node, Node] = {}
    output = graph.graph_copy(module.graph, values)
    original_output = module.graph.output_node()
    copied = graph.output(output)
    copied.meta = dict(original_output.meta)
    # Lazy: most copies are never run, and generating their code takes longer than copying them.
    with _use_lazy_graph_module(True):
        fresh = _make_graph_module(module, graph)
    fresh.meta = dict(module.meta)
    return fresh


def graphs_within(module: GraphModule) -> Iterator[Graph]:
    """The graph of `module`, and of every branch or body that an operator of it runs, as `torch.cond` does."""
    yield module.graph
    for node in module.graph.nodes:
        if node.op == "get_attr":
            inner = operator.attrgetter(str(node.target))(module)
            if isinstance(inner, GraphModule):
                yield from graphs_within(inner)


def is_call(node: object, *targets: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_view(node: Node) -> bool:
    """True where the node's output shares memory with one of its inputs."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem or node.target in _UNDECLARED_VIEWS:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


def mutates(node: Node) -> bool:
    """True where the node writes into one of its inputs."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return schema is not None and bool(schema.is_mutable)


def draws_random_numbers(node: Node) -> bool:
    """True where the node's result depends on a random generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # What draws numbers in training only carries the tag all the same: attention, for the dropout inside it.
    values = {argument.name: argument.default_value for argument in target._schema.arguments}
    values.update(zip(values, node.args, strict=False))
    values.update(node.kwargs)
    off = values.get("dropout_p") == 0 or values.get("training") is False or values.get("train") is False
    return not off


def view_source(node: Node) -> Node:
    """The node whose memory `node` shows: itself where it is no view."""
    while is_view(node):
        inputs = node.all_input_nodes
        if not inputs:
            break
        node = inputs[0]
    return node


def readers(node: Node) -> Iterator[Node]:
    """Every node that reads `node`'s memory, directly or through views (the views included), in no fixed order."""
    seen: set[Node] = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user not in seen:
                seen.add(user)
                yield user
                if is_view(user):
                    pending.append(user)


def first_of_region(node: Node) -> Node:
    """The first node of the region that `node` is in, which stand side by side; itself where it is in none."""
    while REGION_KEY in node.meta and node.prev.meta.get(REGION_KEY) == node.meta[REGION_KEY]:
        node = node.prev
    return node


def last_of_region(node: Node) -> Node:
    while REGION_KEY in node.meta and node.next.meta.get(REGION_KEY) == node.meta[REGION_KEY]:
        node = node.next
    return node


def positions(graph: Graph) -> dict[Node, int]:
    """Every node's place in host order."""
    return {node: place for place, node in enumerate(graph.nodes)}


def module_path(node: Node) -> str:
    """The path of the module that the node came from, as `model.layers.3.mlp.experts`; empty where unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    # Dynamo begins it with the variable that held the model: L['self'].model, L['model'].model.
    path = re.sub(r"L\['\w+'\]\.?", "", str(list(stack.values())[-1][0]))
    return path.split(".parametrizations.")[0]


def fake_value(node: Node) -> Any:
    return node.meta.get("val")


def map_nodes(value: Any, replace: Callable[[Node], Any]) -> Any:
    return torch.fx.node.map_arg(value, replace)


def nodes_in(value: Any) -> list[Node]:
    """The nodes in arguments, each as often as it stands there."""
    found: list[Node] = []

    def note(node: Node) -> Node:
        found.append(node)
        return node

    map_nodes(value, note)
    return found


def constant_of(node: Node) -> Any:
    """The value that a `get_attr` node reads."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def graph_inputs(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def symbolic_sizes(nodes: Iterable[Node]) -> Iterator[torch.SymInt]:
    """Every size and stride that is no number: of the nodes' values, and the values themselves."""
    for node in nodes:
        value = fake_value(node)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            for size in (*item.shape, *item.stride()) if isinstance(item, torch.Tensor) else (item,):
                if isinstance(size, torch.SymInt):
                    yield size


def unbacked_conditions(graph: Graph) -> list[str]:
    """Known facts about sizes that only a run tells: their ranges, and the assertions on them."""
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
