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

import operator

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import WAIT, collective_of
from moepass.passes.graph.nodes import fake_value, is_call, is_view
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.parallel.local_form.local_experts import LocalForm
from moepass.passes.parallel.match.parallel_block import ParallelBlock

aten, prims = torch.ops.aten, torch.ops.prims

# Read the shape or the type of what they are given, and none of its values.
SHAPE_READERS = {
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int,
}  # fmt: skip

_MOVES = {
    aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.gather.default,
    aten.index_put.default, aten._unsafe_index_put.default, aten.index_copy.default, aten.scatter.src,
    aten.scatter.value, aten.slice_scatter.default, aten.select_scatter.default, aten.cat.default, aten.stack.default,
    aten.constant_pad_nd.default, aten.repeat.default, aten.flip.default, aten.clone.default, aten.copy.default,
    aten._to_copy.default, prims.convert_element_type.default, aten.masked_fill.Scalar, aten.where.self,
    aten.where.ScalarSelf, aten.where.ScalarOther, operator.getitem,
}  # fmt: skip
_SUMS = {
    aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.mul.Tensor, aten.mul.Scalar, aten.sum.default,
    aten.sum.dim_IntList, aten.scatter_add.default, aten.index_add.default,
}  # fmt: skip
# Views of which it is known what constants do to dimensions that grow (growing_sizes.py). Others, as a diagonal
# or a window, may begin at any number of rows.
_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.alias.default,
    aten.detach.default, operator.getitem,
}  # fmt: skip


def data_nodes(block: ParallelBlock, local: LocalForm) -> set[Node]:
    """The data of the block's region. Raises NotThisForm."""
    data = {node for node in block.sources.values() if fake_value(node).is_floating_point()}
    data.update(block.expert_tensors)
    gemms = {gemm.node for gemm in block.gemms}
    weights = {gemm.weights for gemm in block.gemms}
    for node in block.region:
        if is_call(node, *SHAPE_READERS) or not any(used in data for used in node.all_input_nodes):
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
    value = fake_value(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(item, torch.Tensor) and item.is_floating_point() for item in values):
        return False
    if collective_of(node) is not None or is_call(node, WAIT, *_MOVES, *_SUMS):
        return True
    return is_call(node, *_VIEWS)


def _check_readers(block: ParallelBlock, local: LocalForm, gemms: set[Node]) -> None:
    """The activation function is copied, whatever it computes, so only the GEMMs after it may read its values."""
    region, inside = set(block.region), local.copied | local.left_out
    for node in inside - {local.end}:
        for user in node.users:
            if user in region and user not in inside and user not in gemms and not is_call(user, *SHAPE_READERS):
                raise NotThisForm(f"{user.name} ({user.target}) reads what its activation function computes")
