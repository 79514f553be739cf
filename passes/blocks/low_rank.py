"""Low-rank pairs of expert weights, such as those of LoRA: y = x W + (x A) B · scale.

W is [experts, in, out], A [experts, in, rank], and B [experts, rank, out].
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

# Between the two products, and after them.
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
        first = by_node.get(_unscaled(second.activations))
        if first is None or not _is_low_rank(first, second):
            continue
        mains = [
            gemm
            for gemm in gemms
            if gemm not in (first, second)
            and _has_same_rows(gemm, first)
            and (gemm.inner, gemm.outer) == (first.inner, second.outer)
            and _are_summed(gemm.node, second.node)
        ]
        if len(mains) == 1:
            pairs.append(LowRankPair(mains[0], first, second))
    return pairs


def _is_low_rank(first: ExpertGemm, second: ExpertGemm) -> bool:
    is_low = first.outer == second.inner and first.outer < min(first.inner, second.outer)
    return is_low and _have_same_groups(first, second)


def _have_same_groups(left: ExpertGemm, right: ExpertGemm) -> bool:
    same_key = left.form == right.form and (left.form == "dense_bmm" or left.key is right.key)
    return same_key and left.experts == right.experts


def _has_same_rows(main: ExpertGemm, first: ExpertGemm) -> bool:
    return _have_same_groups(main, first) and _uncast(main.activations) is _uncast(first.activations)


def _uncast(node: Node) -> Node:
    return origin(node, passes=lambda step: is_view(step) or has_trait(step, Trait.CAST, Trait.COPY))


def _unscaled(node: Node) -> Node:
    """Return the source of `node` before views, casts and products with numbers."""
    for _ in range(_MOST_STEPS):
        source = _uncast(node)
        if is_call(source, aten.mul.Tensor) and _is_scaled(source):
            source = source.args[0]  # type: ignore[assignment]
        if source is node:
            break
        node = source
    return node


def _is_scaled(node: Node) -> bool:
    """Return whether `node` multiplies its first operand by a number, or by a tensor of one number."""
    factor = all_arguments(node)["other"]
    if not isinstance(factor, Node):
        return True
    table = _uncast(factor)
    if is_call(table, aten.index.Tensor):  # a lookup in a tensor of one number
        factor = all_arguments(table)["self"]
    value = fake_value(factor)
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) and size == 1 for size in value.shape)


def _are_summed(main: Node, second: Node) -> bool:
    """Return whether a sum adds the results of both GEMMs, each possibly scaled, cast or biased."""
    return bool(_sums_after(main) & _sums_after(second))


def _sums_after(node: Node) -> set[Node]:
    def is_step(user: Node) -> bool:
        is_scaled = is_call(user, aten.add.Tensor) or base_operation(user) == "mul"
        is_same = is_view(user) or has_trait(user, Trait.CAST, Trait.COPY)
        return (is_scaled or is_same) and isinstance(fake_value(user), torch.Tensor)

    steps = descendants(node, follow=is_step, most=4 * _MOST_STEPS)
    return {user for user in steps if is_call(user, aten.add.Tensor)}
