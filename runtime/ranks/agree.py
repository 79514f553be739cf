"""Ranks compare what they have: named topics, one exchange, and one error where their values differ.

A topic has the same value on all ranks, or is a vote, which may differ and which all ranks learn. Topics go through the
store where ranks meet while they load or compile (`agree`), and as one number each over connections of their own before
a run (`agree_on_run`). Either way every rank gets the same error, which names the topic, the ranks and their values.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from moepass.runtime.ranks.connections import Connections
from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous, wait_for_nothing

# Whole numbers up to here are exact on their way, as float64.
LARGEST_EXACT = 2**53


@dataclasses.dataclass(frozen=True)
class Topic:
    """A value that ranks compare, with its name; `remedy` is what to do if values differ.

    Before a run a vote is a number, and a rank whose value is None has no part in the comparison.
    """

    name: str
    value: Any
    remedy: str = ""
    is_vote: bool = False

    @functools.cached_property
    def number(self) -> float:
        """A number that represents the value before a run; NaN if there is none."""
        if self.is_vote:
            return float(self.value)
        if self.value is None:
            return math.nan
        # 48 bits, which a float64 holds exactly, of what `repr` says: all of it, where `str` is for people.
        return float(int.from_bytes(hashlib.sha256(repr(self.value).encode()).digest()[:6], "big"))


class DisagreementError(PeerError):
    """Ranks have different `values` (by rank) of what `name` says; `ranks` are the first two that differ."""

    def __init__(self, topic: str, values: Mapping[int, object], remedy: str) -> None:
        self.values = dict(sorted(values.items()))
        first = min(self.values)
        other = next(rank for rank, value in self.values.items() if value != self.values[first])
        super().__init__(
            f"ranks disagree on {topic}: {self.values[first]} on rank {first}, {self.values[other]} on rank {other}; "
            f"{remedy}",
            name=topic,
            ranks=(first, other),
        )


def check_equal(topic: str, values: Mapping[int, object], remedy: str) -> None:
    """Raises DisagreementError where ranks have different `values`; those that have none are not asked."""
    if any(value != values[min(values)] for value in values.values()):
        raise DisagreementError(topic, values, remedy)


def agree(
    meeting: Rendezvous, what: str, topics: Sequence[Topic], check: Callable[[], None] = wait_for_nothing
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The votes of each rank, by name, once it was compared with rank 0: one rank after the other, as they come.

    Topics that say how many others there are come first: up to the first difference, all ranks have the same. Raises
    DisagreementError, and what `Rendezvous.exchange` raises; `what` all topics are together, and `check` are its.
    """
    first: list[Topic] = []
    # As they come to the other ranks: tuples become lists.
    own = msgspec.json.decode(msgspec.json.encode(list(topics)), type=list[Topic])
    for rank, theirs in meeting.exchange(what, own, list[Topic], check):
        first = first or theirs
        for topic, other in zip(first, theirs, strict=False):
            if not topic.is_vote:
                check_equal(topic.name, {0: topic.value, rank: other.value}, topic.remedy)
        yield rank, {topic.name: topic.value for topic in theirs if topic.is_vote}


def agree_on_run(
    connections: Connections, topics: Sequence[Topic], deadline: float, late: str, lost: str
) -> list[list[float]]:
    """The votes of all ranks, by rank and in their order. Each rank comes with the same topics, in one order.

    Raises what `Connections.exchange` raises, which takes `deadline`, `late` and `lost`; DisagreementError, after which
    the connections have failed, since the ranks do not run the same.
    """
    try:
        own = torch.tensor([topic.number for topic in topics], dtype=torch.float64)
        by_rank = [numbers.tolist() for numbers in connections.share(own, deadline, late, lost)]
        for place, topic in enumerate(topics):
            numbers = {rank: found[place] for rank, found in enumerate(by_rank) if not math.isnan(found[place])}
            if not topic.is_vote and len(set(numbers.values())) > 1:
                # All ranks come here, since all have the same numbers; and only once, since this is an error for good.
                words = dict(connections.rendezvous.exchange("value", str(topic.value), str))
                values = {rank: words[rank] for rank in numbers}
                if len(set(values.values())) == 1:  # as of two orders of equally many gathers
                    values = {rank: f"{words[rank]} (digest {int(number):012x})" for rank, number in numbers.items()}
                raise DisagreementError(topic.name, values, topic.remedy)
    except BaseException as error:
        # A later run would take messages that are still on their way for its own.
        if not isinstance(error, PeerError):
            reason = f"rank {connections.rank} was interrupted while {lost}: {type(error).__name__}"
            connections.fail(PeerError(reason, rank=connections.rank))
            raise
        told = connections.fail(error)
        if str(told) != str(error):
            raise told from error
        raise
    return [[number for number, topic in zip(found, topics, strict=True) if topic.is_vote] for found in by_rank]
