"""The ranks of a process group agree on each run: on its form, gathered weights or exchanged tokens, and on its layers.

An exchange needs all ranks, and each knows its own tokens only. So where a plan has a dispatch, every run begins with
a few bytes from every rank to every other, over gloo connections of the group's own: no device waits for them, and
every wait ends. So does every run where ranks may otherwise run different experts at a time (`RunCheck`), and every one
that relies on equal tokens (`replicas.py`). What follows is computed alike on all ranks, from what was agreed alone;
the last form of the group's runs, by which a form stays near the crossover, is a part of that.

Which of a rank's graphs takes part does not matter: ranks compile for different shapes.
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
from moepass.runtime.ranks.connections import Connections
from moepass.runtime.ranks.decisions import MEETING, decisions_of
from moepass.runtime.ranks.of_group import OfGroup
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.torch_private import store_of

logger = logging.getLogger("moepass")

# Hex digits of a digest that are compared and shown.
_DIGITS = 12
# Crossover of a graph that never exchanges.
_NO_CROSSOVER = -1
# Meeting number of a rank whose inputs were not compared yet.
NEVER_COMPARED = -1


@dataclasses.dataclass(frozen=True)
class RunVote:
    """A rank's vote on a run: its tokens in a block, the crossover of its graph, and the blocks that are about to run.

    `blocks` describe the blocks; equal blocks have equal descriptions on all ranks. If the crossover `is_estimated`,
    tokens and crossover are in units of it, so that it is 1. `compared_in` is the number of the meeting in which the
    present inputs of the run were compared with those of the other ranks; 0 if no comparison is needed.
    """

    tokens: float
    crossover_tokens: int
    hysteresis: float
    blocks: tuple[str, ...]
    is_estimated: bool = False
    compared_in: int = 0

    @staticmethod
    def of(dispatch: Dispatch, tokens: float, blocks: tuple[str, ...]) -> RunVote:
        """Estimated crossovers differ between ranks and shapes: their tokens count in parts of the crossover."""
        if dispatch.is_estimated:
            return RunVote(tokens / dispatch.crossover_tokens, 1, dispatch.hysteresis, blocks, is_estimated=True)
        return RunVote(tokens, dispatch.crossover_tokens, dispatch.hysteresis, blocks)

    def topics(self) -> list[Topic]:
        return [
            *_shared_topics(self.blocks, self.crossover_tokens, self.hysteresis),
            Topic("tokens", self.tokens, is_vote=True),
            Topic("the last comparison of inputs", self.compared_in, is_vote=True),
        ]


# Made again in every run otherwise.
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
    """This rank's part in the agreements of one process group. One run of the group agrees after the other."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._store = store_of(group)
        self._connections: Connections | None = None
        # The last form, by crossover and hysteresis: graphs with another crossover have their own.
        self._last: dict[tuple[int, float], str] = {}
        self._lock = threading.Lock()

    def compare(self, blocks: tuple[str, ...], timeout_s: float, compared_in: int = 0) -> bool:
        """Check that all ranks are about to run the same blocks. Raises PeerError as `agree` does.

        True where also all come with the same `compared_in`, and none with NEVER_COMPARED.
        """
        with self._lock:
            votes = self._exchange(RunVote(0.0, _NO_CROSSOVER, 0.0, blocks, compared_in=compared_in), timeout_s)
        return compared_in != NEVER_COMPARED and all(other == compared_in for _, other in votes)

    def agree(self, own: RunVote, timeout_s: float) -> str:
        """The form of the next run, the same on all ranks.

        Raises PeerError: the same text on all ranks where their crossovers differ, or the layers that they are about to
        run; one that names a rank which is gone, or did not come within `timeout_s`. Then no rank agrees any more.
        """
        with self._lock:
            tokens = sum(tokens for tokens, _ in self._exchange(own, timeout_s))
            crossover = own.crossover_tokens, own.hysteresis
            last = self._last.get(crossover)
            self._last[crossover] = form = choose_form(tokens, self.size, *crossover, last)
        if form != last:
            mean = tokens / self.size
            if own.is_estimated:
                logger.info("runs are %s from now on: %.6g of the estimated crossover", form, mean)
            else:
                text = "runs are %s from now on: %.6g tokens per rank, the crossover is %d"
                logger.info(text, form, mean, own.crossover_tokens)
        return form

    def _exchange(self, own: RunVote, timeout_s: float) -> list[list[float]]:
        """Tokens and last comparison of all ranks, by rank."""
        if self.size == 1:
            return [[own.tokens, own.compared_in]]
        connections = self._connect(timeout_s)
        connections.check()
        late = (
            f"did not come to agree on a run within {timeout_s:g} s. With all_to_all_below, where ranks add up the "
            "results of their experts (all_reduce), and where a group runs layers of one name with different experts, "
            "or some layers with exchanges and others without, every rank of the group calls its compiled model "
            "equally often, as the exchanges of the model itself need it: with no tokens if it has none, and with the "
            "tokens of all where they add up; give ranks that compile longer than others a longer timeout_s"
        )
        return agree_on_run(connections, own.topics(), time.monotonic() + timeout_s, late, "ranks agreed on a run")

    def _connect(self, timeout_s: float) -> Connections:
        if self._connections is None:
            if not torch.distributed.is_gloo_available():
                raise InputError(
                    "ranks agree on each run of these layers over gloo, which this build of torch lacks; leave "
                    "all_to_all_below out, let layers of one name compute the same, and disable "
                    "eliminate_expert_parallelism where ranks add up the results of their experts (all_reduce)"
                )
            rendezvous = Rendezvous(self._store, self.rank, self.size, timeout_s, MEETING)
            # Exchange once through the store first: gloo does not name a missing rank.
            deque(rendezvous.exchange("first word on a run", self.rank, int), maxlen=0)
            self._connections = Connections(rendezvous, "agreements", "agreements on runs")
        return self._connections


class RunCheck:
    """Compares before a run of one graph, where it has to be, which blocks the ranks run without their exchanges."""

    def __init__(self, group: Callable[[], ProcessGroup], own: Proposal, timeout_s: float) -> None:
        """`own` is what ranks decided on for the graph."""
        self._group = group
        self._own = own
        self._blocks = taken_blocks(own.takes)
        self._timeout_s = timeout_s
        self._is_told = False

    def __call__(self) -> None:
        """Raises PeerError where ranks are about to run different blocks, are gone or do not come."""
        group = self._group()
        if not decisions_of(group).must_agree(self._own):
            return
        if not self._is_told:
            self._is_told = True
            what = ", ".join(self._blocks) or "a graph with its exchanges"
            logger.info("from now on ranks compare each run of %s: the group has others that they could run", what)
        agreement_of(group).compare(self._blocks, self._timeout_s)


def taken_blocks(blocks: Sequence[LocalBlock]) -> tuple[str, ...]:
    """Names of `blocks` with a digest of their experts; the same text on all ranks."""
    return tuple(
        f"{block.name} ({block.form} {hashlib.sha256(block.signature.encode()).hexdigest()[:_DIGITS]})"
        for block in blocks
    )


# One Agreement per process group.
agreement_of = OfGroup(Agreement)
