"""A model of Inductor's fusion: which values it writes to memory, and when.

It follows the rules of `torch._inductor.lowering` and its scheduler as of torch 2.13, without running them:

    pointwise values, copies and lookups are computed by the kernel that reads them
    written are: results of the graph; operands and results of extern kernels, such as GEMMs, attention and sorts;
        reductions; a value with several readers that reads more than a few others, or computes an exponential
    values of equal size that are computed from the same inputs are written by one kernel, when the first is needed
    everything that is computed or reduced between two extern kernels runs as one kernel
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.memory.value_bytes import elements
from moepass.passes.ops.traits import base_operation, is_view

# torch._inductor.config.realize_reads_threshold
_MOST_READS = 4
_COMPUTED = frozenset({
    "_to_copy", "arange", "clone", "constant_pad_nd", "convert_element_type", "embedding", "expand_copy", "fill",
    "full", "full_like", "gather", "index", "index_select", "iota", "lift_fresh_copy", "masked_fill", "new_full",
    "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor", "select_scatter", "slice_scatter", "tril", "triu",
    "where", "zeros", "zeros_like", "rsub", "repeat", "flip", "roll", "silu", "gelu", "_unsafe_index", "unsafe_index",
})  # fmt: skip
# Written to memory by generated code, not by extern kernels: reductions, and buffers that other kernels write into.
_WRITTEN = frozenset({
    "amax", "amin", "sum", "mean", "prod", "any", "all", "var", "var_mean", "std", "argmax", "argmin", "max", "min",
    "cat", "cumsum", "_softmax", "_log_softmax", "logsumexp", "native_layer_norm", "_fused_rms_norm",
    "linalg_vector_norm",
})  # fmt: skip
_EXPENSIVE = frozenset({"exp", "sigmoid", "silu"})


def is_computed(node: Node) -> bool:
    """Return whether `node` is pointwise, a copy or a lookup, so that each element is computed from a few others."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(fake_value(node), torch.Tensor):
        return False
    return not target._schema.is_mutable and (torch.Tag.pointwise in target.tags or base_operation(node) in _COMPUTED)


def is_kernel(node: Node) -> bool:
    """Return whether Inductor generates code for `node`; otherwise it calls an extern kernel."""
    return is_computed(node) or base_operation(node) in _WRITTEN


@dataclasses.dataclass(frozen=True)
class Fusion:
    """The fusion of a segment.

    Attributes:
        hidden: nodes whose values are never in memory
        with_first: for a node, the later nodes that the same kernel writes
    """

    hidden: frozenset[Node]
    with_first: Mapping[Node, tuple[Node, ...]]


NO_FUSION = Fusion(frozenset(), {})


def fusion_of(nodes: Sequence[Node]) -> Fusion:
    """Return how Inductor fuses the nodes of a segment."""
    hidden: set[Node] = set()
    # The values in memory that a fused value reads.
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
    return Fusion(frozenset(hidden), {first: tuple(later) for first, *later in kernels.values() if later})


def _all_reads(node: Node, reads: Mapping[Node, frozenset[Node]]) -> frozenset[Node]:
    return frozenset().union(*(reads.get(used, frozenset({used})) for used in node.all_input_nodes))


def _readers(node: Node) -> set[Node]:
    """Return the nodes that read `node`, directly or through views, including the graph's output."""
    readers: set[Node] = set()
    for user in node.users:
        readers |= _readers(user) if is_view(user) and user.op == "call_function" else {user}
    return readers
