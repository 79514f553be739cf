"""Run a graph so that no value lives longer than its last reader.

A Python call keeps its arguments alive until it returns, because the frames below hold them. A segment would keep all
of its inputs, although it reads most of them early. So a segment gets a list of inputs and empties it.

    step         runs one node on the values of all nodes so far, which are in a list
    last reader  the step after which a value is removed from that list; if the node empties its own list, the value is
                 removed before it runs
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

# Returns the arguments of a node, from the values so far.
Read = Callable[[list[Any]], Any]
Step = Callable[[list[Any]], None]


class TakesList(torch.nn.Module):
    """A module that a graph can call with a list of its arguments, which it empties."""

    def run_list(self, inputs: list[Any]) -> Any:
        """Run the module on `inputs` and empty the list."""
        raise NotImplementedError


def run_by_list(module: GraphModule) -> Callable[[list[Any]], Any]:
    """Return `module` as a callable that takes a list of its inputs and empties it. Nodes run in the graph's order.

    The function raises ValueError if the list has not one value for each input.
    """
    nodes = list(module.graph.nodes)
    index = {node: position for position, node in enumerate(nodes)}
    last = {used: node for node in nodes for used in node.all_input_nodes}
    dead: dict[Node, list[int]] = {node: [] for node in nodes}
    for node in nodes:
        # A value without readers is removed at once.
        dead[last.get(node, node)].append(index[node])
    inputs = [node for node in nodes if node.op == "placeholder"]
    steps = [_step(module, node, index, dead[node]) for node in nodes if node.op != "output"]
    result = _read(module.graph.output_node().args[0], index)

    def run(arguments: list[Any]) -> Any:
        values: list[Any] = [None] * len(nodes)
        for node, value in zip(inputs, arguments, strict=True):
            values[index[node]] = value
        # The loop variables would keep the last input alive.
        node = value = None
        arguments.clear()
        for step in steps:
            step(values)
        return result(values)

    return run


def _step(module: GraphModule, node: Node, indices: Mapping[Node, int], dead: Sequence[int]) -> Step:
    def remove_dead(values: list[Any]) -> None:
        for dead_index in dead:
            values[dead_index] = None

    if node.op == "placeholder":
        return remove_dead
    index = indices[node]
    arguments, keywords = _read(list(node.args), indices), _read(dict(node.kwargs), indices)
    called = _called(module, node)

    def run_taker(values: list[Any]) -> None:
        inputs = arguments(values)
        remove_dead(values)
        result = called(inputs)
        if index not in dead:
            values[index] = result

    def run(values: list[Any]) -> None:
        values[index] = called(*arguments(values), **keywords(values))
        remove_dead(values)

    takes_list = node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), TakesList)
    return run_taker if takes_list else run


def _called(module: GraphModule, node: Node) -> Callable[..., Any]:
    if node.op == "call_module":
        child = module.get_submodule(str(node.target))
        return child.run_list if isinstance(child, TakesList) else child
    if node.op == "get_attr":
        constant = operator.attrgetter(str(node.target))(module)
        return lambda: constant
    if node.op == "call_method":
        name = str(node.target)
        return lambda value, *arguments, **keywords: getattr(value, name)(*arguments, **keywords)
    assert callable(node.target)
    return node.target


def _read(value: Any, indices: Mapping[Node, int]) -> Read:
    """Return a function that replaces the nodes in `value` by their values."""
    if isinstance(value, Node):
        return operator.itemgetter(indices[value])
    if isinstance(value, (list, tuple)):
        items = [_read(item, indices) for item in value]
        if isinstance(value, tuple):
            return lambda values: tuple(item(values) for item in items)
        return lambda values: [item(values) for item in items]
    if isinstance(value, dict):
        named = {key: _read(item, indices) for key, item in value.items()}
        return lambda values: {key: item(values) for key, item in named.items()}
    if isinstance(value, slice):
        bounds = [_read(bound, indices) for bound in (value.start, value.stop, value.step)]
        return lambda values: slice(*(bound(values) for bound in bounds))
    return lambda values: value
