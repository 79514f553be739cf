"""GEMMs of dense experts: products of all positions with the weights of all experts.

batched    bmm([experts, positions, in], [experts, in, out])     or with the weights on the left
wide       mm([positions, in], [in, experts · out])              from einsum("th,ehf->tef")
summed     mm([positions, experts · in], [experts · in, out])    from einsum("tef,efh->th"), a sum over experts
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import sympy
import torch
from torch.fx import Node

from moepass.passes.blocks.expert_gemms import is_expert_weight
from moepass.passes.dense.pair_layouts import Pairs
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.arguments import all_arguments, permutation
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.ops.walk import first_inputs
from moepass.passes.rows.row_layout import Layout, features, regrouped

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class DenseGemm:
    """A GEMM `node` of `rows` and `weights` [experts, ., .], which contracts dimension `inner`, 1 or 2, of the weights.

    `kind` is batched, wide or summed, and `added` is the operand that addmm or baddbmm adds.
    """

    node: Node
    kind: str
    rows: Node
    weights: Node
    inner: int
    weights_on_left: bool
    batch: int
    added: Node | None = None

    @property
    def experts(self) -> int:
        return int(fake_value(self.weights).shape[0])

    @property
    def outer(self) -> int:
        return int(fake_value(self.weights).shape[3 - self.inner])

    @property
    def width(self) -> int:
        """The number of features that one expert contracts."""
        return int(fake_value(self.weights).shape[self.inner])

    @property
    def positions(self) -> sympy.Expr:
        return size_expression(fake_value(self.rows).shape[self.batch + self.weights_on_left])

    def result_layout(self, pairs: Pairs) -> Layout:
        """Return the layout of the result, which has no experts if it is `summed`."""
        columns = {
            "batched": features(self.outer),
            "wide": (*pairs.of_experts, *features(self.outer)),
            "summed": features(self.outer),
        }[self.kind]
        matrix = [pairs.of_positions, columns]
        batch = [pairs.of_experts if self.kind == "batched" else ()] * self.batch
        return Layout((*batch, *(matrix[::-1] if self.weights_on_left else matrix)))

    def rows_layout(self, pairs: Pairs) -> Layout:
        inner = features(self.width)
        if self.kind == "summed":
            inner = (*pairs.of_experts, *inner)
        matrix = [pairs.of_positions, inner]
        batch = [pairs.of_experts if self.kind == "batched" else ()] * self.batch
        return Layout((*batch, *(matrix[::-1] if self.weights_on_left else matrix)))


def dense_gemm(node: Node) -> DenseGemm | None:
    """Return `node` as a GEMM of dense experts, or None."""
    if not is_call(node, aten.bmm.default, aten.baddbmm.default, aten.mm.default, aten.addmm.default):
        return None
    batch = int(has_trait(node, Trait.BATCHED_MATMUL))
    arguments = all_arguments(node)
    left, right = (arguments[name] for name in _names(node))
    added = arguments["self"] if is_call(node, aten.baddbmm.default, aten.addmm.default) else None
    if added is not None and (arguments["beta"] != 1 or arguments["alpha"] != 1):
        return None
    for weight, rows, weights_on_left in ((right, left, False), (left, right, True)):
        for source, labels in _labelled_sources(weight):
            if not is_expert_weight(source):
                continue
            inner, outer = labels[-2:][::-1] if weights_on_left else labels[-2:]
            batch_labels = labels[0] if batch else []
            kind = _kind(batch_labels, inner, outer)
            # Two inputs of the graph, such as the queries and keys of attention, are not weights.
            are_inputs = source.op == "placeholder" and is_expert_weight(_chain(rows)[0])
            if kind is not None and not are_inputs:
                return DenseGemm(node, kind, rows, source, inner[-1], weights_on_left, batch, added)
    return None


def _names(node: Node) -> tuple[str, str]:
    if is_call(node, aten.addmm.default):
        return "mat1", "mat2"
    return ("batch1", "batch2") if is_call(node, aten.baddbmm.default) else ("self", "mat2")


def _kind(batch: list[int], inner: list[int], outer: list[int]) -> str | None:
    if batch == [0] and sorted(inner + outer) == [1, 2] and len(inner) == 1:
        return "batched"
    if not batch and len(inner) == 1 and outer == [0, 3 - inner[0]]:
        return "wide"
    if not batch and len(outer) == 1 and inner == [0, 3 - outer[0]]:
        return "summed"
    return None


def _labelled_sources(node: Node) -> list[tuple[Node, list[list[int]]]]:
    """Return the tensors with the elements of `node`, furthest first, and the labels of its dimensions in each."""
    chain = _chain(node)
    labelled = []
    for start, source in enumerate(chain):
        shape = getattr(fake_value(source), "shape", ())
        are_static = all(isinstance(size, int) and size > 1 for size in shape)
        if are_static and (labels := labels_of_chain(chain[start:])) is not None:
            labelled.append((source, labels))
    return labelled


def _chain(node: Node) -> list[Node]:
    return [*first_inputs(node, _moves)][::-1]


def _moves(node: Node) -> bool:
    """Return whether `node` has the elements of its operand in another order or shape."""
    if is_call(node, aten.expand.default):
        return [*fake_value(node).shape] == [*fake_value(node.all_input_nodes[0]).shape]
    return has_trait(node, Trait.RESHAPE, Trait.COPY, Trait.PERMUTE)


def labels_of_chain(chain: Sequence[Node]) -> list[list[int]] | None:
    """Return the dimensions of the first node, without size 1, in each dimension of the last; None if one is split."""
    shape = fake_value(chain[0]).shape
    labels = [[dim] if size_expression(size) != 1 else [] for dim, size in enumerate(shape)]
    for node in chain[1:]:
        if has_trait(node, Trait.PERMUTE):
            labels = [labels[dim] for dim in permutation(node)]
        elif has_trait(node, Trait.RESHAPE):
            regrouped_labels = regrouped(itertools.chain(*labels), shape.__getitem__, fake_value(node).shape)
            if regrouped_labels is None:
                return None
            labels = [list(group) for group in regrouped_labels]
    return labels
