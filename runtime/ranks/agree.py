"""Comparison of named topics between ranks: one exchange, and one error if values differ.

A topic must have the same value on all ranks, or is a vote, which may differ and which all ranks learn. README.md says
when ranks use their store for this (`agree`), and when separate connections (`agree_on_run`).
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
from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous, no_check

# The largest whole number up to which float64 is exact; numbers are exchanged as float64.
LARGEST_EXACT = 2**53


@dataclasses.dataclass(frozen=True)
class Topic:
    """A value that ranks compare. Before a run a vote is a number, and ranks with the value None are not compared."""

    name: str
    value: Any
    remedy: str = ""
    is_vote: bool = False

    @functools.cached_property
    def number(self) -> float:
        """A number that represents the value before a run; NaN for a value of None."""
        if self.is_vote:
            return float(self.value)
        if self.value is None:
            return math.nan
        # 48 bits of a digest, which a float64 represents exactly. `repr` is complete, where `str` is for people.
        return float(int.from_bytes(hashlib.sha256(repr(self.value).encode()).digest()[:6], "big"))


class DisagreementError(PeerError):
    """Ranks have different `values` (by rank) of the topic `name`; `ranks` are the first two that differ."""

    def __init__(self, topic: str, values: Mapping[int, object], remedy: str) -> None:
        self.values = dict(sorted(values.items()))
        first = min(self.values)
        second = next(rank for rank, value in self.values.items() if value != self.values[first])
        super().__init__(
            f"ranks disagree on {topic}: {self.values[first]} on rank {first}, {self.values[second]} on rank {second}; "
            f"{remedy}",
            name=topic,
            ranks=(first, second),
        )


def check_equal(topic: str, values: Mapping[int, object], remedy: str) -> None:
    """Raise DisagreementError if ranks have different `values`, by rank. Ranks without a value are not compared."""
    if any(value != values[min(values)] for value in values.values()):
        raise DisagreementError(topic, values, remedy)


def agree(
    meeting: Rendezvous, title: str, topics: Sequence[Topic], check: Callable[[], None] = no_check
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each rank's votes, by name, once its topics were compared with rank 0's, in the order of arrival.

    Topics that determine the number of later topics come first: all ranks have the same topics up to the first
    difference. Errors call all topics together `title`. Raises DisagreementError, and the errors of
    `Rendezvous.exchange`, which takes `check`.
    """
    first: list[Topic] = []
    # Decoded as on the other ranks, so that tuples become lists.
    own_topics = msgspec.json.decode(msgspec.json.encode(list(topics)), type=list[Topic])
    for rank, theirs in meeting.exchange(title, own_topics, list[Topic], check):
        first = first or theirs
        for topic, peer_topic in zip(first, theirs, strict=False):
            if not topic.is_vote:
                check_equal(topic.name, {0: topic.value, rank: peer_topic.value}, topic.remedy)
        yield rank, {topic.name: topic.value for topic in theirs if topic.is_vote}


def agree_on_run(
    connections: Connections, topics: Sequence[Topic], deadline: float, late: str, lost: str
) -> list[list[float]]:
    """Return the votes of all ranks, by rank and in their order. Each rank has the same topics, in the same order.

    `Connections.exchange` describes `deadline`, `late` and `lost`. Raises PeerError. Every error, DisagreementError
    included, closes the connections, because a later run could receive messages of this one.
    """
    try:
        numbers_here = torch.tensor([topic.number for topic in topics], dtype=torch.float64)
        by_rank = [numbers.tolist() for numbers in connections.share(numbers_here, deadline, late, lost)]
        for position, topic in enumerate(topics):
            numbers = {rank: row[position] for rank, row in enumerate(by_rank) if not math.isnan(row[position])}
            if not topic.is_vote and len(set(numbers.values())) > 1:
                # All ranks reach this exchange, because all have the same numbers. It happens once: the error is final.
                words = dict(connections.rendezvous.exchange("value", str(topic.value), str))
                values = {rank: words[rank] for rank in numbers}
                if len(set(values.values())) == 1:  # two values may have equal texts, such as two orders of gathers
                    values = {rank: f"{words[rank]} (digest {int(number):012x})" for rank, number in numbers.items()}
                raise DisagreementError(topic.name, values, topic.remedy)
    except BaseException as error:
        # The connections are closed, because a later run could receive messages of this one.
        if not isinstance(error, PeerError):
            reason = f"rank {connections.rank} was interrupted while {lost}: {type(error).__name__}"
            connections.fail(PeerError(reason, rank=connections.rank))
            raise
        first_error = connections.fail(error)
        if str(first_error) != str(error):
            raise first_error from error
        raise
    return [[number for number, topic in zip(row, topics, strict=True) if topic.is_vote] for row in by_rank]
