"""Adopt the experts of a model that runs with expert parallelism: local parameters become shards for all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.fx import GraphModule

from moepass.models.errors import InputError
from moepass.passes.graph.nodes import graph_inputs
from moepass.passes.graph.source_lines import input_name
from moepass.passes.ir.plan import BankSpec, LocalBlock, Plan
from moepass.passes.ir.protocol import Agree, Group
from moepass.passes.parallel.eliminate_expert_parallelism import texts_of
from moepass.passes.parallel.proposals import NO_CROSSOVER, Proposal, exchanges_by_group
from moepass.runtime.execute.dispatching import BankInputs, CapturedFallback, CapturedForm, Dispatcher
from moepass.runtime.execute.run_findings import RunFindings
from moepass.runtime.execute.schedules import Adopt
from moepass.runtime.homes.adopted_banks import AdoptionOptions, adopted_banks
from moepass.runtime.homes.device_home import check_transport_to
from moepass.runtime.ranks.agreement import RunCheck, taken_blocks
from moepass.runtime.ranks.block_decisions import decisions_of, has_others
from moepass.runtime.ranks.eager_watch import refuse_eager_stance
from moepass.runtime.ranks.replicas import ReplicaCheck
from moepass.runtime.torch_private import process_groups_by_name
from moepass.runtime.transfer.link import check_link_to


def process_groups(names: Collection[str]) -> dict[str, Group]:
    """Return this rank's view of the process groups with these names. Groups that do not exist here are skipped.

    Groups are in the order of creation, which is the same on all ranks.
    """
    return {
        name: Group(group.rank(), group.size(), tuple(dist.get_process_group_ranks(group)))
        for name, group in process_groups_by_name().items()
        if name in names
    }


def agreement_on_blocks(
    captured: GraphModule, groups: Mapping[str, Group], crossover: str, timeout_s: float
) -> Agree | None:
    """Return the function by which ranks agree on the blocks that are rewritten; None if no other rank takes part.

    `crossover` is the number of tokens per rank below which runs exchange tokens, as text that ranks compare.
    """
    exchanges = _shared_exchanges(captured, groups)
    if not exchanges:
        return None
    reason = (
        "torch._dynamo.config.suppress_errors is on, so a rank with an error would wait at an exchange that no other "
        "rank joins; turn it off"
    )
    refused = reason if torch._dynamo.config.suppress_errors else None

    def agree(module: GraphModule, plan: Plan) -> dict[str, str]:
        leave: dict[str, str] = {}
        for name, collectives in exchanges.items():
            proposal, group = Proposal.of(plan, name, collectives, crossover), _group(name)
            if refused is not None:
                leave |= {block.name: refused for block in proposal.takes}
                proposal = proposal.without_taking(refused)
            leave |= decisions_of(group).decide(group, proposal, lambda block: texts_of(module, block), timeout_s)
        return leave

    return agree


def run_checks(
    plan: Plan, captured: GraphModule, groups: Mapping[str, Group], timeout_s: float
) -> list[Callable[[], None]]:
    """Return the checks before each run of `captured`. They raise if the run must not begin.

    One of them compares the run with the other ranks' runs if necessary (`BlockDecisions.must_agree`). It is left out
    if ranks agree on every run anyway, because the plan has a dispatch or its blocks need the same tokens.
    """
    exchanges = _shared_exchanges(captured, groups)
    checks: list[Callable[[], None]] = [refuse_eager_stance] if exchanges and plan.local_blocks else []
    if plan.dispatch is None:
        checks += [
            RunCheck(functools.partial(_group, name), Proposal.of(plan, name, collectives, NO_CROSSOVER), timeout_s)
            for name, collectives in exchanges.items()
            if name not in {block.group for block in _blocks_of_equal_tokens(plan)}
        ]
    return checks


def _shared_exchanges(captured: GraphModule, groups: Mapping[str, Group]) -> dict[str, tuple[str, ...]]:
    """Return the collectives of `captured` in each of `groups` that has other ranks.

    All ranks go through groups in this order, so no ranks wait for each other in a cycle.
    """
    return {
        name: collectives
        for name, collectives in exchanges_by_group(captured.graph).items()
        if name in groups and has_others(_group(name))
    }


def captured_forms(
    plan: Plan,
    captured: GraphModule,
    lower: str,
    device: torch.device,
    options: AdoptionOptions,
    debug: bool,
    findings: RunFindings,
) -> list[CapturedForm]:
    """Return the decisions by which a run takes `captured` instead of the schedule, in the order of their priority.

    With `debug`, ranks compare their tokens in every run. Blocks that a run refuses are noted in `findings`.
    """
    forms: list[CapturedForm] = []
    if plan.dispatch is not None:
        (group_name,) = {block.group for block in plan.local_blocks}

        def register(banks: Sequence[BankSpec], inputs: BankInputs) -> None:
            adopted_banks(_group(group_name), device).register_agreed(banks, inputs)

        group = functools.partial(_group, group_name)
        blocks = taken_blocks(plan.local_blocks)
        forms.append(Dispatcher(plan.dispatch, captured, lower, group, register, options.timeout_s, blocks))
    needing = _blocks_of_equal_tokens(plan)
    if needing:
        check = _replica_check(plan, needing, captured, options.timeout_s, debug)
        forms.append(CapturedFallback(check, captured, lower, needing, findings))
    return forms


def _replica_check(
    plan: Plan, needing: Sequence[LocalBlock], captured: GraphModule, timeout_s: float, debug: bool
) -> ReplicaCheck:
    (group_name,) = {block.group for block in needing}
    nodes = {node.name: (position, node) for position, node in enumerate(graph_inputs(captured.graph))}
    inputs = {nodes[name][0]: input_name(nodes[name][1]) for name in plan.replicated}
    signature = " ".join(block.signature for block in needing)
    blocks = taken_blocks(plan.local_blocks)
    return ReplicaCheck(functools.partial(_group, group_name), inputs, signature, blocks, timeout_s, debug)


def adoption(plan: Plan, device: torch.device, options: AdoptionOptions) -> Adopt | None:
    """Return the function that adopts the banks of `plan` in the first run; None if its banks are not parameters.

    Raises InputError if `device` cannot receive banks of other ranks, and OptionError if its link cannot be emulated.
    """
    names = {bank.group for bank in plan.banks if bank.group}
    if not names:
        return None
    (name,) = names
    check_transport_to(device, options.transport)
    check_link_to(device, options.link)

    def adopt(banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]) -> None:
        group = _group(name)
        if _blocks_of_equal_tokens(plan):
            adopted_banks(group, device).register_agreed(banks, parts)
        adopted_banks(group, device).adopt(group, banks, parts, options)

    return adopt


def _blocks_of_equal_tokens(plan: Plan) -> list[LocalBlock]:
    return [block for block in plan.local_blocks if block.tokens]


def _group(name: str) -> ProcessGroup:
    """Return the process group of this name. Raises InputError if it was destroyed."""
    group = process_groups_by_name().get(name)
    if group is None:
        raise InputError(
            f"process group {name!r}, over which the experts are spread, was destroyed; compile again", name=name
        )
    return group
