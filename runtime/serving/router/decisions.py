"""What a router answers to events: plain records."""

from __future__ import annotations

from typing import NamedTuple


class Assignment(NamedTuple):
    """A request, or some of its questions, goes to a rank.

    number         of this assignment. Later events name it, so that what a rank reports late is never mistaken
    parts          indices of the parts that it is about, ascending; None: all of the request. Every one computes the
                   prompt or takes it from a cache; what is read of the prompt itself is answered by the assignment
                   that holds part 0
    shared_tokens  leading tokens of the prompt that the rank holds, or has been promised by others
    flops          what it adds to the load of the rank
    attempt        1, or 2 after a lost rank
    """

    number: int
    request_id: str
    rank: int
    parts: tuple[int, ...] | None
    shared_tokens: int
    flops: int
    attempt: int


class Withdrawal(NamedTuple):
    """A request that ended before its answer, and the assignments of it that ranks need no longer compute."""

    request_id: str
    assignments: tuple[Assignment, ...]


class Round(NamedTuple):
    """What one call of `route` decided. Expired requests were over before the round began."""

    assignments: list[Assignment]
    expired: list[Withdrawal]


class RankLoss(NamedTuple):
    """`rerun`: ids of the requests that wait again, wholly or in part. `failed`: those that have lost a second rank."""

    rerun: tuple[str, ...]
    failed: tuple[Withdrawal, ...]
