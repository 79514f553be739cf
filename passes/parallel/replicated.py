"""Tell whether a value of a graph is the same on all ranks, and what that takes.

Masked experts whose results are added up (AllReduce) are the model's sum only where every rank has the same tokens,
with the same experts and weights. That cannot be seen on one rank. What one rank can say is how the value is computed:

    a digest     of every operator and constant on the way from the graph's inputs; ranks compare digests
    the inputs   that it is computed from; ranks compare their contents when the graph runs first
    the writes   of the graph to these inputs, as the bias that balances experts: what a later run finds in them is
                 computed alike too, from inputs that are among those compared

What ranks add up or gather among themselves, and complete banks, are the same on all of them whatever they are made of.
What ranks send to each other is not.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from moepass.passes.blocks.lower_complete_experts import COMPLETE_EXPERTS, Completion
from moepass.passes.graph.canonical_text import describe_constant, describe_target
from moepass.passes.graph.collectives import communication_of
from moepass.passes.graph.contents import inputs_read, is_uninitialised
from moepass.passes.graph.known_operators import why_not_pure
from moepass.passes.graph.nodes import constant_of, fake_value, map_nodes
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import input_name, named, source_line
from moepass.passes.graph.written_inputs import writes_to_inputs
from moepass.passes.ir.slot_operations import gather
from moepass.passes.ops.walk import walk

# Their results are the same on all ranks of their group.
_EQUALISING = {f"_c10d_functional.{kind}.default" for kind in ("all_reduce", "all_gather_into_tensor", "broadcast")}


@dataclasses.dataclass(frozen=True)
class Origin:
    """How some values of a graph are computed: equal `digest`s and equal contents of `inputs` make them equal."""

    digest: str
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Way:
    """The nodes on the way to `ends`, as far as they are on no way before it, in host order.

    `written` is the input that `ends` are written to, None for values that were asked for. `read` are nodes whose
    contents matter.
    """

    written: Node | None
    ends: tuple[Node, ...]
    nodes: tuple[Node, ...]
    read: frozenset[Node]


class ReplicatedValues:
    """The origins of values in one graph, for the ranks of one process group.

    What stands before a node whose origin was asked for must not change any more.
    """

    def __init__(self, graph: Graph, group_name: str) -> None:
        self._group_name = group_name
        self._digests: dict[Node, str] = {}
        self._writes = writes_to_inputs(graph)
        self._place_of_input = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}

    def origin(self, nodes: Sequence[Node]) -> Origin:
        """That of `nodes` together. Raises NotThisForm where they depend on what each rank has for itself."""
        ways = list(self._ways(nodes))
        read = {node for way in ways for node in way.read}
        for way in ways:
            for node in way.nodes:
                self._check_equal(node, node in read, way)
        texts = [self._digest(node) for node in nodes]
        for way in ways[1:]:
            texts += [f"{self._described_write(way)} {self._digest(node)}" for node in way.ends]
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        return Origin(digest, tuple(node.name for way in ways for node in way.nodes if node.op == "placeholder"))

    def lines(self, nodes: Sequence[Node]) -> list[str]:
        """The lines that `origin` is a digest of, one for each operation in host order, for people to compare."""
        names: dict[Node, str] = {}
        lines = []
        for way in self._ways(nodes):
            begins = "" if way.written is None else f"what is written to {input_name(way.written)}: "
            for node in way.nodes:
                names[node] = f"%{len(names)}"
                line = source_line(node)
                lines.append(begins + self._describe(node, names) + (f" ({line})" if line else ""))
        return lines

    def _check_equal(self, node: Node, is_read: bool, way: _Way) -> None:
        """Raises NotThisForm where ranks may have different contents of `node`, whatever they have of its inputs."""
        if self._is_equal_by_itself(node):
            return
        reason = why_not_pure(node)
        if is_uninitialised(node):
            reason = "gives memory that nothing was written to; fill all of it" if is_read else None
        elif communication_of(node) is not None or node.target is COMPLETE_EXPERTS:
            reason = "whose results differ by rank"
        if reason is not None:
            which = "" if reason.startswith("whose ") else "which "
            written = ""
            if way.written is not None:
                written = f", by what is written to {named(way.written)} at {named(way.ends[-1])} for later runs"
            raise NotThisForm(
                "its results are summed over ranks, so all must have the same tokens, but these depend on "
                f"{named(node)}, {which}{reason}{written}"
            )

    def _ways(self, nodes: Sequence[Node]) -> Iterator[_Way]:
        """That to `nodes`, and those to what the graph writes to inputs that are on a way."""
        pending: list[tuple[Node | None, tuple[Node, ...]]] = [(None, tuple(nodes))]
        told: set[Node] = set()
        while pending:
            written, ends = pending.pop(0)
            on_the_way, read = self._on_the_way(ends)
            fresh = tuple(node for node in on_the_way if node not in told)
            told.update(fresh)
            pending += [(node, self._writes[node]) for node in fresh if node in self._writes]
            yield _Way(written, ends, fresh, frozenset(read))

    def _described_write(self, way: _Way) -> str:
        assert way.written is not None
        return f"written to input {self._place_of_input[way.written]}"

    def _on_the_way(self, nodes: Sequence[Node]) -> tuple[list[Node], set[Node]]:
        """`nodes` and what they are computed from, in host order, and those whose contents matter among them.

        As far as it need not be equal on all ranks for another reason.
        """
        on_the_way, read = sorted(walk(nodes, self._sources)), set(nodes)
        for node in on_the_way:
            if not self._is_equal_by_itself(node):
                read.update(inputs_read(node)[0])
        return on_the_way, read

    def _sources(self, node: Node) -> list[Node]:
        if self._is_equal_by_itself(node):
            return []
        read, sized = inputs_read(node)
        known = {_sizes_of(used) for used in read}
        return read + [used for used in sized if not _has_constant_sizes(used) and _sizes_of(used) not in known]

    def _is_equal_by_itself(self, node: Node) -> bool:
        """Whatever it is made of: complete banks, and what the ranks of the group add up or gather."""
        if node.target is COMPLETE_EXPERTS:
            return Completion.of(node).group_name == self._group_name
        return node.target is gather or (self._names_group(node) and str(node.target) in _EQUALISING)

    def _names_group(self, node: Node) -> bool:
        return self._group_name in (*node.args, *node.kwargs.values())

    def _digest(self, node: Node) -> str:
        """Of how `node` is computed: that of its text, in which the digests of others stand for them."""
        if node not in self._digests:
            for used in sorted(walk([node], self._sources, lambda used: used not in self._digests)):
                text = self._describe(used, self._digests)
                self._digests[used] = hashlib.sha256(text.encode()).hexdigest()
        return self._digests[node]

    def _describe(self, node: Node, names: dict[Node, str]) -> str:
        if node.op == "placeholder":
            return f"input {self._place_of_input[node]} {_describe_value(fake_value(node))}"
        if node.op == "get_attr":
            return f"constant {describe_constant(constant_of(node), is_placed=False)}"
        if node.target is gather:
            return f"the complete bank of {node.meta.get('moepass_block')}"
        if self._is_equal_by_itself(node):
            return f"{describe_target(node)} number {self._number_of(node)} of these ranks"
        sources = set(self._sources(node))

        def name(used: Node) -> str:
            return names[used] if used in sources else _describe_value(fake_value(used))

        arguments = map_nodes((node.args, node.kwargs), name)
        return f"{describe_target(node)} {_without_device_numbers(arguments)}"

    def _number_of(self, node: Node) -> int:
        """Which of the group's calls of its kind in the graph: ranks that run the same graph make them in one order."""
        calls = node.graph.find_nodes(op="call_function", target=node.target)
        return sum(1 for other in calls if other < node and self._names_group(other))


def _sizes_of(node: Node) -> str:
    value = fake_value(node)
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else ""


def _has_constant_sizes(node: Node) -> bool:
    return all(isinstance(size, int) for size in fake_value(node).shape)


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = [str(size) if isinstance(size, int) else "?" for size in value.shape]
        return f"{value.dtype} [{', '.join(sizes)}] on {value.device.type}"
    return type(value).__name__


def _without_device_numbers(arguments: Any) -> Any:
    """Ranks compute on devices of their own."""
    if isinstance(arguments, torch.device):
        return arguments.type
    if isinstance(arguments, dict):
        return {name: _without_device_numbers(value) for name, value in arguments.items()}
    if isinstance(arguments, (list, tuple)):
        return [_without_device_numbers(value) for value in arguments]
    return arguments
