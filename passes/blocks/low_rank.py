"""Pairs of matrices of low rank beside the weights of experts, as LoRA has them: y = x W + (x A) B · scale.

W [experts, in, out], A [experts, in, rank] and B [experts, rank, out] are all weights of the experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.fx import Node

from moepass.passes.blocks.expert_gemms import ExpertGemm
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.traits import Trait, base_operation, has_trait, is_view
from moepass.passes.ops.walk import descendants, origin

aten = torch.ops.aten

# Between the two products, and behind them.
_MOST_STEPS = 8


@dataclasses.dataclass(frozen=True)
class LowRankPair:
    """Two GEMMs of low rank on the rows of `main`: `second` multiplies the scaled result of `first`."""

    main: ExpertGemm
    first: ExpertGemm
    second: ExpertGemm


def low_rank_pairs(gemms: Sequence[ExpertGemm]) -> list[LowRankPair]:
    """Return the pairs among `gemms`, in host order."""
    by_node = {gemm.node: gemm for gemm in gemms}
    pairs: list[LowRankPair] = []
    for second in gemms:
        first = by_node.get(_before_scales(second.activations))
        if first is None or not _fit(first, second):
            continue
        mains = [
            gemm
            for gemm in gemms
            if gemm not in (first, second)
            and _is_beside(gemm, first)
            and (gemm.inner, gemm.outer) == (first.inner, second.outer)
            and _meet(gemm.node, second.node)
        ]
        if len(mains) == 1:
            pairs.append(LowRankPair(mains[0], first, second))
    return pairs


def _fit(first: ExpertGemm, second: ExpertGemm) -> bool:
    is_low = first.outer == second.inner and first.outer < min(first.inner, second.outer)
    return is_low and _is_alike(first, second)


def _is_alike(one: ExpertGemm, other: ExpertGemm) -> bool:
    same_key = one.form == other.form and (one.form == "dense_bmm" or one.key is other.key)
    return same_key and one.experts == other.experts


def _is_beside(main: ExpertGemm, first: ExpertGemm) -> bool:
    return _is_alike(main, first) and _before_casts(main.activations) is _before_casts(first.activations)


def _before_casts(node: Node) -> Node:
    return origin(node, passes=lambda step: is_view(step) or has_trait(step, Trait.CAST, Trait.COPY))


def _before_scales(node: Node) -> Node:
    """Return the value from which views, casts and products with numbers make `node`."""
    for _ in range(_MOST_STEPS):
        before = _before_casts(node)
        if is_call(before, aten.mul.Tensor) and _is_scaled(before):
            before = before.args[0]  # type: ignore[assignment]
        if before is node:
            break
        node = before
    return node


def _is_scaled(node: Node) -> bool:
    """Return whether `node` multiplies its first operand by a number, or by a tensor of one number."""
    factor = all_arguments(node)["other"]
    if not isinstance(factor, Node):
        return True
    table = _before_casts(factor)
    if is_call(table, aten.index.Tensor):  # a lookup in a tensor of one number
        factor = all_arguments(table)["self"]
    value = fake_value(factor)
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) and size == 1 for size in value.shape)


def _meet(main: Node, second: Node) -> bool:
    """Return whether a sum adds the results of both, each of them scaled, cast or biased."""
    return bool(_sums_behind(main) & _sums_behind(second))


def _sums_behind(node: Node) -> set[Node]:
    def is_step(user: Node) -> bool:
        is_scaled = is_call(user, aten.add.Tensor) or base_operation(user) == "mul"
        is_same = is_view(user) or has_trait(user, Trait.CAST, Trait.COPY)
        return (is_scaled or is_same) and isinstance(fake_value(user), torch.Tensor)

    steps = descendants(node, follow=is_step, most=4 * _MOST_STEPS)
    return {user for user in steps if is_call(user, aten.add.Tensor)}
