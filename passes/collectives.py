"""The functional collectives of a captured graph, as records: what goes in, over which group, what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from moepass.passes.graph import fake_value, is_call

_c10d = torch.ops._c10d_functional

KINDS = {
    _c10d.all_to_all_single.default: "all_to_all",
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_reduce.default: "all_reduce",
}
WAIT = _c10d.wait_tensor.default
# Operators of these libraries exchange data between ranks, or address a process group.
_LIBRARIES = {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective. `result` is what the rest of the graph reads: it, or the last wait for it.

    `receive` and `send` are the split sizes of an AllToAll, numbers or nodes; `reduction` is that of a reduction.
    """

    kind: str
    node: Node
    input: Node
    result: Node
    group_name: str
    receive: tuple[Node | int, ...] = ()
    send: tuple[Node | int, ...] = ()
    reduction: str = ""

    @property
    def is_float(self) -> bool:
        return bool(fake_value(self.input).is_floating_point())


def collective_of(node: Node) -> Collective | None:
    """The collective that `node` is; None where it is none of those that moepass knows."""
    if node.op != "call_function" or node.target not in KINDS:
        return None
    kind = KINDS[node.target]
    values = _arguments(node)
    return Collective(
        kind,
        node,
        values["input"],
        _result(node),
        values["group_name"],
        tuple(values.get("output_split_sizes", ())),
        tuple(values.get("input_split_sizes", ())),
        values.get("reduce_op", ""),
    )


def talks_to_ranks(node: Node) -> bool:
    """True where `node` is a collective, or any other operator between ranks, known or unknown to moepass."""
    if node.op != "call_function" or node.target is WAIT:
        return False
    return getattr(node.target, "namespace", None) in _LIBRARIES


def collectives_of(graph: Graph) -> Iterator[Collective]:
    """In host order."""
    for node in graph.nodes:
        found = collective_of(node)
        if found is not None:
            yield found


def group_names(graph: Graph) -> set[str]:
    """Process groups that the graph talks to."""
    return {collective.group_name for collective in collectives_of(graph)}


def _arguments(node: Node) -> dict[str, Any]:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _result(node: Node) -> Node:
    """The last of a chain of waits (torch waits for some results twice), and of a copy into memory that was given."""
    while True:
        onwards = [user for user in node.users if is_call(user, WAIT) or _is_copy_of(user, node)]
        if len(onwards) != 1 or len(node.users) != 1:
            return node
        (node,) = onwards


def _is_copy_of(node: Node, source: Node) -> bool:
    """`copy_` of a result that torch.distributed was asked to write in place: the same values."""
    if not is_call(node, torch.ops.aten.copy.default) or node.args[1] is not source:
        return False
    copied, original = fake_value(node), fake_value(source)
    return bool(copied.dtype == original.dtype and str(copied.shape) == str(original.shape))
