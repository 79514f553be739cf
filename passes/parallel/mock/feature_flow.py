"""Check that a parallel block treats all features alike, so that a proof for a few features holds for all.

Contract
    in    a block, the local form that was written for it, and its data nodes (data_flow.py)
    out   None if the block treats all features of a row alike; else the first node that may not

Features are the last dimension of rows. Outside the GEMMs the block may only move, scale and add entire rows, without
lookups, slices, pads or sums along the last dimension, and without masks or indices that vary along it. The activation
function between GEMMs may mix features, since the local form repeats it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import collective_of
from moepass.passes.graph.nodes import fake_value, several
from moepass.passes.ops.arguments import all_arguments, permutation
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.parallel.local_form.local_experts import LocalForm
from moepass.passes.parallel.match.parallel_block import ParallelBlock
from moepass.passes.rows.row_rules import is_flat


def feature_dependent_node(block: ParallelBlock, local: LocalForm, data: set[Node]) -> Node | None:
    """Return the first node of the block that may treat features differently, or None."""
    weights = {gemm.weights for gemm in block.gemms}
    gemms = {gemm.node for gemm in block.gemms}
    # Nodes whose last dimension has features that were treated alike, or equal values.
    alike = {node for role, node in block.sources.items() if role in ("rows", "hidden")}
    alike.update(node for node in block.expert_tensors if node not in weights)
    for node in block.region:
        if any(used in weights for used in node.all_input_nodes) and node not in gemms:
            weights.add(node)
        elif node in gemms or node in local.copied:
            alike.add(node)
        elif node in local.left_out:
            if not all(used in alike or _is_by_row(used, node) for used in node.all_input_nodes):
                return node
            alike.add(node)
        elif has_trait(node, Trait.FILL, Trait.FILL_LIKE, Trait.EMPTY):
            alike.add(node)
        elif has_trait(node, Trait.SIZES_ONLY):
            continue
        elif any(used in alike for used in node.all_input_nodes):
            if _treats_alike(node, alike):
                alike.add(node)
            elif node in data:
                return node
    return None if block.sink in alike else block.sink


def _is_by_row(mask: Node, masked: Node) -> bool:
    """Return whether all elements of each row of the mask are equal."""
    value = fake_value(mask)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return True
    return value.dim() == fake_value(masked).dim() and all(is_flat(mask, dim) for dim in range(1, value.dim()))


def _treats_alike(node: Node, alike: set[Node]) -> bool:
    """Return whether `node`, which has operands of rows, treats all of their features alike."""

    def is_alike(used: Any) -> bool:
        """Return whether the features of an operand were treated alike, or are equal."""
        value = fake_value(used) if isinstance(used, Node) else None
        return used in alike or not isinstance(value, torch.Tensor) or value.dim() == 0 or is_flat(used, -1)

    if collective_of(node) is not None or has_trait(node, Trait.WAIT, Trait.ITEM):
        return True
    arguments = all_arguments(node)
    if has_trait(node, Trait.ELEMENTWISE):
        return all(map(is_alike, node.all_input_nodes))
    if has_trait(node, Trait.RESHAPE, Trait.EXPAND):
        return _keeps_width(node)
    is_along = has_trait(node, Trait.ALONG, Trait.TOGETHER, Trait.SLICE_WRITE)
    if is_along or base_operation(node) in ("index_select", "index_add", "index_copy"):
        index = arguments.get("index")
        # An index with as many dimensions as the rows must be the same for all features.
        by_row = not isinstance(index, Node) or not has_trait(node, Trait.TOGETHER)
        by_row = by_row or (is_alike(index) and _keeps_width(node))
        operands = (used for used in node.all_input_nodes if used is not index)
        return by_row and _not_along_last(node, arguments) and all(map(is_alike, operands))
    if has_trait(node, Trait.LOOKUP, Trait.WRITE):
        indices, rows = arguments["indices"], arguments["self"]
        keeps_last = len(indices) < fake_value(rows).dim() or indices[-1] is None
        return keeps_last and is_alike(rows) and is_alike(arguments.get("values"))
    if has_trait(node, Trait.PAD):
        return all(isinstance(size, int) and size == 0 for size in arguments["pad"][:2])
    if has_trait(node, Trait.REPEAT):
        return isinstance(arguments["repeats"][-1], int) and arguments["repeats"][-1] == 1
    if has_trait(node, Trait.PERMUTE):
        order = permutation(node)
        return order[-1] == len(order) - 1
    return False


def _keeps_width(node: Node) -> bool:
    """Return whether the last dimension keeps its size."""
    before, after = fake_value(node.all_input_nodes[0]), fake_value(node)
    widths = [value.shape[-1] if value.dim() else 0 for value in (before, after)]
    return all(isinstance(width, int) for width in widths) and widths[0] == widths[1]


def _not_along_last(node: Node, arguments: dict[str, Any]) -> bool:
    dims = arguments.get("dims", arguments.get("dim"))
    if dims is None or dims == []:
        return False  # along all dimensions
    # `stack` counts dimensions of its result.
    number = fake_value(node if base_operation(node) == "stack" else node.all_input_nodes[0]).dim()
    return all(isinstance(dim, int) and dim % number != number - 1 for dim in several(dims))
