"""Which values Inductor writes to memory, and when.

A model of `torch._inductor.lowering` and its scheduler, after their rules as of torch 2.13, not a run of them:

    pointwise values, copies and lookups are computed by what reads them
    written are: results of the graph; operands and results of what Inductor calls, as GEMMs, attention and sorts;
        reductions; a value with several readers that reads more than a few others, or takes an exponential
    values of equal sizes that are computed of the same ones are written by one kernel, as soon as the first is needed
    what is computed or reduced between two calls runs as one kernel
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value, is_view
from moepass.passes.graph.operations import base_operation
from moepass.passes.memory.value_bytes import elements

# torch._inductor.config.realize_reads_threshold
_MOST_READS = 4
_COMPUTED = frozenset({
    "_to_copy", "arange", "clone", "constant_pad_nd", "convert_element_type", "embedding", "expand_copy", "fill",
    "full", "full_like", "gather", "index", "index_select", "iota", "lift_fresh_copy", "masked_fill", "new_full",
    "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor", "select_scatter", "slice_scatter", "tril", "triu",
    "where", "zeros", "zeros_like", "rsub", "repeat", "flip", "roll", "silu", "gelu", "_unsafe_index", "unsafe_index",
})  # fmt: skip
# Written to memory by a kernel of Inductor's own, not by a call: reductions, and what others write their results into.
_WRITTEN = frozenset({
    "amax", "amin", "sum", "mean", "prod", "any", "all", "var", "var_mean", "std", "argmax", "argmin", "max", "min",
    "cat", "cumsum", "_softmax", "_log_softmax", "logsumexp", "native_layer_norm", "_fused_rms_norm",
    "linalg_vector_norm",
})  # fmt: skip
_EXPENSIVE = frozenset({"exp", "sigmoid", "silu"})


def is_computed(node: Node) -> bool:
    """True for pointwise values, copies and lookups: each element is computed of some others."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(fake_value(node), torch.Tensor):
        return False
    return not target._schema.is_mutable and (torch.Tag.pointwise in target.tags or base_operation(node) in _COMPUTED)


def is_kernel(node: Node) -> bool:
    """True for what Inductor writes code for; everything else is called."""
    return is_computed(node) or base_operation(node) in _WRITTEN


@dataclasses.dataclass(frozen=True)
class Fusion:
    """`hidden` are never in memory; `with_first` are written together with the node that each of them stands at."""

    hidden: frozenset[Node]
    with_first: Mapping[Node, tuple[Node, ...]]


NO_FUSION = Fusion(frozenset(), {})


def fusion_of(nodes: Sequence[Node]) -> Fusion:
    """What Inductor makes of the nodes of a segment."""
    hidden: set[Node] = set()
    # For values that are computed where they are read: what is read then.
    reads: dict[Node, frozenset[Node]] = {}
    kernels: dict[tuple[frozenset[Node], str], list[Node]] = {}
    for node in nodes:
        if is_view(node):
            reads[node] = _all_reads(node, reads)
        elif is_computed(node):
            read = _all_reads(node, reads)
            readers = _readers(node)
            is_called_on = any(not is_kernel(reader) for reader in readers)
            is_shared = len(readers) > 1
            if is_called_on or (is_shared and (len(read) > _MOST_READS or base_operation(node) in _EXPENSIVE)):
                kernels.setdefault((read, str(elements(fake_value(node)))), []).append(node)
            else:
                hidden.add(node)
                reads[node] = read
    return Fusion(frozenset(hidden), {first: tuple(others) for first, *others in kernels.values() if others})


def _all_reads(node: Node, reads: Mapping[Node, frozenset[Node]]) -> frozenset[Node]:
    return frozenset().union(*(reads.get(used, frozenset({used})) for used in node.all_input_nodes))


def _readers(node: Node) -> set[Node]:
    """Who reads `node`, directly or through views; the graph's output too."""
    found: set[Node] = set()
    for user in node.users:
        found |= _readers(user) if is_view(user) and user.op == "call_function" else {user}
    return found
