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
from moepass.passes.ops.walk import origin

aten = torch.ops.aten

# Between the two products, and behind them.
_MOST_STEPS = 8


@dataclasses.dataclass(frozen=True)
class LowRankPair:
    """`second` multiplies what `first` gives, row by row times `scale`; both stand beside `main`, on the same rows."""

    main: ExpertGemm
    first: ExpertGemm
    second: ExpertGemm


def low_rank_pairs(gemms: Sequence[ExpertGemm]) -> list[LowRankPair]:
    """The pairs among `gemms`, in host order."""
    by_node = {gemm.node: gemm for gemm in gemms}
    found: list[LowRankPair] = []
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
            found.append(LowRankPair(mains[0], first, second))
    return found


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
    """What is viewed, cast and multiplied by numbers alone up to `node`."""
    for _ in range(_MOST_STEPS):
        before = _before_casts(node)
        if is_call(before, aten.mul.Tensor) and _is_scaled(before):
            before = before.args[0]  # type: ignore[assignment]
        if before is node:
            break
        node = before
    return node


def _is_scaled(node: Node) -> bool:
    """True where `node` multiplies its first operand by one number, or by a tensor of one."""
    other = all_arguments(node)["other"]
    if not isinstance(other, Node):
        return True
    table = _before_casts(other)
    if is_call(table, aten.index.Tensor):  # whatever is looked up in one number
        other = all_arguments(table)["self"]
    value = fake_value(other)
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) and size == 1 for size in value.shape)


def _meet(main: Node, second: Node) -> bool:
    """True where a sum adds the results of both, scaled, cast or biased each for itself."""
    return bool(_sums_behind(main) & _sums_behind(second))


def _sums_behind(node: Node) -> set[Node]:
    found: set[Node] = set()
    pending = [node]
    for _ in range(_MOST_STEPS):
        if not pending:
            break
        for user in pending.pop(0).users:
            is_step = is_view(user) or has_trait(user, Trait.CAST, Trait.COPY) or base_operation(user) == "mul"
            if is_call(user, aten.add.Tensor):
                found.add(user)
            if (is_step or is_call(user, aten.add.Tensor)) and isinstance(fake_value(user), torch.Tensor):
                pending.append(user)
    return found
