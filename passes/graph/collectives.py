"""Records of communication with other ranks in a captured graph.

A `Collective` is a functional collective that moepass can reason about: its input, group and result. A `Communication`
is any node that communicates with other ranks, including those that moepass cannot eliminate.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.arguments import named_arguments

_c10d = torch.ops._c10d_functional

KINDS = {
    _c10d.all_to_all_single.default: "all_to_all",
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_reduce.default: "all_reduce",
}
WAIT = _c10d.wait_tensor.default


@dataclasses.dataclass(frozen=True)
class Collective:
    """One functional collective.

    Attributes:
        result: the node that the graph reads: the collective, or the last wait for it
        receive, send: split sizes of an AllToAll, numbers or nodes
        reduction: the reduction operator, if any
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
        """True for floating-point inputs."""
        return bool(fake_value(self.input).is_floating_point())


def collective_of(node: Node) -> Collective | None:
    """Return the collective that `node` calls, or None if it calls none."""
    if node.op != "call_function" or node.target not in KINDS:
        return None
    kind = KINDS[node.target]
    values = named_arguments(node)
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


@dataclasses.dataclass(frozen=True)
class Communication:
    """A node that communicates with other ranks, or may do so.

    Attributes:
        kind: a word for the operation
        group_name: empty if the operator does not show it
    """

    node: Node
    kind: str
    group_name: str

    @property
    def is_exchange(self) -> bool:
        """True for operations that only experts need; sums and gathers have other uses too."""
        return self.kind in _EXCHANGES


EXPERTS_INSIDE = "experts in one operator"
_EXCHANGES = {"all_to_all", "dispatch", "combine", EXPERTS_INSIDE}
_LIBRARIES = {
    "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem",
}  # fmt: skip
_LOCAL_OPERATORS = {
    "wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group", "memset32_",
    "stream_write_value32_", "_async_input_mm", "_rendezvous",
}  # fmt: skip
# Libraries whose operators do not communicate, even if their names contain one of the words below.
_NO_COMMUNICATION = {"aten", "prims", "prim", "moepass", "transformers", "inductor"}
_GROUP_ARGUMENTS = ("group_name", "process_group", "group", "pg")
_KIND_PATTERNS = {
    "all_to_all": r"all_?to_?all|all2all",
    "all_gather": r"all_?gather",
    "reduce_scatter": r"reduce_?scatter",
    "all_reduce": r"all_?reduce",
    "broadcast": r"broadcast",
    "dispatch": r"(^|_)dispatch",
    "combine": r"(^|_)combine",
    EXPERTS_INSIDE: r"(^|_)(fused_)?(moe|experts?)(_|$)",
}


def communication_of(node: Node) -> Communication | None:
    """Return the communication of `node` with other ranks, or None if it has none or only waits."""
    collective = collective_of(node)
    if collective is not None:
        return Communication(node, collective.kind, collective.group_name)
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    library, name = node.target.namespace, node.target._schema.name.split("::")[-1]
    if library in _NO_COMMUNICATION or (library in _LIBRARIES and name in _LOCAL_OPERATORS):
        return None
    kind = next((kind for kind, words in _KIND_PATTERNS.items() if re.search(words, name)), "")
    group = _group_argument(node)
    if library not in _LIBRARIES and not kind and group is None:
        return None
    return Communication(node, kind or name, group if isinstance(group, str) else "")


def _group_argument(node: Node) -> object:
    values = named_arguments(node)
    return next((values[name] for name in _GROUP_ARGUMENTS if name in values), None)


def communications_of(graph: Graph) -> Iterator[Communication]:
    """Yield all communication of the graph, in host order."""
    for node in graph.nodes:
        communication = communication_of(node)
        if communication is not None:
            yield communication


def group_names(graph: Graph) -> set[str]:
    """Return the names of the process groups of the graph."""
    return {communication.group_name for communication in communications_of(graph) if communication.group_name}


def _result(node: Node) -> Node:
    """Return the last of a chain of waits (torch waits for some results twice) and copies into the output tensor."""
    while True:
        onwards = [user for user in node.users if is_call(user, WAIT) or _is_copy_of(user, node)]
        if len(onwards) != 1 or len(node.users) != 1:
            return node
        (node,) = onwards


def _is_copy_of(node: Node, source: Node) -> bool:
    """Return whether `node` is a `copy_` of a result that torch.distributed wrote in place, with the same values."""
    if not is_call(node, torch.ops.aten.copy.default) or node.args[1] is not source:
        return False
    copied, original = fake_value(node), fake_value(source)
    return bool(copied.dtype == original.dtype and str(copied.shape) == str(original.shape))
