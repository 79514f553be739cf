"""Distinction of pure operators, whose results depend only on their arguments, from those that may compute anything.

Equal operator names prove that ranks compute the same only for pure operators. An operator that a model registers may
keep a state, query its rank or read a file.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from moepass.passes.graph.collectives import communication_of
from moepass.passes.graph.contents import is_uninitialised
from moepass.passes.graph.nodes import constant_of
from moepass.passes.ir.slot_operations import gather
from moepass.passes.ops.traits import draws_random_numbers

_PURE_LIBRARIES = {"aten", "prims", "moepass"}
_PURE_OPERATORS = {
    "transformers::grouped_mm_fallback",
    "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd",
}  # fmt: skip
_READ_FROM_FILES = {"aten::from_file"}
# These read elements by their positions in memory, which depend on the strides of the tensor.
_READ_MEMORY = {"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter", "aten::_reshape_alias"}
# These depend on the step that runs on their rank, which is not an argument.
_READ_THE_STEP = {"moepass::trie_attention"}
# These run graphs, which are checked too.
_RUN_GRAPHS = {"cond", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention", "invoke_subgraph"}
# Modules of functions on numbers, and of getitem.
_PURE_MODULES = {"_operator", "math", "builtins"}


def why_not_pure(node: Node) -> str | None:
    """Return why results of `node`, or of a graph that it runs, may differ for equal inputs; None if they cannot.

    Collectives and uninitialised memory are checked only inside graphs that `node` runs. Outside of these, the callers
    check them.
    """
    if node.op in ("placeholder", "get_attr", "output"):
        return None
    if draws_random_numbers(node):
        return "draws random numbers; call model.eval(), or draw them outside the model and pass them in"
    if not _is_known(node):
        return (
            "is an operator that moepass does not know, so ranks may compute different results; write it in PyTorch "
            "operators, or sum, gather or broadcast its result over the group"
        )
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _READ_THE_STEP:
        return "computes over the trie of a step, which differs between ranks"
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _READ_MEMORY:
        return (
            "reads elements by their position in memory, whose layout may differ between ranks; use views that name "
            "dimensions"
        )
    for inner in _nodes_run_by(node):
        reason = why_not_pure(inner)
        if reason is None and communication_of(inner) is not None:
            reason = "communicates with other ranks; keep collectives out of branches and loops"
        if reason is None and is_uninitialised(inner):
            reason = "returns uninitialised memory; fill it"
        if reason is not None:
            return f"runs {inner.target}, which {reason}"
    return None


def _is_known(node: Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return name in _PURE_OPERATORS or (target.namespace in _PURE_LIBRARIES and name not in _READ_FROM_FILES)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() in _RUN_GRAPHS
    is_of_sizes = getattr(target, "__module__", "") == "torch" and target.__name__.lstrip("_").startswith("sym_")  # type: ignore[union-attr]
    return target is gather or is_of_sizes or getattr(target, "__module__", "") in _PURE_MODULES


def _nodes_run_by(node: Node) -> Iterator[Node]:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        for used in node.all_input_nodes:
            if used.op == "get_attr" and isinstance(graph := constant_of(used), GraphModule):
                yield from graph.graph.nodes
