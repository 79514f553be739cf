"""The protocol between the HTTP routes and a backend that computes answers, with its status and errors."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Mapping
from typing import Literal, Protocol

from moepass.models.errors import InputError, MoepassError
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.view import BackendView

ServingState = Literal["starting", "ready", "draining", "no rank"]
VectorKind = Literal["class scores", "embedding"]
# The function that turns class scores into the values that routes return.
ClassActivation = Literal["softmax", "sigmoid", "identity"]


class QueueFullError(MoepassError):
    """The queue is full. A client may retry after `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: float, **fields: object) -> None:
        super().__init__(message, **fields)  # type: ignore[arg-type]
        self.retry_after_seconds = retry_after_seconds


@dataclasses.dataclass(frozen=True)
class FrontendLimits:
    """Limits above which new requests are refused.

    They bound the seconds that the ranks need for the requests that are not assigned yet, and the bytes of the tokens
    of all open requests.
    """

    waiting_seconds: float = math.inf
    open_bytes: float = math.inf

    def check(self, waiting_seconds: float, open_bytes: float) -> None:
        """Raise QueueFullError if the waiting work reaches a limit."""
        for name, value, limit in (
            ("seconds of work", waiting_seconds, self.waiting_seconds),
            ("bytes", open_bytes, self.open_bytes),
        ):
            if value >= limit:
                raise QueueFullError(
                    f"the queue is full: {value:.3g} {name} are waiting, and the limit is {limit:.3g}; try again later",
                    retry_after_seconds=max(1.0, math.ceil(waiting_seconds)),
                    name=name,
                    value=value,
                    expected=limit,
                )


class NotServingError(MoepassError):
    """The server is starting or draining, or has no rank left. `value` is the state."""


class SequenceTooLongError(InputError):
    """A request is too large to be computed at all: `value` tokens or FLOPs, with `expected` as the limit."""


class AnswerTimeoutError(MoepassError, TimeoutError):
    """A request was not answered within its `expected` seconds. It is cancelled."""


async def answer_within(seconds: float, answer: Awaitable[Answer]) -> Answer:
    """Return the result of `answer`. Cancel it after `seconds`, and raise AnswerTimeoutError."""
    try:
        return await asyncio.wait_for(answer, seconds)
    except AnswerTimeoutError:  # raised by the answer itself, with a more exact message
        raise
    except TimeoutError:
        raise AnswerTimeoutError(f"no answer within {seconds:g} seconds", name="timeout", expected=seconds) from None


@dataclasses.dataclass(frozen=True, slots=True)
class BackendStatus:
    """The abilities and the current state of a backend.

    Attributes:
        state: "ready" if requests are answered; otherwise they raise NotServingError.
        predicts_tokens: the head returns next-token probabilities, which `TokenRead` and `is_scored` need.
        vector: kind of the vectors that `TokenPiece.vector` returns, None if the model has none.
        class_activation: function of class scores whose values routes return.
        padding_token: token that class scores skip at the end of a sequence, None if there is none.
        details: descriptions for people, such as how the model runs.
        metrics: sums since the start, by name.
    """

    state: ServingState
    max_sequence_tokens: int
    vocabulary_size: int
    predicts_tokens: bool = True
    vector: VectorKind | None = None
    class_names: tuple[str, ...] = ()
    class_activation: ClassActivation = "softmax"
    padding_token: int | None = None
    details: Mapping[str, object] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Backend(Protocol):
    """A component that answers requests. One event loop calls it, and a cancelled call frees its slot in the queue."""

    def check_room(self) -> None:
        """Raise QueueFullError or NotServingError if a new call would be refused now. Does not wait."""

    async def answer(
        self, request: Request, *, priority: int = 0, timeout_seconds: float, is_admitted: bool = False
    ) -> Answer:
        """Return the complete answer to `request`.

        Of two waiting requests, the one with the lower number as its `priority` runs first.

        `is_admitted`: `check_room` has already passed for the call that this request belongs to. A queue that the call
        itself has filled must not refuse its remaining requests.

        Raises QueueFullError if too much work is waiting, NotServingError if no rank answers requests,
        SequenceTooLongError if a sequence is longer than the model takes, and AnswerTimeoutError after
        `timeout_seconds`.
        """

    def status(self) -> BackendStatus:
        """Return the abilities and the current state, without waiting."""

    async def view(self) -> BackendView:
        """Return the state of the ranks for the status page. Waits briefly for the ranks."""
