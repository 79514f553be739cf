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
from moepass.passes.ops.traits import Trait, base_operation, has_trait, is_view

# torch._inductor.config.realize_reads_threshold
_MOST_READS = 4
_COMPUTED = (
    *(Trait.ELEMENTWISE, Trait.FILL, Trait.FILL_LIKE, Trait.ARANGE, Trait.LOOKUP, Trait.SLICE_WRITE, Trait.PAD),
    *(Trait.REFILL, Trait.REPEAT, Trait.FLIP, Trait.ROLL),
)
# Written to memory by generated code, not by extern kernels: reductions, and buffers that other kernels write into.
_WRITTEN = (Trait.REDUCE, Trait.SCAN, Trait.NORM, Trait.JOIN)


def is_computed(node: Node) -> bool:
    """Return whether `node` is pointwise, a copy or a lookup, so that each element is computed from a few others."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(fake_value(node), torch.Tensor):
        return False
    is_other = base_operation(node) in ("embedding", "expand_copy", "rsub", "tril", "triu", "unsafe_index")
    return not target._schema.is_mutable and (is_other or has_trait(node, *_COMPUTED))


def is_kernel(node: Node) -> bool:
    """Return whether Inductor generates code for `node`; otherwise it calls an extern kernel."""
    return is_computed(node) or has_trait(node, *_WRITTEN)


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
            if is_called_on or (
                is_shared and (len(read) > _MOST_READS or base_operation(node) in ("exp", "sigmoid", "silu"))
            ):
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
