"""Origins of values that must be the same on all ranks.

Experts whose results are all-reduced compute the model's sum only if every rank has the same tokens, with the same
experts and weights. One rank cannot check this, but it can describe how it computes the values:

    digest   of every operator and constant between the graph's inputs and the values; ranks compare digests
    inputs   from which the values are computed; ranks compare their contents in the first run of the graph
    writes   of the graph to these inputs, such as a bias that balances experts; they are part of the digest, and the
             inputs from which they are computed are compared too, so that later runs read the same values

Results of all-reduce, all-gather and broadcast, and complete banks, are the same on all ranks for any inputs.
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
from moepass.passes.graph.nodes import constant_of, fake_value
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import describe_shape, input_name, named, source_line
from moepass.passes.graph.written_inputs import writes_to_inputs
from moepass.passes.ir.slot_operations import gather
from moepass.passes.ops.walk import walk

# Operators whose results are the same on all ranks of their group.
_EQUALISING = {f"_c10d_functional.{kind}.default" for kind in ("all_reduce", "all_gather_into_tensor", "broadcast")}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of some values of a graph. Equal `digest`s and equal contents of `inputs` make the values equal."""

    digest: str
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Path:
    """The nodes on all paths to `ends`, in host order, without those on earlier paths.

    `written` is the input to which `ends` are written, or None.
    """

    written: Node | None
    ends: tuple[Node, ...]
    nodes: tuple[Node, ...]


class ReplicatedValues:
    """Origins of values in one graph, for the ranks of one process group. Nodes before them must not change."""

    def __init__(self, graph: Graph, group_name: str) -> None:
        self._group_name = group_name
        self._digests: dict[Node, str] = {}
        self._writes = writes_to_inputs(graph)
        self._input_indices = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}

    def origin(self, nodes: Sequence[Node]) -> Origin:
        """Return the origin of `nodes`. Raises NotThisForm if they depend on values that may differ between ranks."""
        paths = list(self._paths(nodes))
        # Nodes whose contents matter.
        read = {node for path in paths for node in path.ends}
        for path in paths:
            for node in path.nodes:
                if not self._is_equal_by_itself(node):
                    read.update(inputs_read(node)[0])
        for path in paths:
            for node in path.nodes:
                self._check_equal(node, node in read, path)
        texts = [self._digest(node) for node in nodes]
        for path in paths[1:]:
            assert path.written is not None
            index = self._input_indices[path.written]
            texts += [f"written to input {index} {self._digest(node)}" for node in path.ends]
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        return Origin(digest, tuple(node.name for path in paths for node in path.nodes if node.op == "placeholder"))

    def lines(self, nodes: Sequence[Node]) -> list[str]:
        """Return the text of which `origin` has a digest, a line for each operation in host order, for people."""
        names: dict[Node, str] = {}
        lines = []
        for path in self._paths(nodes):
            prefix = "" if path.written is None else f"what is written to {input_name(path.written)}: "
            for node in path.nodes:
                names[node] = f"%{len(names)}"
                line = source_line(node)
                lines.append(prefix + self._describe(node, names) + (f" ({line})" if line else ""))
        return lines

    def _check_equal(self, node: Node, is_read: bool, path: _Path) -> None:
        """Raise NotThisForm if contents of `node` may differ between ranks that have the same inputs of it."""
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
            if path.written is not None:
                written = f", by what is written to {named(path.written)} at {named(path.ends[-1])} for later runs"
            raise NotThisForm(
                "its results are summed over ranks, so all must have the same tokens, but these depend on "
                f"{named(node)}, {which}{reason}{written}"
            )

    def _paths(self, nodes: Sequence[Node]) -> Iterator[_Path]:
        """Yield the path to `nodes`, and those to the graph's writes to inputs that they read."""
        visited: set[Node] = set()

        def path_to(ends: Sequence[Node], written: Node | None = None) -> _Path:
            fresh = [node for node in sorted(walk(ends, self._sources)) if node not in visited]
            visited.update(fresh)
            return _Path(written, tuple(ends), tuple(fresh))

        def writes_on(path: _Path) -> list[_Path]:
            return [path_to(self._writes[node], node) for node in path.nodes if node in self._writes]

        return walk([path_to(nodes)], writes_on)

    def _sources(self, node: Node) -> list[Node]:
        if self._is_equal_by_itself(node):
            return []
        read, sized = inputs_read(node)
        read_sizes = {_sizes_of(used) for used in read}
        unknown = (used for used in sized if not all(isinstance(size, int) for size in fake_value(used).shape))
        return read + [used for used in unknown if _sizes_of(used) not in read_sizes]

    def _is_equal_by_itself(self, node: Node) -> bool:
        """Return whether the result is equal on all ranks for any inputs, as that of an all-reduce."""
        if node.target is COMPLETE_EXPERTS:
            return Completion.of(node).group_name == self._group_name
        return node.target is gather or (self._names_group(node) and str(node.target) in _EQUALISING)

    def _names_group(self, node: Node) -> bool:
        return self._group_name in (*node.args, *node.kwargs.values())

    def _digest(self, node: Node) -> str:
        """Return the digest of the text of `node`, in which the digests of its inputs replace their names."""
        if node not in self._digests:
            for used in sorted(walk([node], self._sources, lambda used: used not in self._digests)):
                text = self._describe(used, self._digests)
                self._digests[used] = hashlib.sha256(text.encode()).hexdigest()
        return self._digests[node]

    def _describe(self, node: Node, names: dict[Node, str]) -> str:
        if node.op == "placeholder":
            return f"input {self._input_indices[node]} {_describe_value(fake_value(node))}"
        if node.op == "get_attr":
            return f"constant {describe_constant(constant_of(node), is_placed=False)}"
        if node.target is gather:
            return f"the complete bank of {node.meta.get('moepass_block')}"
        if self._is_equal_by_itself(node):
            # All ranks make the calls of one operator in one order.
            calls = node.graph.find_nodes(op="call_function", target=node.target)
            number = sum(1 for call in calls if call < node and self._names_group(call))
            return f"{describe_target(node)} number {number} of these ranks"
        sources = set(self._sources(node))

        def describe_argument(argument: Any) -> Any:
            if isinstance(argument, torch.device):
                return argument.type  # the indices of ranks' devices differ
            if isinstance(argument, Node):
                return names[argument] if argument in sources else _describe_value(fake_value(argument))
            return argument

        arguments = torch.fx.node.map_aggregate((node.args, node.kwargs), describe_argument)
        return f"{describe_target(node)} {arguments}"


def _sizes_of(node: Node) -> str:
    value = fake_value(node)
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else ""


def _describe_value(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    return f"{describe_shape(value)} on {value.device.type}" if is_tensor else type(value).__name__
