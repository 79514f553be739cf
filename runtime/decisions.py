"""Ranks compare which blocks they take, before the first of them waits for another in vain.

A block of expert parallelism that one rank takes and another leaves cannot run: one would wait at an AllToAll, the
other at the meeting where banks are brought together. Both come here first, and both find out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from moepass.runtime.rendezvous import PeerError, Rendezvous, skip_abandoned

NO_BORDER = "none"

MEETING = (
    "every rank of the group must run its compiled model once, and the same layers in the same order: a rank that "
    "found no block to take, or does not compile, stays behind"
)


@dataclasses.dataclass(frozen=True)
class Left:
    """A block that a rank leaves as it came."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Decisions:
    """The blocks of one graph that come for the first time on a rank, in its order.

    `border` says below how many tokens per rank runs are exchanged, in words.
    """

    taken: tuple[str, ...]
    left: tuple[Left, ...]
    border: str = NO_BORDER


def exchange_decisions(group: ProcessGroup, own: Decisions, timeout_s: float) -> list[Decisions]:
    """Those of all ranks; of this rank alone where others waited for it in vain, and neither takes a block.

    Raises PeerError naming the ranks that did not come within `timeout_s`.
    """
    rank, size, store = group.rank(), group.size(), c10d._get_process_group_store(group)
    if skip_abandoned(store, rank) and not own.taken:
        return [own]
    rendezvous = Rendezvous(store, rank, size, timeout_s, MEETING, is_dispensable=not own.taken)
    rendezvous.publish("list of blocks", own)
    found = dict(rendezvous.read_all("list of blocks", Decisions, check=lambda: None))
    return [found.get(other, own) for other in range(size)]


def check_decisions(decisions: Sequence[Decisions]) -> None:
    """Raises PeerError where a block is taken on some ranks only: the same error on every rank."""
    for taker, decided in enumerate(decisions):
        for rank, other in enumerate(decisions):
            stray = next((name for name in decided.taken if name not in other.taken), None)
            if stray is not None:
                left = {block.name: f"leaves it as it came, because {block.reason}" for block in other.left}
                raise PeerError(
                    f"ranks disagree on block {stray}: rank {taker} takes it, rank {rank} "
                    f"{left.get(stray, 'does not see it')}; run all ranks with the same code and inputs of one kind "
                    "first, or leave expert parallelism on all of them with options={'disable': ['localise']}"
                )
            if decided.taken and decided.border != other.border:
                raise PeerError(
                    f"ranks disagree on the tokens per rank below which runs are exchanged: {decided.border} on rank "
                    f"{taker}, {other.border} on rank {rank}; give all ranks the same hardware or all_to_all_below"
                )


__all__ = ["Decisions", "Left", "check_decisions", "exchange_decisions"]
