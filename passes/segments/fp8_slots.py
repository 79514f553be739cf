"""Keep quantised expert matrices in FP8 in their slots, for kernels that multiply in FP8.

Published FP8 checkpoints have one scale for each block of 128 x 128 elements. The decoder then copies values and scales
into the slot instead of computing bf16 weights, and a slot takes half of the bytes.

Contract
    in    a top-level graph of segments, and a plan with slot_stays
    out   the same graph, untouched; `fp8` and `format` of the plan's banks, and `slot_bytes`. Without
          `context.multiplies_in_fp8` nothing changes

Unlike other passes, it raises an error where its condition does not hold: FP8 arithmetic changes numbers, so a user who
asked for it must not get the arithmetic of some layers only.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import cast

from torch.fx import GraphModule, Node

from moepass.models.errors import InputError
from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.nodes import graph_inputs, is_call
from moepass.passes.ir.plan import BankSpec, Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.ir.segment import TRITON, Lowering
from moepass.passes.ir.shards import FP8_REQUEST, in_fp8
from moepass.passes.ir.slot_operations import acquire, release
from moepass.passes.ops.traits import Trait, has_trait, is_view


@graph_pass()
def fp8_slots(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Fill `fp8` of all banks that stream. Raises InputError for a bank that does not rest as blocks of FP8."""
    stays = {stay.bank for stay in plan.slot_stays}
    if not context.multiplies_in_fp8 or not stays:
        return PassResult(module, plan)
    banks = tuple(in_fp8(bank) if bank.index in stays else bank for bank in plan.banks)
    slot_bytes = max(bank.format.slot_bytes for bank in banks if bank.index in stays)
    return PassResult(module, dataclasses.replace(plan, banks=banks, slot_bytes=slot_bytes))


def check_fp8_readers(module: GraphModule, plan: Plan, lowerings: Mapping[str, Lowering]) -> None:
    """Raise InputError if anything but a Triton kernel reads a matrix that is FP8 in its slot."""
    for node in module.graph.nodes:
        if is_call(node, acquire) and (bank := plan.bank(cast("int", node.kwargs["bank"]))).fp8:
            for reader in _readers(node, bank):
                if reason := _why_not_by_kernels(module, reader, node, bank, lowerings):
                    raise InputError(f"{FP8_REQUEST}, but the experts of {bank.name} cannot stay FP8: {reason}")


def _readers(tensors: Node, bank: BankSpec) -> Iterator[Node]:
    """Yield the nodes that read matrices in FP8 from the acquire `tensors`, once for each matrix."""
    for element in tensors.users:
        if is_call(element, operator.getitem) and element.args[1] in bank.fp8:
            yield from element.users
        elif not is_call(element, operator.getitem, release):
            yield element


def _why_not_by_kernels(
    module: GraphModule, reader: Node, tensors: Node, bank: BankSpec, lowerings: Mapping[str, Lowering]
) -> str:
    """Return why `reader` does more than multiply rows by the experts, in Triton kernels; empty if it does not."""
    lowering = lowerings.get(str(reader.target)) if reader.op == "call_module" else None
    if lowering is None:
        return f"{reader.name} reads them outside of kernels"
    if not lowering.is_by(TRITON):
        refusal = lowering.refusal or f"its experts run as {lowering.experts or lowering.how}"
        return f"{reader.name} is not lowered to Triton kernels: {refusal}"
    segment = module.get_submodule(str(reader.target))
    assert isinstance(segment, GraphModule), "the graph before lowering has segments"
    for argument, node in zip(reader.args, graph_inputs(segment.graph), strict=True):
        is_element = isinstance(argument, Node) and is_call(argument, operator.getitem) and argument.args[0] is tensors
        if is_element and cast("Node", argument).args[1] in bank.fp8 and not _is_only_multiplied(node):
            return f"{reader.name} reads {node.name} other than as the weights of grouped GEMMs, or cuts it"
    return ""


def _is_only_multiplied(weights: Node) -> bool:
    """Return whether grouped GEMMs alone read `weights`, through views that only reorder dimensions."""
    return all(
        user.args[1] is weights and user.args[0] is not weights
        if is_grouped_gemm(user)
        else is_view(user) and has_trait(user, Trait.PERMUTE, Trait.COPY) and _is_only_multiplied(user)
        for user in weights.users
    )
