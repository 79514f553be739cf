"""The GEMMs of dense experts: products of all places with the weights of all experts.

batched    bmm([experts, places, in], [experts, in, out])      or with the weights on the left
wide       mm([places, in], [in, experts · out])               as einsum("th,ehf->tef") becomes
summed     mm([places, experts · in], [experts · in, out])     as einsum("tef,efh->th"), added up over experts
grouped    a grouped GEMM of [experts · places, in] where all experts have as many rows
"""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy
import torch
from torch.fx import Node

from moepass.passes.blocks.expert_gemms import is_expert_weight
from moepass.passes.dense.pair_layouts import Pairs
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.arguments import all_arguments, permutation
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.ops.walk import sources
from moepass.passes.rows.row_layout import Layout, features

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
    """What `node` is the same elements of, the furthest first: and of each dimension which of its dimensions it is."""
    chain = _chain(node)
    found = []
    for start, source in enumerate(chain):
        labels = _labels(source, chain[start + 1 :])
        if labels is not None:
            found.append((source, labels))
    return found


def _chain(node: Node) -> list[Node]:
    return [*sources(node, _moves)][::-1]


def _moves(node: Node) -> bool:
    """True where `node` has the same elements as its operand, in other dimensions, or in another order."""
    if is_call(node, aten.expand.default):
        return [*fake_value(node).shape] == [*fake_value(node.all_input_nodes[0]).shape]
    return has_trait(node, Trait.RESHAPE, Trait.COPY, Trait.PERMUTE)


def _labels(source: Node, steps: list[Node]) -> list[list[int]] | None:
    """For each dimension behind `steps`, which dimensions of `source` it is, outermost first; None where one is cut."""
    shape = getattr(fake_value(source), "shape", ())
    if not all(isinstance(size, int) and size > 1 for size in shape):
        return None
    found = [[dim] for dim in range(len(shape))]
    for node in steps:
        if has_trait(node, Trait.PERMUTE):
            found = [found[dim] for dim in permutation(node)]
        elif has_trait(node, Trait.RESHAPE):
            pending = [label for labels in found for label in labels]
            found = []
            for size in fake_value(node).shape:
                labels: list[int] = []
                product: Any = 1
                while product != size and pending:
                    labels.append(pending.pop(0))
                    product *= shape[labels[-1]]
                if product != size:
                    return None
                found.append(labels)
            if pending:
                return None
    return found
