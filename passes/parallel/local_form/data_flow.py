"""Check that a parallel block only moves, weights and adds rows outside its experts.

Contract
    in    a block and its local form, which knows the copied nodes of the activation function
    out   the data nodes: nodes of the region whose values depend on rows, weights or expert tensors. All other nodes
          compute indices and sizes. NotThisForm if data is used in another operation, or in the computation of indices

The results are polynomials of the data. Polynomials that are equal on random numbers are equal everywhere, on which
`peer_equivalence.py` relies. This excludes a clamp, for example, which affects large numbers only.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import collective_of
from moepass.passes.graph.nodes import fake_value, several
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ops.traits import MOVES, Trait, base_operation, has_trait, is_view
from moepass.passes.parallel.local_form.local_experts import LocalForm
from moepass.passes.parallel.match.parallel_block import ParallelBlock

# Moves and sums for which growing_sizes.py knows the effect of constants on growing dimensions. This excludes `roll`,
# and views without a trait, such as a diagonal, which may start at any row.
_MOVES_AND_SUMS = (*({*MOVES} - {Trait.ROLL}), Trait.CAST, Trait.WRITE_SUM)


def data_nodes(block: ParallelBlock, local: LocalForm) -> set[Node]:
    """Return the data nodes of the block, sources and expert tensors included. Raises NotThisForm."""
    data = {node for node in block.sources.values() if fake_value(node).is_floating_point()}
    data.update(block.expert_tensors)
    gemms = {gemm.node for gemm in block.gemms}
    weights = {gemm.weights for gemm in block.gemms}
    for node in block.region:
        if has_trait(node, Trait.SIZES_ONLY) or not any(used in data for used in node.all_input_nodes):
            continue
        data.add(node)
        if node in gemms or node in local.copied:
            continue
        if not _moves_or_adds(node):
            raise NotThisForm(
                f"{node.name} ({node.target}) is neither a move nor a sum of rows that moepass knows; "
                "expected rows, weights and outputs to be moved, masked, weighted and added only, outside the experts"
            )
        if any(used in weights for used in node.all_input_nodes):
            if not is_view(node):
                raise NotThisForm(f"{node.name} ({node.target}) reads expert weights, but is not a GEMM")
            weights.add(node)
    _check_readers(block, local, gemms)
    return data


def _moves_or_adds(node: Node) -> bool:
    values = several(fake_value(node))
    if not all(isinstance(item, torch.Tensor) and item.is_floating_point() for item in values):
        return False
    if collective_of(node) is not None or has_trait(node, *_MOVES_AND_SUMS):
        return True
    return base_operation(node) in ("add", "sub", "neg", "mul", "sum", "copy")


def _check_readers(block: ParallelBlock, local: LocalForm, gemms: set[Node]) -> None:
    """Raise NotThisForm if anything but the next GEMMs reads a value inside the activation function."""
    inner = local.copied | local.left_out
    others = set(block.region) - inner - gemms
    for node in inner - {local.end}:
        for user in node.users:
            if user in others and not has_trait(user, Trait.SIZES_ONLY):
                raise NotThisForm(f"{user.name} ({user.target}) reads what its activation function computes")
