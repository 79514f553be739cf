"""Tell whether a value of a graph is the same on all ranks, and what that takes.

Masked experts whose results are added up (AllReduce) are the model's sum only where every rank has the same tokens,
with the same experts and weights. That cannot be seen on one rank. What one rank can say is how the value is computed:

    a digest     of every operator and constant on the way from the graph's inputs; ranks compare digests
    the inputs   that it is computed from; ranks compare their contents when the graph runs first

What ranks add up or gather among themselves, and complete banks, are the same on all of them whatever they are made of.
What ranks send to each other is not.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.canonical_text import describe_constant
from moepass.passes.collectives import communication_of
from moepass.passes.graph import constant_of, fake_value, map_nodes
from moepass.passes.ir import gather
from moepass.passes.parallel_match import NotThisForm
from moepass.passes.source_lines import named, source_line

# Their results are the same on all ranks of their group.
_EQUALISING = {f"_c10d_functional.{kind}.default" for kind in ("all_reduce", "all_gather_into_tensor", "broadcast")}
_COMPLETE_EXPERTS = "moepass.complete_experts.default"


@dataclasses.dataclass(frozen=True)
class Origin:
    """How some values of a graph are computed: equal `digest`s and equal contents of `inputs` make them equal."""

    digest: str
    inputs: tuple[str, ...]


class ReplicatedValues:
    """The origins of values in one graph, for the ranks of one process group.

    What stands before a node whose origin was asked for must not change any more.
    """

    def __init__(self, graph: Graph, group_name: str) -> None:
        self._group_name = group_name
        self._digests: dict[Node, str] = {}
        self._place_of_input = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}

    def origin(self, nodes: Sequence[Node]) -> Origin:
        """That of `nodes` together. Raises NotThisForm where they depend on what each rank has for itself."""
        inputs: dict[Node, None] = {}
        for node in self._on_the_way(nodes):
            if node.op == "placeholder":
                inputs[node] = None
            elif communication_of(node) is not None and not self._is_equalising(node):
                raise NotThisForm(
                    "its results are summed over ranks, so all must have the same tokens, but these depend on "
                    f"{named(node)}, whose results differ by rank"
                )
        digest = hashlib.sha256("\n".join(self._digest(node) for node in nodes).encode()).hexdigest()
        return Origin(digest, tuple(node.name for node in sorted(inputs, key=self._place_of_input.__getitem__)))

    def lines(self, nodes: Sequence[Node]) -> list[str]:
        """What `origin` is a digest of, one line for each operation in host order, for people to compare."""
        names: dict[Node, str] = {}
        lines = []
        for node in sorted(self._on_the_way(nodes)):
            names[node] = f"%{len(names)}"
            line = source_line(node)
            lines.append(self._describe(node, names) + (f" ({line})" if line else ""))
        return lines

    def _on_the_way(self, nodes: Iterable[Node]) -> list[Node]:
        """`nodes` and what they are computed from, as far as it need not be equal on all ranks for another reason."""
        pending, seen = list(nodes), set(nodes)
        while pending:
            node = pending.pop()
            for used in self._sources(node):
                if used not in seen:
                    seen.add(used)
                    pending.append(used)
        return list(seen)

    def _sources(self, node: Node) -> list[Node]:
        ends_here = node.target is gather or str(node.target) == _COMPLETE_EXPERTS or self._is_equalising(node)
        return [] if ends_here else list(node.all_input_nodes)

    def _is_equalising(self, node: Node) -> bool:
        names_group = self._group_name in (*node.args, *node.kwargs.values())
        return names_group and str(node.target) in _EQUALISING

    def _digest(self, node: Node) -> str:
        """Of how `node` is computed: that of its text, in which the digests of others stand for them."""
        pending = [node]
        while pending:
            current = pending[-1]
            missing = [used for used in self._sources(current) if used not in self._digests]
            if missing:
                pending += missing
                continue
            pending.pop()
            if current not in self._digests:
                text = self._describe(current, self._digests)
                self._digests[current] = hashlib.sha256(text.encode()).hexdigest()
        return self._digests[node]

    def _describe(self, node: Node, names: dict[Node, str]) -> str:
        if node.op == "placeholder":
            return f"input {self._place_of_input[node]} {_describe_value(fake_value(node))}"
        if node.op == "get_attr":
            return f"constant {_describe_constant(constant_of(node))}"
        if node.target is gather:
            return f"the complete bank of {node.meta.get('moepass_block')}"
        if not self._sources(node) and node.all_input_nodes:
            return f"{node.target} number {self._number_of(node)} of group {self._group_name}"
        arguments = map_nodes((node.args, node.kwargs), names.__getitem__)
        return f"{node.target} {_without_device_numbers(arguments)}"

    def _number_of(self, node: Node) -> int:
        """Which of the calls of its kind in the graph: ranks that run the same graph make them in one order."""
        return sum(1 for other in node.graph.find_nodes(op="call_function", target=node.target) if other < node)


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = [str(size) if isinstance(size, int) else "?" for size in value.shape]
        return f"{value.dtype} [{', '.join(sizes)}] on {value.device.type}"
    return type(value).__name__


def _describe_constant(value: object) -> str:
    # A branch or a body that an operator runs has no contents to compare, but code.
    return str(value.graph) if isinstance(value, GraphModule) else describe_constant(value, is_placed=False)


def _without_device_numbers(arguments: Any) -> Any:
    """Ranks compute on devices of their own."""
    if isinstance(arguments, torch.device):
        return arguments.type
    if isinstance(arguments, dict):
        return {name: _without_device_numbers(value) for name, value in arguments.items()}
    if isinstance(arguments, (list, tuple)):
        return [_without_device_numbers(value) for value in arguments]
    return arguments
