"""What a router remembers of a request until it is answered. Not frozen: this is the state of the machine."""

from __future__ import annotations

from moepass.runtime.serving.router.block_tables import PendingRun
from moepass.runtime.serving.router.decisions import Assignment
from moepass.runtime.serving.router.routable import Question, RoutableRequest


class OpenRequest:
    """A request that has no answer yet.

    `unfinished` counts its work that is not done, `unstarted` that which no rank has started, `waiting_flops` is what
    waits of it, without any sharing.
    """

    __slots__ = (
        *("is_closed", "key", "order", "prompt_flops", "questions", "request", "running"),
        *("unfinished", "unstarted", "waiting_flops"),
    )

    def __init__(
        self, request: RoutableRequest, key: float, order: int, prompt_flops: int, questions: tuple[Question, ...]
    ) -> None:
        self.request = request
        self.key = key
        self.order = order
        self.prompt_flops = prompt_flops
        self.questions = questions
        self.running: tuple[Running, ...] = ()
        self.unfinished = 1
        self.unstarted = 1
        self.waiting_flops = 0
        self.is_closed = False


class Work:
    """All of a request, or its prompt and some `questions`, that waits; `flops` without any sharing.

    `place` is that in the order of what waits: by its key, then by submission. Of one request, whose work has the same
    of both, the first part tells which work this is. It may be parked once in its life, to wait for a saturated rank.
    """

    __slots__ = ("attempt", "flops", "is_parked", "may_wait", "of", "place", "questions")

    def __init__(self, of: OpenRequest, questions: tuple[Question, ...], attempt: int, flops: int) -> None:
        self.of = of
        self.questions = questions
        self.attempt = attempt
        self.flops = flops
        self.place = (of.key, of.order, questions[0].parts[0] if questions else 0)
        self.may_wait = True
        self.is_parked = False


class Running:
    """Work that a rank has, and the blocks that it was promised with it."""

    __slots__ = ("assignment", "is_started", "promised", "work")

    def __init__(self, assignment: Assignment, work: Work, promised: PendingRun | None) -> None:
        self.assignment = assignment
        self.work = work
        self.promised = promised
        self.is_started = False
