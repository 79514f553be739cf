"""The GEMMs of dense experts: products of all places with the weights of all experts.

batched    bmm([experts, places, in], [experts, in, out])      or with the weights on the left
wide       mm([places, in], [in, experts · out])               as einsum("th,ehf->tef") becomes
summed     mm([places, experts · in], [experts · in, out])     as einsum("tef,efh->th"), added up over experts
grouped    a grouped GEMM of [experts · places, in] where all experts have as many rows
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
    """`node` multiplies `rows` by `weights` [experts, ., .], whose dimension `inner`, 1 or 2, is multiplied and added.

    `kind` says how; `is_turned` where weights stand on the left. `added` is what addmm or baddbmm adds.
    """

    node: Node
    kind: str
    rows: Node
    weights: Node
    inner: int
    is_turned: bool
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
        """What one expert multiplies and adds."""
        return int(fake_value(self.weights).shape[self.inner])

    @property
    def places(self) -> sympy.Expr:
        """How many places each expert computes."""
        return size_expression(fake_value(self.rows).shape[self.batch + self.is_turned])

    def result(self, pairs: Pairs) -> Layout:
        """Where experts and places lie in what it gives; of one that is `summed`, places alone."""
        other = {
            "batched": features(self.outer),
            "wide": (*pairs.of_experts, *features(self.outer)),
            "summed": features(self.outer),
        }[self.kind]
        matrix = [pairs.of_places, other]
        first = [pairs.of_experts if self.kind == "batched" else ()] * self.batch
        return Layout((*first, *(matrix[::-1] if self.is_turned else matrix)))

    def of_rows(self, pairs: Pairs) -> Layout:
        """Where experts and places lie in its `rows`."""
        inner = features(self.width)
        if self.kind == "summed":
            inner = (*pairs.of_experts, *inner)
        matrix = [pairs.of_places, inner]
        first = [pairs.of_experts if self.kind == "batched" else ()] * self.batch
        return Layout((*first, *(matrix[::-1] if self.is_turned else matrix)))


def dense_gemm(node: Node) -> DenseGemm | None:
    """`node` as a GEMM of dense experts; None where it is none."""
    if not is_call(node, aten.bmm.default, aten.baddbmm.default, aten.mm.default, aten.addmm.default):
        return None
    batch = int(has_trait(node, Trait.BATCHED_MATMUL))
    given = all_arguments(node)
    left, right = (given[name] for name in _names(node))
    added = given["self"] if is_call(node, aten.baddbmm.default, aten.addmm.default) else None
    if added is not None and (given["beta"] != 1 or given["alpha"] != 1):
        return None
    for weight, rows, is_turned in ((right, left, False), (left, right, True)):
        for source, labels in _ways_back(weight):
            if not is_expert_weight(source):
                continue
            inner, outer = labels[-2:][::-1] if is_turned else labels[-2:]
            of_batch = labels[0] if batch else []
            kind = _kind(of_batch, inner, outer)
            # Two inputs of one kind, as in attention over given queries and keys, are no weights.
            are_inputs = source.op == "placeholder" and is_expert_weight(_chain(rows)[0])
            if kind is not None and not are_inputs:
                return DenseGemm(node, kind, rows, source, inner[-1], is_turned, batch, added)
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


def _ways_back(node: Node) -> list[tuple[Node, list[list[int]]]]:
    """Return the tensors that have the elements of `node`, the furthest first, with the labels of its dimensions."""
    chain = _chain(node)
    found = []
    for start, source in enumerate(chain):
        shape = getattr(fake_value(source), "shape", ())
        are_known = all(isinstance(size, int) and size > 1 for size in shape)
        if are_known and (labels := labels_behind(chain[start:])) is not None:
            found.append((source, labels))
    return found


def _chain(node: Node) -> list[Node]:
    return [*first_inputs(node, _moves)][::-1]


def _moves(node: Node) -> bool:
    """True where `node` has the same elements as its operand, in other dimensions, or in another order."""
    if is_call(node, aten.expand.default):
        return [*fake_value(node).shape] == [*fake_value(node.all_input_nodes[0]).shape]
    return has_trait(node, Trait.RESHAPE, Trait.COPY, Trait.PERMUTE)


def labels_behind(chain: Sequence[Node]) -> list[list[int]] | None:
    """Return the dimensions of the first of `chain` that each dimension of the last consists of, outermost first.

    Dimensions of one element are left out. None if a dimension is cut.
    """
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
