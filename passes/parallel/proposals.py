"""Proposals of ranks for a graph with expert parallelism, and the decision that all ranks derive from them.

Every rank proves its own graph. Blocks can be taken only if all ranks take them with the same experts, and, if tokens
must be the same on all ranks, compute the tokens alike. The decision is a pure function of all proposals, so all ranks
decide alike.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence

from torch.fx import Graph

from moepass.passes.graph.collectives import communications_of
from moepass.passes.graph.nodes import module_path
from moepass.passes.graph.refusals import COLLECTIVES_STAY
from moepass.passes.ir.plan import LocalBlock, Plan, Refusal

NO_CROSSOVER = "none"
# The reason until the texts of all ranks are compared.
UNEXPLAINED = "ranks write different local forms for it, or compute its tokens differently"


@dataclasses.dataclass(frozen=True)
class RefusedBlock:
    """A block that a rank leaves as it was captured."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Proposal:
    """The proposal of one rank for one graph and one process group.

    `exchanges` are the collectives of that group in host order, as `all_to_all at layers.0.experts`. `crossover` is,
    in words, the number of tokens per rank below which runs exchange tokens.
    """

    takes: tuple[LocalBlock, ...] = ()
    leaves: tuple[RefusedBlock, ...] = ()
    exchanges: tuple[str, ...] = ()
    crossover: str = NO_CROSSOVER

    @staticmethod
    def of(plan: Plan, group: str, exchanges: Sequence[str], crossover: str) -> Proposal:
        """Return the proposal of the rank that made `plan`."""
        takes = tuple(block for block in plan.local_blocks if block.group == group)
        leaves = tuple(RefusedBlock(item.where, _in_full(item)) for item in plan.refusals if item.group == group)
        return Proposal(takes, leaves, tuple(exchanges), crossover)

    def without_taking(self, reason: str) -> Proposal:
        """Return the proposal of a rank that leaves all of its blocks because of `reason`."""
        leaves = tuple(RefusedBlock(block.name, reason) for block in self.takes)
        return dataclasses.replace(self, takes=(), leaves=(*self.leaves, *leaves))

    def weights(self, name: str) -> tuple[str, ...]:
        """Return the dtypes and shapes of the expert weights of the blocks called `name` that the rank takes."""
        return tuple(block.weights for block in self.takes if block.name == name)

    def signatures(self, name: str) -> tuple[str, ...]:
        """Return the signatures of the blocks called `name` in host order: a layer may be applied twice."""
        return tuple(block.signature for block in self.takes if block.name == name)


def exchanges_by_group(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the collectives of a graph by process group, in host order, as `all_to_all at layers.0.experts`."""
    exchanges: dict[str, list[str]] = defaultdict(list)
    for collective in communications_of(graph):
        exchanges[collective.group_name].append(f"{collective.kind} at {module_path(collective.node)}")
    return {group: tuple(exchanges[group]) for group in sorted(exchanges)}


def blocks_to_leave(proposals: Sequence[Proposal]) -> dict[str, str]:
    """Return reasons, by name, for blocks that not all ranks take alike; UNEXPLAINED if only their texts can tell."""
    names = dict.fromkeys(block.name for proposal in proposals for block in proposal.takes)
    unequal = _first_difference([proposal.exchanges for proposal in proposals])
    order = None if unequal is None else f"ranks talk to each other in different orders: {unequal}"
    reasons = {name: _why_not(name, proposals) or order for name in names}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _in_full(refusal: Refusal) -> str:
    """Return the reason of a refusal with the source line, for the other ranks."""
    reason = refusal.reason.removesuffix(COLLECTIVES_STAY)
    return f"{reason} ({refusal.source_line})" if refusal.source_line else reason


def _why_not(name: str, proposals: Sequence[Proposal]) -> str | None:
    for rank, proposal in enumerate(proposals):
        refused = next((block for block in proposal.leaves if block.name == name), None)
        if refused is not None:
            return f"rank {rank} cannot take it: {refused.reason}"
        if not proposal.signatures(name):
            return f"rank {rank} does not see it in the graph that it runs here"
    if any(proposal.signatures(name) != proposals[0].signatures(name) for proposal in proposals):
        return UNEXPLAINED
    return None


def explain_difference(texts: Sequence[Sequence[str]], what: str) -> str | None:
    """Return the first difference between the `texts` of all ranks about `what`, in words; None if they are equal."""
    difference = _first_difference(texts)
    return None if difference is None else f"{what} differ between ranks: {difference}"


def _first_difference(texts: Sequence[Sequence[str]]) -> str | None:
    first = texts[0]
    for rank, text in enumerate(texts):
        if list(text) == list(first):
            continue
        for first_line, line in itertools.zip_longest(first, text, fillvalue="nothing more"):
            if first_line != line:
                return f"`{first_line}` on rank 0, `{line}` on rank {rank}"
    return None
