"""Agreement of the ranks of a process group on each run: on its form and on its layers.

It takes place over gloo connections of the group, so no device waits for it: see "Two forms of one graph" in README.md.
Any of a rank's graphs may take part, because ranks compile for different shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch.distributed import ProcessGroup

from moepass.models.errors import InputError
from moepass.passes.ir.plan import Dispatch, LocalBlock
from moepass.passes.parallel.proposals import Proposal
from moepass.passes.schedule.dispatch import choose_form
from moepass.runtime.ranks.agree import Topic, agree_on_run
from moepass.runtime.ranks.block_decisions import MEETING, decisions_of
from moepass.runtime.ranks.connections import Connections
from moepass.runtime.ranks.of_group import of_group
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.torch_private import store_of

logger = logging.getLogger("moepass")

# The hex digits of a digest that ranks compare and errors show.
_DIGITS = 12
# The crossover of a graph that never exchanges.
_NO_CROSSOVER = -1
# The meeting number of a rank whose inputs were not compared yet.
NEVER_COMPARED = -1


@dataclasses.dataclass(frozen=True)
class RunVote:
    """A rank's vote on a run.

    `tokens` counts the rank's tokens in a block. Within the fraction `hysteresis` of the crossover the last form is
    kept. Equal blocks have equal descriptions on all ranks. If the crossover `is_estimated`, tokens and crossover are
    divided by the crossover, which becomes 1. `compared_in` is the number of the meeting in which the ranks compared
    their current inputs; 0 if no comparison is needed.
    """

    tokens: float
    crossover_tokens: int
    hysteresis: float
    blocks: tuple[str, ...]
    is_estimated: bool = False
    compared_in: int = 0

    @staticmethod
    def of(dispatch: Dispatch, tokens: float, blocks: tuple[str, ...]) -> RunVote:
        """Return the vote for `dispatch`. If its crossover is estimated, ranks vote with tokens divided by it."""
        if dispatch.is_estimated:
            return RunVote(tokens / dispatch.crossover_tokens, 1, dispatch.hysteresis, blocks, is_estimated=True)
        return RunVote(tokens, dispatch.crossover_tokens, dispatch.hysteresis, blocks)

    def topics(self) -> list[Topic]:
        """Return the topics of this vote."""
        return [
            *_shared_topics(self.blocks, self.crossover_tokens, self.hysteresis),
            Topic("tokens", self.tokens, is_vote=True),
            Topic("the last comparison of inputs", self.compared_in, is_vote=True),
        ]


# Cached, because every run needs the same topics.
@functools.lru_cache(maxsize=256)
def _shared_topics(blocks: tuple[str, ...], crossover_tokens: int, hysteresis: float) -> tuple[Topic, Topic]:
    crossover = "none" if crossover_tokens == _NO_CROSSOVER else crossover_tokens
    return (
        Topic(
            "the layers that they are about to run without exchanges",
            ", ".join(blocks) or "none",
            "all ranks must run the same layers, with the same activation functions, in the same order, equally often, "
            "and cut the model in the same graphs",
        ),
        Topic(
            "the tokens per rank below which runs are exchanged",
            f"{crossover} (hysteresis {hysteresis:g})",
            "give all ranks the same all_to_all_below",
        ),
    )


class Agreement:
    """This rank's side of the agreements of one process group. The group agrees on one run at a time."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._store = store_of(group)
        self._connections: Connections | None = None
        # The last form, by crossover and hysteresis, because graphs with another crossover choose separately.
        self._last: dict[tuple[int, float], str] = {}
        self._lock = threading.Lock()

    def compare(self, blocks: tuple[str, ...], timeout_s: float, compared_in: int = 0) -> bool:
        """Check that all ranks are about to run the same blocks. Raises PeerError as `agree` does.

        Returns True if all ranks also have the same `compared_in`, and it is not NEVER_COMPARED.
        """
        with self._lock:
            votes = self._exchange(RunVote(0.0, _NO_CROSSOVER, 0.0, blocks, compared_in=compared_in), timeout_s)
        return compared_in != NEVER_COMPARED and all(comparison == compared_in for _, comparison in votes)

    def agree(self, own: RunVote, timeout_s: float) -> str:
        """Return the form of the next run, the same on all ranks.

        Raises PeerError if ranks have different crossovers or layers (the same text on all ranks), or if a rank has
        ended or did not respond within `timeout_s`. After an error no rank can agree any more.
        """
        with self._lock:
            tokens = sum(tokens for tokens, _ in self._exchange(own, timeout_s))
            crossover = own.crossover_tokens, own.hysteresis
            last = self._last.get(crossover)
            self._last[crossover] = form = choose_form(tokens, self.size, *crossover, last)
        if form != last:
            unit = f"tokens per rank, the crossover is {own.crossover_tokens}"
            unit = "of the estimated crossover" if own.is_estimated else unit
            logger.info("runs are %s from now on: %.6g %s", form, tokens / self.size, unit)
        return form

    def _exchange(self, own: RunVote, timeout_s: float) -> list[list[float]]:
        """Return tokens and last comparison of all ranks, by rank."""
        if self.size == 1:
            return [[own.tokens, own.compared_in]]
        connections = self._connect(timeout_s)
        connections.check()
        late = (
            f"did not agree on a run within {timeout_s:g} s. Every rank of the group must call its compiled model "
            "equally often. A rank without work calls it with no tokens, or, if ranks sum the results of their experts "
            "(all_reduce), with the same tokens as the other ranks. Ranks agree on each run if all_to_all_below is "
            "set, with all_reduce, if layers with the same name have different experts, or if only some layers keep "
            "their exchanges. If some ranks compile longer than others, set a longer timeout_s"
        )
        return agree_on_run(connections, own.topics(), time.monotonic() + timeout_s, late, "ranks agreed on a run")

    def _connect(self, timeout_s: float) -> Connections:
        if self._connections is None:
            if not torch.distributed.is_gloo_available():
                raise InputError(
                    "ranks agree on each run of these layers over gloo, which this build of torch lacks. So that they "
                    "need not agree, do not use all_to_all_below, give layers with the same name the same experts, and "
                    "disable eliminate_expert_parallelism if ranks sum the results of their experts (all_reduce)"
                )
            rendezvous = Rendezvous(self._store, self.rank, self.size, timeout_s, MEETING)
            # Ranks first exchange a record through the store, because gloo does not name a missing rank.
            deque(rendezvous.exchange("first word on a run", self.rank, int), maxlen=0)
            self._connections = Connections(rendezvous, "agreements", "agreements on runs")
        return self._connections


class RunCheck:
    """A check before each run of one graph, if necessary, that ranks run the same blocks without their exchanges.

    `own` is this rank's proposal, which the ranks decided on.
    """

    def __init__(self, group: Callable[[], ProcessGroup], own: Proposal, timeout_s: float) -> None:
        self._group = group
        self._own = own
        self._blocks = taken_blocks(own.takes)
        self._timeout_s = timeout_s
        self._has_logged = False

    def __call__(self) -> None:
        """Raise PeerError if ranks are about to run different blocks, have ended or do not respond."""
        group = self._group()
        if not decisions_of(group).must_agree(self._own):
            return
        if not self._has_logged:
            self._has_logged = True
            blocks = ", ".join(self._blocks) or "a graph with its exchanges"
            logger.info(
                "from now on ranks compare each run of %s: the group has other graphs that a rank could run", blocks
            )
        agreement_of(group).compare(self._blocks, self._timeout_s)


def taken_blocks(blocks: Sequence[LocalBlock]) -> tuple[str, ...]:
    """Return the names of `blocks` with a digest of their experts; the same texts on all ranks."""
    return tuple(
        f"{block.name} ({block.form} {hashlib.sha256(block.signature.encode()).hexdigest()[:_DIGITS]})"
        for block in blocks
    )


# One Agreement per process group.
agreement_of = of_group(Agreement)
