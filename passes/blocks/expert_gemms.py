"""The GEMMs of a graph that read expert weights, and the sources of these weights.

grouped_mm    aten._grouped_mm, or transformers' fallback operator: rows sorted by expert
batched_mm    aten.bmm over weights that were selected for each row
dense_bmm     aten.bmm over the weights of all experts: every expert computes every row
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable

import torch
from torch.fx import Node

from moepass.passes.blocks.computed_weights import (
    NotComputedAheadError,
    before_transposes,
    is_computed,
    weight_steps,
)
from moepass.passes.blocks.expert_stack import is_expert_stack, parameters_of
from moepass.passes.blocks.opaque_experts import is_foreign, opaque_reason
from moepass.passes.graph.nodes import fake_value, is_call, module_path
from moepass.passes.graph.source_lines import ARGUMENT_KEY, describe_node, in_words, source_line
from moepass.passes.ir.plan import Refusal
from moepass.passes.ir.slot_operations import BANK_TENSOR, gather
from moepass.passes.ops.traits import Trait, has_trait, is_view
from moepass.passes.ops.walk import origin, view_source

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class ExpertGemm:
    """A GEMM with expert weights; `weights` [experts, ., .] is their source before views."""

    node: Node
    form: str
    key: Node
    weights: Node
    activations: Node
    inner: int
    outer: int

    @property
    def experts(self) -> int:
        return int(fake_value(self.weights).shape[0])


def expert_gemms(nodes: Iterable[Node], *, may_compute: bool = False) -> tuple[list[ExpertGemm], list[Refusal]]:
    """Return the expert GEMMs in `nodes`, and refusals; with `may_compute`, weights may be computed from parameters."""
    gemms: list[ExpertGemm] = []
    refusals: list[Refusal] = []
    outcome: ExpertGemm | Refusal | None
    for node in nodes:
        if is_grouped_gemm(node):
            outcome = _grouped_gemm(node, may_compute)
        elif is_call(node, aten.bmm.default):
            outcome = _batched_gemm(node)
        else:
            outcome = _opaque_experts(node)
        if isinstance(outcome, Refusal):
            refusals.append(outcome)
        elif outcome is not None:
            gemms.append(outcome)
    return gemms, refusals


def _opaque_experts(node: Node) -> Refusal | None:
    if not is_foreign(node):
        return None
    weights = [used for used in node.all_input_nodes if is_expert_weight(_weight_source(used))]
    reason = opaque_reason(node, weights)
    return None if reason is None else refused(node, reason)


def is_grouped_gemm(node: Node) -> bool:
    """Return whether `node` is `rows[ends[e - 1]:ends[e]] @ weights[e]` for every e, in a form that torch captures."""
    # The fallback operator exists only after transformers was imported, so it is recognised by name.
    return is_call(node, aten._grouped_mm.default) or (
        node.op == "call_function" and str(node.target) == "transformers.grouped_mm_fallback.default"
    )


def _grouped_gemm(node: Node, may_compute: bool) -> ExpertGemm | Refusal:
    arguments = {**dict(zip(("input", "weight", "offs"), node.args, strict=False)), **node.kwargs}
    activations, weight, offsets = arguments.get("input"), arguments.get("weight"), arguments.get("offs")
    if not isinstance(weight, Node) or not isinstance(activations, Node):
        return refused(node, "the grouped GEMM has no weight operand: it needs rows, weights and offsets")
    if not isinstance(offsets, Node):
        return refused(node, "a grouped GEMM without offsets does not say which rows belong to which expert: pass offs")
    source = _weight_source(weight)
    shape = fake_value(weight).shape
    is_weight = is_expert_weight(source)
    if may_compute and (not is_weight or fake_value(source).shape[0] != shape[0]):
        computed = before_transposes(weight)
        is_weight = is_computed(computed)
        source = computed if is_weight else source
    if not is_weight:
        return _refused_weight(node, source, may_compute)
    return ExpertGemm(node, "grouped_mm", offsets, source, activations, int(shape[1]), int(shape[2]))


def _batched_gemm(node: Node) -> ExpertGemm | Refusal | None:
    for operand, rows in (node.args, tuple(reversed(node.args))):
        assert isinstance(operand, Node)
        assert isinstance(rows, Node)
        selected = _weight_source(operand)
        if is_call(selected, aten.index.Tensor):
            weights, indices = selected.args[0], selected.args[1]
            if isinstance(weights, Node) and isinstance(indices, (list, tuple)) and len(indices) == 1:
                source = _weight_source(weights)
                ids = indices[0]
                if isinstance(ids, Node) and is_expert_weight(source):
                    inner, outer = _batched_widths(node, operand)
                    return ExpertGemm(node, "batched_mm", view_source(ids), source, rows, inner, outer)
        elif is_expert_weight(selected) and fake_value(operand).shape[0] == fake_value(selected).shape[0]:
            if selected.op == "placeholder" and is_expert_weight(_weight_source(rows)):
                continue  # two equal inputs, such as queries and keys of attention: neither is a weight
            inner, outer = _batched_widths(node, operand)
            return ExpertGemm(node, "dense_bmm", node, selected, rows, inner, outer)
    return None


def _batched_widths(node: Node, weight: Node) -> tuple[int, int]:
    """Return the inner and outer width of a GEMM with the weight on either side."""
    shape = fake_value(weight).shape
    if node.args[1] is weight:
        return int(shape[1]), int(shape[2])
    return int(shape[2]), int(shape[1])


def _weight_source(node: Node) -> Node:
    """Return the source of a weight before all views; an element of a gather is a source."""
    return origin(node, passes=lambda step: gather_of(step) is None and is_view(step))


def is_expert_weight(node: Node) -> bool:
    """Return whether `node` is a source of expert weights: a bank tensor, or inputs [experts, ., .]."""
    value = fake_value(node)
    if not isinstance(value, torch.Tensor) or value.dim() != 3 or not value.is_floating_point():
        return False
    if is_call(node, BANK_TENSOR) or gather_of(node) is not None:
        return True
    # A weight has a fixed shape, and is no argument of the call.
    is_input = node.op == "placeholder" or is_expert_stack(node)
    is_weight = is_input and not any(parameter.meta.get(ARGUMENT_KEY, False) for parameter in parameters_of(node))
    return is_weight and all(isinstance(size, int) for size in value.shape)


def _refused_weight(node: Node, source: Node, may_compute: bool) -> Refusal:
    description = describe_node(source)
    if may_compute:
        try:
            weight_steps(source)
        except NotComputedAheadError as error:
            description += f": {in_words(str(error), node.graph)}"
    return refused(
        node,
        f"the weights are computed in the graph (by {description}), so they are not a bank that can be moved; keep "
        "parameters [experts, ., .] in the type in which the GEMM reads them",
    )


def gather_of(node: Node) -> Node | None:
    """Return the gather of which `node` is an element, or None. Blocks of eliminate_expert_parallelism have one."""
    return node.args[0] if is_call(node, operator.getitem) and is_call(node.args[0], gather) else None  # type: ignore[return-value]


def top_k(up: ExpertGemm) -> int | None:
    """Return the number of rows of the GEMM for each token, or None if it is unknown."""
    if up.form == "dense_bmm":
        return None
    rows = fake_value(up.activations).shape[0]
    node = up.activations
    while True:
        if is_call(node, aten.expand.default):
            # repeat_interleave is captured as an expand of every row to k copies.
            before, after = fake_value(node.args[0]).shape, fake_value(node).shape  # type: ignore[arg-type]
            ones = [new for old, new in zip(before, after, strict=False) if isinstance(old, int) and old == 1]
            copies = [new for new in ones if isinstance(new, int) and 1 < new <= up.experts]
            if len(before) == len(after) and len(copies) == 1:
                return copies[0]
        if is_view(node) or has_trait(node, Trait.CAST, Trait.COPY) or is_call(node, aten.masked_fill.Scalar):
            node = node.all_input_nodes[0]
            continue
        if is_call(node, aten.mul.Tensor) and str(fake_value(node.args[0]).shape) == str(fake_value(node).shape):  # type: ignore[arg-type]
            node = node.args[0]  # type: ignore[assignment]
            continue  # rows that are weighted before the experts
        if is_call(node, aten.index.Tensor, aten.index_select.default, aten.repeat_interleave.self_int):
            tokens = fake_value(node.args[0]).shape[0]  # type: ignore[arg-type]
            return next((k for k in range(1, up.experts + 1) if _always_equal(rows, tokens * k)), None)
        return None


def _always_equal(left: object, right: object) -> bool:
    """Return whether two sizes are equal expressions, without adding a guard."""
    left_expression = left.node.expr if isinstance(left, torch.SymInt) else left
    right_expression = right.node.expr if isinstance(right, torch.SymInt) else right
    return bool(left_expression == right_expression)


def refused(node: Node, reason: str, where: str | None = None) -> Refusal:
    where = module_path(node) if where is None else where
    return Refusal(node.name, reason, where, source_line=source_line(node))
