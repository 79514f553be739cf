"""What a router remembers of a request until it is answered. Not frozen: this is the state of the machine."""

from __future__ import annotations

from moepass.runtime.serving.router.block_tables import PendingRun
from moepass.runtime.serving.router.decisions import Assignment
from moepass.runtime.serving.router.routable import Question, RoutableRequest

# Where something stands in the order of what waits: by its key, then by submission. Work of one request has the same of
# both; its first part tells which work it is.
Place = tuple[float, int, int]


class OpenRequest:
    """A request that has no answer yet.

    `running` is its work that ranks have; `unfinished` counts its work that is not done, `unstarted` that which no rank
    has started; `waiting_flops` is what waits of it, without any sharing.
    """

    __slots__ = (
        *("is_closed", "place", "prompt_flops", "questions", "request", "running"),
        *("unfinished", "unstarted", "waiting_flops"),
    )

    def __init__(
        self, request: RoutableRequest, place: Place, prompt_flops: int, questions: tuple[Question, ...]
    ) -> None:
        self.request = request
        self.place = place
        self.prompt_flops = prompt_flops
        self.questions = questions
        self.running: tuple[Work, ...] = ()
        self.unfinished = 1
        self.unstarted = 1
        self.waiting_flops = 0
        self.is_closed = False


class Work:
    """All of a request, or its prompt and some `questions`; `flops` without any sharing.

    It waits until it has an `assignment`, and with that is promised the blocks of its prompt. Once in its life it may
    be parked, to wait for a saturated rank.
    """

    __slots__ = (
        *("assignment", "attempt", "flops", "is_parked", "is_started", "may_wait"),
        *("of", "place", "promised", "questions"),
    )

    assignment: Assignment
    promised: PendingRun | None

    def __init__(self, of: OpenRequest, questions: tuple[Question, ...], attempt: int, flops: int) -> None:
        self.of = of
        self.questions = questions
        self.attempt = attempt
        self.flops = flops
        self.place = (*of.place[:2], questions[0].parts[0]) if questions else of.place
        self.may_wait = True
        self.is_parked = False
        self.is_started = False
