"""Each rank's proposal for a graph with expert parallelism, and the decision that all ranks derive from them.

Every rank proves its own graph. Blocks can be taken only where all ranks take them with the same experts, and, where
tokens must be the same on all ranks, with tokens that are computed alike. The decision is a pure function of what all
ranks proposed, so it is the same on all of them.
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
# Until the texts of all ranks tell what differs.
UNEXPLAINED = "ranks write different local forms for it, or compute its tokens differently"


@dataclasses.dataclass(frozen=True)
class RefusedBlock:
    """A block that a rank leaves as it came."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Proposal:
    """The proposal of one rank for one graph and one process group.

    `exchanges` are the collectives of that group in host order, as `all_to_all at layers.0.experts`. `crossover` says
    below how many tokens per rank runs are to be exchanged, in words.
    """

    takes: tuple[LocalBlock, ...] = ()
    leaves: tuple[RefusedBlock, ...] = ()
    exchanges: tuple[str, ...] = ()
    crossover: str = NO_CROSSOVER

    @staticmethod
    def of(plan: Plan, group: str, exchanges: Sequence[str], crossover: str) -> Proposal:
        """The proposal of the rank that made `plan`."""
        takes = tuple(block for block in plan.local_blocks if block.group == group)
        leaves = tuple(RefusedBlock(item.where, _in_full(item)) for item in plan.refusals if item.group == group)
        return Proposal(takes, leaves, tuple(exchanges), crossover)

    def without_taking(self, reason: str) -> Proposal:
        """The same of a rank that leaves all that it could take, because of `reason`."""
        left = tuple(RefusedBlock(block.name, reason) for block in self.takes)
        return dataclasses.replace(self, takes=(), leaves=(*self.leaves, *left))

    def weights(self, name: str) -> tuple[str, ...]:
        """Types and shapes of the expert weights of those blocks."""
        return tuple(block.weights for block in self.takes if block.name == name)

    def signatures(self, name: str) -> tuple[str, ...]:
        """Of the blocks with this name that the rank takes, in host order: a layer may be applied twice."""
        return tuple(block.signature for block in self.takes if block.name == name)


def exchanges_by_group(graph: Graph) -> dict[str, tuple[str, ...]]:
    """The collectives of a captured graph by process group, in host order, as `all_to_all at layers.0.experts`."""
    found: dict[str, list[str]] = defaultdict(list)
    for one in communications_of(graph):
        found[one.group_name].append(f"{one.kind} at {module_path(one.node)}")
    return {group: tuple(found[group]) for group in sorted(found)}


def blocks_to_leave(proposals: Sequence[Proposal]) -> dict[str, str]:
    """The blocks that not all ranks take alike, by name, with the reason; UNEXPLAINED where texts have to tell it."""
    names = dict.fromkeys(block.name for proposal in proposals for block in proposal.takes)
    unequal = _first_difference([proposal.exchanges for proposal in proposals])
    found: dict[str, str] = {}
    for name in names:
        reason = _why_not(name, proposals)
        if reason is None and unequal is not None:
            reason = f"ranks talk to each other in different orders: {unequal}"
        if reason is not None:
            found[name] = reason
    return found


def _in_full(refusal: Refusal) -> str:
    """Why a rank leaves a block, with the line of the model: what the other ranks say of it."""
    reason = refusal.reason.removesuffix(COLLECTIVES_STAY)
    return f"{reason} ({refusal.source_line})" if refusal.source_line else reason


def _why_not(name: str, proposals: Sequence[Proposal]) -> str | None:
    takers = [rank for rank, proposal in enumerate(proposals) if proposal.signatures(name)]
    for rank, proposal in enumerate(proposals):
        left = next((block for block in proposal.leaves if block.name == name), None)
        if left is not None:
            return f"rank {rank} cannot take it: {left.reason}"
        if rank not in takers:
            return f"rank {rank} does not see it in the graph that it runs here"
    if any(proposal.signatures(name) != proposals[0].signatures(name) for proposal in proposals):
        return UNEXPLAINED
    return None


def explain_difference(texts: Sequence[Sequence[str]], what: str) -> str | None:
    """Return where the `texts` of all ranks about `what` differ first, in words, or None if they are equal."""
    difference = _first_difference(texts)
    return None if difference is None else f"{what} differ between ranks: {difference}"


def _first_difference(texts: Sequence[Sequence[str]]) -> str | None:
    first = texts[0]
    for rank, text in enumerate(texts):
        if list(text) == list(first):
            continue
        for of_first, other in itertools.zip_longest(first, text, fillvalue="nothing more"):
            if of_first != other:
                return f"`{of_first}` on rank 0, `{other}` on rank {rank}"
    return None
