"""Decisions of a router: plain records."""

from __future__ import annotations

from typing import NamedTuple


class Assignment(NamedTuple):
    """A request, or some of its questions, assigned to a rank.

    Attributes:
        number: unique number of the assignment. Later events refer to it, so that a late report is never mistaken for
            one about another assignment.
        parts: ascending indices of the assigned parts; None for the complete request. Every assignment computes the
            prompt or takes it from the cache. The assignment with part 0 answers the reads of the prompt itself.
        shared_tokens: leading tokens of the prompt that the rank holds, or will hold because of other assignments.
        flops: FLOPs added to the load of the rank.
        attempt: 1, or 2 after the loss of a rank.
    """

    number: int
    request_id: str
    rank: int
    parts: tuple[int, ...] | None
    shared_tokens: int
    flops: int
    attempt: int


class Withdrawal(NamedTuple):
    """A request that ended without an answer, and its assignments that ranks no longer need to compute."""

    request_id: str
    assignments: tuple[Assignment, ...]


class Round(NamedTuple):
    """The decisions of one call of `route`. Expired requests had passed their deadline before the round began."""

    assignments: list[Assignment]
    expired: list[Withdrawal]


class RankLoss(NamedTuple):
    """The consequences of the loss of a rank.

    Attributes:
        rerun: ids of requests that wait again, completely or in part.
        failed: requests that lost a second rank.
    """

    rerun: tuple[str, ...]
    failed: tuple[Withdrawal, ...]
