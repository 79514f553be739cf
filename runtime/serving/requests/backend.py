"""What answers requests, as those who ask see it: a protocol, its state, and the errors that it raises."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Mapping
from typing import Literal, Protocol

from moepass.models.errors import InputError, MoepassError
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.view import BackendView

ServingState = Literal["starting", "ready", "draining", "no rank"]
VectorKind = Literal["class scores", "embedding"]


class QueueFullError(MoepassError):
    """The queue takes no more; try again after `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: float, **fields: object) -> None:
        super().__init__(message, **fields)  # type: ignore[arg-type]
        self.retry_after_seconds = retry_after_seconds


class NotServingError(MoepassError):
    """Nothing is answered now: the server starts or drains, or no rank is left. `value` is the state."""


class SequenceTooLongError(InputError):
    """A request can never be computed: `value` tokens or FLOPs where `expected` is the limit."""


class AnswerTimeoutError(MoepassError, TimeoutError):
    """A request was not answered within its `expected` seconds; it has been given up and takes no more work."""


async def answer_within(seconds: float, answer: Awaitable[Answer]) -> Answer:
    """What `answer` gives. Raises AnswerTimeoutError after `seconds`, and cancels it then."""
    try:
        return await asyncio.wait_for(answer, seconds)
    except AnswerTimeoutError:  # of the answer itself, which says more
        raise
    except TimeoutError:
        raise AnswerTimeoutError(f"no answer within {seconds:g} seconds", name="timeout", expected=seconds) from None


@dataclasses.dataclass(frozen=True, slots=True)
class BackendStatus:
    """What a backend can do and how it is.

    state                 requests are answered when it is "ready", and refused with NotServingError otherwise
    max_sequence_tokens   tokens of one sequence, from its first to the last that is computed
    vocabulary_size       token ids are below it
    predicts_tokens       the head gives next-token probabilities, so that `TokenRead` and `is_scored` are answered
    vector                what `TokenPiece.vector` is answered with, None where it is not
    class_names           the classes of class scores, in their order
    details               for people: how the model runs, how full its ranks are
    metrics               for machines: sums since the start, by name
    """

    state: ServingState
    max_sequence_tokens: int
    vocabulary_size: int
    predicts_tokens: bool = True
    vector: VectorKind | None = None
    class_names: tuple[str, ...] = ()
    details: Mapping[str, object] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Backend(Protocol):
    """Answers requests. One event loop calls it; every call may be cancelled, which frees the request's place."""

    def check_room(self) -> None:
        """Whether a call would be taken now; does not wait. Raises QueueFullError and NotServingError."""
        ...

    async def answer(
        self, request: Request, *, priority: int = 0, timeout_seconds: float, is_admitted: bool = False
    ) -> Answer:
        """The answer to `request`, as a whole. Of two that wait, the one with the lower `priority` runs first.

        `is_admitted`: `check_room` was asked for the call that this request is a part of, and a queue that the call
        itself has filled is no reason to refuse the rest of it.

        Raises QueueFullError, NotServingError, SequenceTooLongError, and AnswerTimeoutError after `timeout_seconds`.
        """
        ...

    def status(self) -> BackendStatus:
        """How it is now; does not wait."""
        ...

    async def view(self) -> BackendView:
        """What those see who look at it. It asks the ranks, and waits for them only shortly."""
        ...
