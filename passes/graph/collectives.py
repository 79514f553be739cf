"""Communication with other ranks in a captured graph, as records.

A `Collective` is one of the functional collectives that moepass can reason about: what goes in, over which group, what
comes out. A `Communication` is any node that talks to other ranks, those that moepass cannot take out included.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from moepass.passes.graph.node_arguments import named_arguments
from moepass.passes.graph.nodes import fake_value, is_call

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
    """A node that talks to other ranks, or hides whether it does. `kind` is a word for what it does.

    `group_name` is empty where the operator does not say it.
    """

    node: Node
    kind: str
    group_name: str

    @property
    def is_exchange(self) -> bool:
        """True for what a model has for the sake of its experts, wherever it stands; sums and gathers serve others."""
        return self.kind in _EXCHANGES


EXPERTS_INSIDE = "experts in one operator"
_EXCHANGES = {"all_to_all", "dispatch", "combine", EXPERTS_INSIDE}
_LIBRARIES = {
    "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem",
}  # fmt: skip
_OWN_RANK_ALONE = {
    "wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group", "memset32_",
    "stream_write_value32_", "_async_input_mm", "_rendezvous",
}  # fmt: skip
# Operators of these have a meaning of their own here, whatever they are called.
_NO_COMMUNICATION = {"aten", "prims", "prim", "moepass", "transformers", "inductor"}
_GROUP_ARGUMENTS = ("group_name", "process_group", "group", "pg")
_WORDS = {
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
    """The communication of `node` with other ranks; None if it has none, or only waits for an answer."""
    known = collective_of(node)
    if known is not None:
        return Communication(node, known.kind, known.group_name)
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    library, name = node.target.namespace, node.target._schema.name.split("::")[-1]
    if library in _NO_COMMUNICATION or (library in _LIBRARIES and name in _OWN_RANK_ALONE):
        return None
    kind = next((kind for kind, words in _WORDS.items() if re.search(words, name)), "")
    group = _group_argument(node)
    if library not in _LIBRARIES and not kind and group is None:
        return None
    return Communication(node, kind or name, group if isinstance(group, str) else "")


def _group_argument(node: Node) -> object:
    values = named_arguments(node)
    return next((values[name] for name in _GROUP_ARGUMENTS if name in values), None)


def communications_of(graph: Graph) -> Iterator[Communication]:
    """All communication of the graph, in host order."""
    for node in graph.nodes:
        found = communication_of(node)
        if found is not None:
            yield found


def group_names(graph: Graph) -> set[str]:
    """Process groups that the graph talks to."""
    return {found.group_name for found in communications_of(graph) if found.group_name}


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
