"""Experts of a model that runs with expert parallelism already: what each rank holds becomes a shard for all ranks.

A graph from which expert parallelism was taken reads complete banks, of which its own parameters are this rank's part.
In its first run the ranks meet, once, and these parts go to where the transport reads them; from then on each rank
pulls what it lacks whenever it wants, or all gather.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.fx import GraphModule

from moepass.models.errors import InputError
from moepass.passes.graph.nodes import graph_inputs
from moepass.passes.graph.source_lines import input_name
from moepass.passes.ir.joint_groups import joint_group
from moepass.passes.ir.plan import BankSpec, LocalBlock, Plan
from moepass.passes.ir.protocol import Agree, Group
from moepass.passes.parallel.eliminate_expert_parallelism import texts_of
from moepass.passes.parallel.proposals import NO_CROSSOVER, Proposal, exchanges_to_compare
from moepass.runtime.execute.dispatching import Dispatcher
from moepass.runtime.execute.executor import Adopt
from moepass.runtime.homes.adopted_banks import AdoptionOptions, adopted_banks, adopted_parts
from moepass.runtime.homes.device_home import check_transport_to
from moepass.runtime.ranks.agreement import RunCheck, taken_blocks
from moepass.runtime.ranks.decisions import decisions_of, has_others
from moepass.runtime.ranks.eager_watch import refuse_eager_stance
from moepass.runtime.ranks.replicas import ReplicaCheck
from moepass.runtime.torch_private import process_groups_by_name, suppresses_errors
from moepass.runtime.transfer.link import check_link_to


def process_groups(names: Collection[str]) -> dict[str, Group]:
    """This rank's place in each of the process groups with these names; those that do not exist here are left out.

    Where two of them may be axes of a mesh, also in the groups that they may make together. All in the order in which
    the groups were created, which is the same on all their ranks.
    """
    known = {
        name: Group(group.rank(), group.size(), tuple(dist.get_process_group_ranks(group)))
        for name, group in process_groups_by_name().items()
    }
    named = [known[name] for name in sorted(set(names) & known.keys())]
    products = {(one.ranks * other.ranks, one, other) for one, other in itertools.combinations(named, 2)}
    return {
        name: group
        for name, group in known.items()
        if name in names
        or any(group.ranks == ranks and joint_group(one, other, {name: group}) for ranks, one, other in products)
    }


def agreement_on_blocks(
    captured: GraphModule, groups: Mapping[str, Group], crossover: str, timeout_s: float
) -> Agree | None:
    """How the ranks of `groups` agree on what is taken out of `captured`; None where no other rank has a say.

    `crossover` says below how many tokens per rank runs are to be exchanged, in words.
    """
    exchanges = _shared_exchanges(captured, groups)
    if not exchanges:
        return None
    reason = (
        "torch._dynamo.config.suppress_errors is on, so a rank with an error would wait at an exchange that no other "
        "rank joins; turn it off"
    )
    refused = reason if suppresses_errors() else None

    def agree(module: GraphModule, plan: Plan) -> dict[str, str]:
        leave: dict[str, str] = {}
        for name, found in exchanges.items():
            own, group = Proposal.of(plan, name, found, crossover), _group(name)
            if refused is not None:
                leave |= {block.name: refused for block in own.takes}
                own = own.without_taking(refused)
            leave |= decisions_of(group).decide(group, own, lambda block: texts_of(module, block), timeout_s)
        return leave

    return agree


def run_checks(
    plan: Plan, captured: GraphModule, groups: Mapping[str, Group], timeout_s: float
) -> list[Callable[[], None]]:
    """The checks before each run of `captured`, whose `plan` ranks agreed on. They raise if the run must not begin.

    One of them compares the run with those of the other ranks, if need be (`BlockDecisions.must_agree`). It is left
    out if the plan has a dispatch or a `replica_check`, by which the ranks agree on every run.
    """
    exchanges = _shared_exchanges(captured, groups)
    checks: list[Callable[[], None]] = [refuse_eager_stance] if exchanges and plan.local_blocks else []
    if plan.dispatch is None:
        checks += [
            RunCheck(functools.partial(_group, name), Proposal.of(plan, name, found, NO_CROSSOVER), timeout_s)
            for name, found in exchanges.items()
            if name not in {block.group for block in _relying(plan)}
        ]
    return checks


def _shared_exchanges(captured: GraphModule, groups: Mapping[str, Group]) -> dict[str, tuple[str, ...]]:
    """The collectives of `captured` in those of `groups` that have other ranks, by group.

    All ranks go through groups in this order, so none waits for another in a circle.
    """
    return {
        name: found
        for name, found in exchanges_to_compare(captured.graph, groups).items()
        if name in groups and has_others(_group(name))
    }


def dispatching(
    plan: Plan, captured: GraphModule, lower: str, device: torch.device, options: AdoptionOptions
) -> Dispatcher | None:
    """The dispatcher that chooses the form of each run; None if the plan has no dispatch.

    `captured` is the graph that the plan was made for, `lower` how it is compiled where it has to run.
    """
    dispatch = plan.dispatch
    if dispatch is None:
        return None
    (name,) = {bank.group for bank in plan.banks}
    (agreed_over,) = {block.group for block in plan.local_blocks}

    def register(banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]) -> None:
        adopted_banks(_group(name), device).register_agreed(banks, parts)

    blocks = taken_blocks(plan.local_blocks)
    return Dispatcher(dispatch, captured, lower, lambda: _group(agreed_over), register, options.timeout_s, blocks)


def adoption(plan: Plan, device: torch.device, options: AdoptionOptions) -> Adopt | None:
    """The function that adopts the banks of `plan` in the first run; None if they are not parameters of the graph.

    Raises InputError for a device that banks of other ranks cannot stream to, OptionError for a link that is none
    there.
    """
    names = {bank.group for bank in plan.banks if bank.group}
    if not names:
        return None
    (name,) = names
    check_transport_to(device, options.transport)
    check_link_to(device, options.link)

    def adopt(banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]) -> None:
        group = _group(name)
        if _relying(plan):
            adopted_banks(group, device).register_agreed(banks, parts)
        adopted_banks(group, device).adopt(group, banks, parts, options)

    return adopt


def replica_check(plan: Plan, captured: GraphModule, options: AdoptionOptions, debug: bool) -> ReplicaCheck | None:
    """The check that ranks hold the same tokens, if the plan relies on it; else None."""
    relying = _relying(plan)
    if not relying:
        return None
    (group_name,) = {block.group for block in relying}
    nodes = {node.name: node for node in graph_inputs(captured.graph)}
    places = {name: place for place, name in enumerate(nodes)}
    inputs = {places[name]: input_name(nodes[name]) for name in plan.replicated}
    signature = " ".join(block.signature for block in relying)
    blocks = taken_blocks([block for block in plan.local_blocks if block.group == group_name])
    group = functools.partial(_group, group_name)
    (alike,) = {block.alike for block in relying}
    return ReplicaCheck(group, inputs, signature, blocks, options.timeout_s, debug, alike)


def _relying(plan: Plan) -> list[LocalBlock]:
    """The blocks that need the same tokens on all ranks."""
    return [block for block in plan.local_blocks if block.tokens]


def _group(name: str) -> ProcessGroup:
    """Raises InputError where there is none of that name any more."""
    group = process_groups_by_name().get(name)
    if group is None:
        raise InputError(
            f"process group {name!r}, over which the experts are spread, was destroyed; compile again", name=name
        )
    return group


__all__ = [
    "AdoptionOptions",
    "adopted_banks",
    "adopted_parts",
    "adoption",
    "agreement_on_blocks",
    "dispatching",
    "process_groups",
    "replica_check",
    "run_checks",
]
