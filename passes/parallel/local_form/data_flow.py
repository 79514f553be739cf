"""Operations on rows and outputs beside the experts of a parallel block: move, weigh, add up.

Contract
    in    a block, and the local form that was written for it, which tells what of the experts it copied
    out   the nodes of the region whose values depend on rows, weights or expert tensors, the data; all others compute
          places and sizes
          NotThisForm, naming the node, where data is computed with in any other way or decides about places

Results of these operations are polynomials of the data. Where two of them are equal on random numbers they are equal on
all, which is what `peer_equivalence.py` builds on. A clamp, for one, would act on large numbers only.
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

# Moves and sums of which it is known what constants do to dimensions that grow (growing_sizes.py): not `roll`. Views
# without a trait, as a diagonal or a window, may begin at any number of rows.
_MOVES_AND_SUMS = (*({*MOVES} - {Trait.ROLL}), Trait.CAST, Trait.WRITE_SUM)


def data_nodes(block: ParallelBlock, local: LocalForm) -> set[Node]:
    """The data of the block's region. Raises NotThisForm."""
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
                "expected rows, weights and outputs to be moved, masked, weighed and added only, beside the experts"
            )
        if any(used in weights for used in node.all_input_nodes):
            if not is_view(node):
                raise NotThisForm(f"{node.name} ({node.target}) reads expert weights and is no GEMM with them")
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
    """Raise NotThisForm if anything but the GEMMs after it reads the activation function, which is copied unread."""
    region, inside = set(block.region), local.copied | local.left_out
    for node in inside - {local.end}:
        for user in node.users:
            if user in region and user not in inside and user not in gemms and not has_trait(user, Trait.SIZES_ONLY):
                raise NotThisForm(f"{user.name} ({user.target}) reads what its activation function computes")
