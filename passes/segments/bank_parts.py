"""Decide which tensors of a bank come in parts: this rank's experts where they rest, all other experts in a slot.

A grouped GEMM multiplies the rows of each expert by weights of that expert alone, so it does not need the weights of
all experts in one tensor. If nothing else reads a tensor, slots hold only the experts of other ranks, and this rank's
own experts are neither copied nor stored twice.

Contract
    in    a top-level graph of segments, and a plan with slot_stays. Without segments nothing comes in parts
    out   the same graph, untouched; `in_parts` of the plan's banks, and `slot_bytes`

Pseudo-code
    a tensor comes in parts
        if its home keeps this rank's shard on the compute device, and not encoded
        if every reader is a segment that runs expert by expert, and reads it only as the weights of grouped GEMMs,
        through views that keep the order of experts
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from moepass.models.homes import home_named
from moepass.passes.graph.nodes import fake_value, graph_inputs, is_call
from moepass.passes.ir.plan import BankSpec, Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.ir.shards import slot_layout
from moepass.passes.ir.slot_operations import acquire, release
from moepass.passes.ops.traits import is_view
from moepass.passes.segments.expert_program import (
    ExpertProgram,
    GroupedGemm,
    NotByExpertError,
    expert_gemms_in,
    read_program,
)
from moepass.passes.segments.partition import cut_into_segments
from moepass.passes.segments.token_program import is_region

aten = torch.ops.aten


@graph_pass()
def bank_parts(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Fill `in_parts` of the banks, assuming that segments of experts are lowered expert by expert."""
    if not context.runs_by_expert:
        return PassResult(module, plan)
    return PassResult(module, with_bank_parts(module, plan))


def with_bank_parts(module: GraphModule, plan: Plan) -> Plan:
    """Return `plan` with the tensors that come in parts if segments of experts run expert by expert."""
    return _with_positions(plan, _positions_in_parts(module, plan))


def with_complete_banks(module: GraphModule, plan: Plan, readers: Collection[str]) -> Plan:
    """Return `plan` with complete tensors for each bank that a segment in `readers` reads."""
    incomplete = {bank.index: set(bank.in_parts) for bank in plan.banks if bank.in_parts}
    if not incomplete:
        return plan
    for node in module.graph.nodes:
        if is_call(node, acquire):
            for element in node.users:
                if is_call(element, operator.getitem) and any(str(user.target) in readers for user in element.users):
                    incomplete.get(node.kwargs["bank"], set()).discard(element.args[1])
    return _with_positions(plan, {index: tuple(sorted(positions)) for index, positions in incomplete.items()})


def _with_positions(plan: Plan, positions: Mapping[int, tuple[int, ...]]) -> Plan:
    banks = tuple(dataclasses.replace(bank, in_parts=positions.get(bank.index, ())) for bank in plan.banks)
    stays = {stay.bank for stay in plan.slot_stays}
    slot_bytes = max((slot_layout(bank).nbytes for bank in banks if bank.index in stays), default=plan.slot_bytes)
    return dataclasses.replace(plan, banks=banks, slot_bytes=slot_bytes)


def _positions_in_parts(module: GraphModule, plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return the positions of tensors that come in parts in every acquire of their bank, for each bank."""
    takers = {
        name: weights_in_parts(segment) for name, segment in module.named_children() if isinstance(segment, GraphModule)
    }
    by_bank: dict[int, set[int]] = {}
    for node in module.graph.nodes:
        if is_call(node, acquire):
            bank = plan.bank(cast("int", node.kwargs["bank"]))
            positions = _elements_in_parts(node, takers) if rests_on_device(bank) else set()
            by_bank[bank.index] = by_bank.get(bank.index, positions) & positions
    return {index: tuple(sorted(positions)) for index, positions in by_bank.items()}


def rests_on_device(bank: BankSpec) -> bool:
    """Return whether this rank's shard of `bank` is on the compute device and not encoded."""
    return bool(bank.expert_bounds) and home_named(bank.home).keeps_shards_on_device and not bank.format.is_encoded


def _elements_in_parts(tensors: Node, takers: Mapping[str, frozenset[int]]) -> set[int]:
    """Return the positions of the elements of the acquire `tensors` that only segments read, in parts."""
    positions: set[int] = set()
    for element in tensors.users:
        if is_call(element, release):
            continue
        if not is_call(element, operator.getitem):
            return set()
        readers = list(element.users)
        if readers and all(_takes_parts(reader, element, takers) for reader in readers):
            positions.add(cast("int", element.args[1]))
    return positions


def _takes_parts(reader: Node, element: Node, takers: Mapping[str, frozenset[int]]) -> bool:
    positions = {position for position, argument in enumerate(reader.args) if argument is element}
    return reader.op == "call_module" and positions <= takers.get(str(reader.target), frozenset())


def weights_in_parts(segment: GraphModule) -> frozenset[int]:
    """Return the positions of the inputs that `segment` can take in parts; none if it does not run expert by expert."""
    if not expert_gemms_in(segment):
        return frozenset()
    return _taken_within(segment) if is_region(segment) else _weights_by_expert(segment)


def _weights_by_expert(segment: GraphModule) -> frozenset[int]:
    try:
        program = read_program(segment)
    except NotByExpertError:
        return frozenset()
    inputs = enumerate(graph_inputs(segment.graph))
    return frozenset(position for position, node in inputs if node.users and _are_weights_alone(node, program))


def _taken_within(region: GraphModule) -> frozenset[int]:
    """Return these positions for a region that runs in chunks of tokens, if its segments run expert by expert."""
    top = cut_into_segments(region, within_regions=True).top
    takers = {
        name: _weights_by_expert(segment)
        for name, segment in top.named_children()
        if isinstance(segment, GraphModule) and expert_gemms_in(segment)
    }
    inputs = enumerate(graph_inputs(top.graph))
    return frozenset(
        position
        for position, node in inputs
        if node.users and all(_takes_parts(user, node, takers) for user in node.users)
    )


def _are_weights_alone(node: Node, program: ExpertProgram) -> bool:
    gemms = {step.node: step for step in program.steps if isinstance(step, GroupedGemm)}
    for user in node.users:
        if user in gemms:
            if gemms[user].weights is not node or gemms[user].rows is node:
                return False
        elif not _leaves_experts(user) or not _are_weights_alone(user, program):
            return False
    return bool(node.users)


def _leaves_experts(node: Node) -> bool:
    """Return whether `node` is a view of one tensor [experts, ...] that keeps the order of experts."""
    if not is_view(node) or len(node.all_input_nodes) != 1:
        return False
    dims = fake_value(node.all_input_nodes[0]).dim()
    arguments: Any = node.args[1:]
    if is_call(node, aten.permute.default):
        return len(arguments) == 1 and arguments[0][0] % dims == 0
    if is_call(node, aten.transpose.int):
        return len(arguments) == 2 and all(dim % dims != 0 for dim in arguments)
    if is_call(node, aten.slice.Tensor):
        return len(arguments) > 0 and arguments[0] % dims != 0
    return is_call(node, aten.alias.default, aten.detach.default)
