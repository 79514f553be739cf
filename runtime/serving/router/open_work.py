"""The router's record of a request until it is answered. It is mutable: it is the state of the state machine."""

from __future__ import annotations

from moepass.runtime.serving.router.assignments import Assignment
from moepass.runtime.serving.router.block_tables import PendingRun
from moepass.runtime.serving.router.routable import RoutableRequest, RoutedQuestion

# Order in the queue: effective time of arrival, number of the submission, and index of the first part. The last one
# distinguishes work of the same request.
QueueKey = tuple[float, int, int]


class Work:
    """A request, or its prompt and some of its questions. It waits in the queue, or a rank has it as `assignment`.

    Attributes:
        queue_key: its order in the queue.
        flops: FLOPs without any sharing.
        siblings: all unfinished work of a request that was split, this work included; the siblings share the list. None
            if the request was not split.
        promised: the pending blocks of the assignment.
        may_wait: it has not been parked yet. Work is parked for a saturated rank at most once.
    """

    __slots__ = (
        *("assignment", "attempt", "flops", "is_closed", "is_parked", "is_started", "may_wait"),
        *("queue_key", "promised", "prompt_flops", "questions", "request", "siblings"),
    )

    def __init__(
        self,
        request: RoutableRequest,
        queue_key: QueueKey,
        prompt_flops: int,
        questions: tuple[RoutedQuestion, ...],
        flops: int,
        attempt: int = 1,
    ) -> None:
        self.request = request
        self.queue_key = queue_key
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

    def with_questions(self, questions: tuple[RoutedQuestion, ...]) -> Work:
        """Return some of its questions as separate work."""
        flops = self.prompt_flops + sum(question.flops for question in questions)
        queue_key = (*self.queue_key[:2], questions[0].parts[0])
        return Work(self.request, queue_key, self.prompt_flops, questions, flops, self.attempt)

    def unfinished(self) -> list[Work]:
        """Return all unfinished work of the request."""
        if self.siblings is not None:
            return list(self.siblings)
        return [] if self.is_closed else [self]
