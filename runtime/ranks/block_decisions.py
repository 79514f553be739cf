"""Decisions of a process group on the blocks of expert parallelism that are taken out of its ranks' graphs.

Every rank that captured a graph with collectives comes here before it compiles, even with a graph without blocks: see
"Decisions when ranks compile" in README.md.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moepass.passes.ir.plan import LocalBlock
from moepass.passes.parallel.proposals import UNEXPLAINED, Proposal, blocks_to_leave, explain_difference
from moepass.runtime.ranks.agree import check_equal
from moepass.runtime.ranks.of_group import of_group
from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous, skip_abandoned
from moepass.runtime.system.forking import OwnerProcess
from moepass.runtime.torch_private import store_of

logger = logging.getLogger("moepass")

MEETING = (
    "every rank of the group must compile its model with backend='asyncep' and run it, the same layers in the same "
    "order: a rank that runs a model or a part of it uncompiled stays behind"
)

_STAYS = "all ranks left it unchanged in a graph that they compiled before, and leave it in all graphs since: "

# The texts behind a block's digests `experts` and `tokens`.
Texts = tuple[Sequence[str], Sequence[str]]


class BlockDecisions:
    """This rank's record of the blocks that the ranks of one group agreed to take or to leave."""

    def __init__(self) -> None:
        # Why a block is left, or None, by its name and signature. An empty signature means that a rank cannot take it.
        self._decided: dict[tuple[str, str], str | None] = {}
        # The signatures with which a block is taken, each with the shapes of its experts' weights, by the block's name.
        self._taken: dict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
        self._has_left_exchanges = False
        self._is_alone = False
        self._lock = threading.Lock()
        self._owner = OwnerProcess()

    def decide(
        self, group: ProcessGroup, own: Proposal, texts_of: Callable[[LocalBlock], Texts], timeout_s: float
    ) -> dict[str, str]:
        """Return the blocks of `own.takes` that all ranks leave unchanged, by name, with the reasons.

        The result is the same on all ranks. Waits for the other ranks if a block in `own` is not decided yet.
        `texts_of` returns the texts behind a block's digests, which explain a difference between ranks. Raises
        PeerError if ranks do not respond within `timeout_s`, or have different crossovers.
        """
        self._owner.check()
        with self._lock:
            keys = _keys(own)
            is_new = any(key not in self._decided and self._why_stays(key[0]) is None for key in keys)
            if is_new and not (self._is_alone and not own.takes):
                self._meet(group, own, texts_of, timeout_s)
            left = {name: self._why_left(name, signature) for name, signature in keys if signature}
            return {name: reason for name, reason in left.items() if reason is not None}

    def must_agree(self, own: Proposal) -> bool:
        """Return whether other ranks may run something else while this rank runs the graph that `own` was decided for.

        The result is the same on all ranks. A rank that could not compare a graph with others does not take part.
        """
        keys = _keys(own)
        if any(key not in self._decided for key in keys):
            return False
        if self._has_left_exchanges and self._taken:
            return True
        return any(self._is_ambiguous(name, signature) for name, signature in keys)

    def _is_ambiguous(self, name: str, signature: str) -> bool:
        """Return whether a rank may take another block of that name for this one.

        Weights of other shapes belong to another model, which no rank runs in place of this one: the model's own
        exchanges would fail as well.
        """
        taken = self._taken.get(name, {})
        return signature in taken and sum(weights == taken[signature] for weights in taken.values()) > 1

    def _meet(
        self, group: ProcessGroup, own: Proposal, texts_of: Callable[[LocalBlock], Texts], timeout_s: float
    ) -> None:
        rank, size, store = group.rank(), group.size(), store_of(group)
        if skip_abandoned(store, rank) and not own.takes:
            self._go_alone("they compared their blocks without this rank, which came later")
            return
        changed = self._change(own)
        is_optional = not own.takes and changed is None
        title = MEETING if changed is None else f"{MEETING}. On rank {rank} {changed}"
        try:
            rendezvous = Rendezvous(store, rank, size, timeout_s, title, is_optional)
            proposals = [proposal for _, proposal in rendezvous.exchange("list of blocks", own, Proposal)]
        except PeerError as error:
            if not is_optional:
                raise
            self._go_alone(str(error))
            return
        crossovers = {peer: proposal.crossover for peer, proposal in enumerate(proposals) if proposal.takes}
        check_equal(
            "the tokens per rank below which runs are exchanged",
            crossovers,
            "give all ranks the same hardware or all_to_all_below",
        )
        left = blocks_to_leave(proposals)
        unexplained = [name for name, reason in left.items() if reason == UNEXPLAINED]
        if unexplained:
            left |= self._explain(rendezvous, own, unexplained, texts_of)
        self._remember(proposals, left)

    @staticmethod
    def _explain(
        rendezvous: Rendezvous, own: Proposal, names: Sequence[str], texts_of: Callable[[LocalBlock], Texts]
    ) -> dict[str, str]:
        """Return the differences between ranks in the blocks with these names, all of which every rank takes."""
        texts = {block.name: texts_of(block) for block in own.takes if block.name in names}
        by_rank = [theirs for _, theirs in rendezvous.exchange("description of blocks", texts, dict[str, Texts])]
        reasons = {}
        for name in names:
            experts, tokens = ([texts[name][index] for texts in by_rank] for index in (0, 1))
            reasons[name] = (
                explain_difference(experts, "its experts compute differently: they")
                or explain_difference(
                    tokens, "its results are summed over ranks, so all must have the same tokens, but these"
                )
                or "ranks apply it a different number of times"
            )
        return reasons

    def _remember(self, proposals: Sequence[Proposal], left: Mapping[str, str]) -> None:
        keys = {key for proposal in proposals for key in _keys(proposal)}
        left = {name: reason for name, _ in keys if (reason := self._why_stays(name)) is not None} | dict(left)
        shapes = {name: proposal.weights(name) for proposal in proposals for name, _ in _keys(proposal)}
        for name, signature in keys:
            reason = left.get(name) or (None if signature else _why_left_by_all(name, proposals))
            self._decided[name, signature] = reason
            if reason is None:
                self._taken[name][signature] = shapes[name]
            else:
                self._has_left_exchanges = True
        # A rank that cannot take the block in another graph needs no second meeting.
        self._decided |= {(name, ""): reason for name, reason in left.items()}

    def _why_stays(self, name: str) -> str | None:
        """Return why a decided block of that name, never taken, stays unchanged, or None; the same on all ranks."""
        return None if name in self._taken else self._decided.get((name, ""))

    def _why_left(self, name: str, signature: str) -> str | None:
        stays = self._why_stays(name)
        if (name, signature) not in self._decided and stays is not None:
            return f"{_STAYS}{stays}"
        return self._decided.get((name, signature))

    def _change(self, own: Proposal) -> str | None:
        """Return the first difference between `own` and earlier decisions, in words; None if they agree."""
        for block in own.leaves:
            if block.name in self._taken:
                return (
                    f"block {block.name}, which all ranks took before, stays unchanged in this graph, because "
                    f"{block.reason}"
                )
        for name in dict.fromkeys(block.name for block in own.takes):
            if name in self._taken and " ".join(own.signatures(name)) not in self._taken[name]:
                return f"block {name}, which all ranks took before, computes otherwise in this graph"
        return None

    def _go_alone(self, reason: str) -> None:
        """Leave this rank's graphs unchanged from now on, so that it does not depend on other ranks."""
        self._is_alone = True
        logger.warning("blocks that run unchanged could not be compared with the other ranks: %s", reason)


def _why_left_by_all(name: str, proposals: Sequence[Proposal]) -> str:
    for rank, proposal in enumerate(proposals):
        for block in proposal.leaves:
            if block.name == name:
                return f"rank {rank} cannot take it: {block.reason}"
    return "no rank finds a block there"


def _keys(proposal: Proposal) -> list[tuple[str, str]]:
    """Return the keys of a proposal that need a decision, for all shapes that the graph is captured for."""
    names = dict.fromkeys(block.name for block in proposal.takes)
    keys = [(name, " ".join(proposal.signatures(name))) for name in names]
    keys += [(block.name, "") for block in proposal.leaves if block.name not in names]
    # Other ranks may find a block in the collectives of a graph where this rank finds none.
    return keys or [("\n".join(proposal.exchanges), "")]


# One BlockDecisions per process group.
decisions_of = of_group(lambda group: BlockDecisions())


def has_others(group: ProcessGroup) -> bool:
    """Return whether the group has other ranks to talk to. torch's fake groups only pretend to."""
    return group.size() > 1 and dist.get_backend(group) != "fake"
