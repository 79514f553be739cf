"""What a router remembers of a request until it is answered. Not frozen: this is the state of the machine."""

from __future__ import annotations

from moepass.runtime.serving.router.block_tables import PendingRun
from moepass.runtime.serving.router.decisions import Assignment
from moepass.runtime.serving.router.routable import RoutableRequest, RoutedQuestion

# Where something stands in the order of what waits: by its key, then by submission. Work of one request has the same of
# both; its first part tells which work it is.
Place = tuple[float, int, int]


class Work:
    """All of a request, or its prompt and some `questions`. It waits, or a rank has it: then it has an `assignment`.

    `flops` are without any sharing. Once in its life it may be parked, to wait for a saturated rank. Work of a request
    that was split has `siblings`: all work of that request that is not done, itself among it, in one list for all.
    """

    __slots__ = (
        *("assignment", "attempt", "flops", "is_closed", "is_parked", "is_started", "may_wait"),
        *("place", "promised", "prompt_flops", "questions", "request", "siblings"),
    )

    def __init__(
        self,
        request: RoutableRequest,
        place: Place,
        prompt_flops: int,
        questions: tuple[RoutedQuestion, ...],
        flops: int,
        attempt: int = 1,
    ) -> None:
        self.request = request
        self.place = place
        self.prompt_flops = prompt_flops
        self.questions = questions
        self.flops = flops
        self.attempt = attempt
        self.siblings: list[Work] | None = None
        self.assignment: Assignment | None = None
        self.promised: PendingRun | None = None
        self.is_started = False
        self.may_wait = True
        self.is_parked = False
        self.is_closed = False

    def part(self, questions: tuple[RoutedQuestion, ...]) -> Work:
        """Some of its questions, as work of its own."""
        flops = self.prompt_flops + sum(question.flops for question in questions)
        place = (*self.place[:2], questions[0].parts[0])
        return Work(self.request, place, self.prompt_flops, questions, flops, self.attempt)

    def unfinished(self) -> list[Work]:
        """All work of the request that is not done."""
        if self.siblings is not None:
            return list(self.siblings)
        return [] if self.is_closed else [self]
