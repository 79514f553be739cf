"""Run a graph so that no value lives longer than its last reader.

A call in Python keeps its arguments until it returns: the frames below it hold them. A segment that is called so keeps
all of its inputs, although most are read at its beginning. Here it is given a list, which it empties as it goes.

    step        what one node does, on the values of all nodes so far: each has a place in a list
    last reader the step behind which a value's place is emptied; before it, where the reader empties its own list
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

# Reads what a node is given from the values so far.
Read = Callable[[list[Any]], Any]
Step = Callable[[list[Any]], None]


class TakesList(torch.nn.Module):
    """A module of a graph that is called with a list of its arguments, and empties it."""

    def run_list(self, inputs: list[Any]) -> Any:
        raise NotImplementedError


def run_by_list(module: GraphModule) -> Callable[[list[Any]], Any]:
    """`module` as a function of a list of its inputs, which it empties. It runs the nodes in the graph's order.

    The function raises ValueError where the list is not as long as the graph has inputs."""
    nodes = list(module.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    last = {used: node for node in nodes for used in node.all_input_nodes}
    dead: dict[Node, list[int]] = {node: [] for node in nodes}
    for node in nodes:
        # A value that nobody reads goes at once.
        dead[last.get(node, node)].append(place[node])
    inputs = [node for node in nodes if node.op == "placeholder"]
    steps = [_step(module, node, place, dead[node]) for node in nodes if node.op != "output"]
    result = _read(module.graph.output_node().args[0], place)

    def run(given: list[Any]) -> Any:
        values: list[Any] = [None] * len(nodes)
        for node, value in zip(inputs, given, strict=True):
            values[place[node]] = value
        # The loop's own names would keep the last input.
        node = value = None
        given.clear()
        for step in steps:
            step(values)
        return result(values)

    return run


def _step(module: GraphModule, node: Node, place: Mapping[Node, int], dead: Sequence[int]) -> Step:
    def let_go(values: list[Any]) -> None:
        for index in dead:
            values[index] = None

    if node.op == "placeholder":
        return let_go
    here = place[node]
    arguments, keywords = _read(list(node.args), place), _read(dict(node.kwargs), place)
    called = _called(module, node)

    def run_taker(values: list[Any]) -> None:
        given = arguments(values)
        let_go(values)
        result = called(given)
        if here not in dead:
            values[here] = result

    def run(values: list[Any]) -> None:
        values[here] = called(*arguments(values), **keywords(values))
        let_go(values)

    return run_taker if _takes_list(module, node) else run


def _takes_list(module: GraphModule, node: Node) -> bool:
    return node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), TakesList)


def _called(module: GraphModule, node: Node) -> Callable[..., Any]:
    if node.op == "call_module":
        found = module.get_submodule(str(node.target))
        return found.run_list if isinstance(found, TakesList) else found
    if node.op == "get_attr":
        constant = operator.attrgetter(str(node.target))(module)
        return lambda: constant
    if node.op == "call_method":
        return _method(str(node.target))
    assert callable(node.target)
    return node.target


def _method(name: str) -> Callable[..., Any]:
    return lambda value, *arguments, **keywords: getattr(value, name)(*arguments, **keywords)


def _read(value: Any, place: Mapping[Node, int]) -> Read:
    """A function that gives `value` with the nodes in it replaced by their values."""
    if isinstance(value, Node):
        return operator.itemgetter(place[value])
    if isinstance(value, (list, tuple)):
        parts = [_read(part, place) for part in value]
        if isinstance(value, tuple):
            return lambda values: tuple(part(values) for part in parts)
        return lambda values: [part(values) for part in parts]
    if isinstance(value, dict):
        named = {key: _read(part, place) for key, part in value.items()}
        return lambda values: {key: part(values) for key, part in named.items()}
    if isinstance(value, slice):
        bounds = [_read(bound, place) for bound in (value.start, value.stop, value.step)]
        return lambda values: slice(*(bound(values) for bound in bounds))
    return lambda values: value
