"""Requests, answers and errors of a backend in another process."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from moepass.models.errors import InputError, MoepassError
from moepass.runtime.serving.requests.answer import Answer, PieceAnswer, ReadAnswer, Usage
from moepass.runtime.serving.requests.backend import (
    AnswerTimeoutError,
    NotServingError,
    QueueFullError,
    SequenceTooLongError,
)
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead
from moepass.runtime.serving.workers.remote_answers import answer_encoded_request, decode_answer, encode_request

ASKED = Request("name", (TokenPiece(-1, np.arange(3, dtype=np.int32), (TokenRead(2, np.array([1], np.int32)),)),), b"s")


class OneAnswer:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.given: tuple[Request, int, float] | None = None

    async def answer(self, request: Request, *, priority: int = 0, timeout_seconds: float) -> Answer:
        self.given = (request, priority, timeout_seconds)
        if self.error is not None:
            raise self.error
        read = ReadAnswer(np.array([-0.5], np.float32), np.array([4], np.int32), np.array([-0.25], np.float32))
        return Answer(request.id, (PieceAnswer((read,)),), Usage(3, 1, 7))


def ask(backend: OneAnswer) -> Answer:
    return decode_answer(asyncio.run(answer_encoded_request(backend, encode_request(ASKED, -2, 1.5))))  # type: ignore[arg-type]


def test_request_and_answer_arrive_unchanged() -> None:
    backend = OneAnswer()
    answer = ask(backend)
    assert backend.given is not None
    request, *options = backend.given
    assert options == [-2, 1.5]
    assert (request.id, request.salt, request.pieces[0].tokens.tolist()) == ("name", b"s", [0, 1, 2])
    assert request.pieces[0].reads[0].index == 2
    (read,) = answer.pieces[0].reads
    assert (answer.id, answer.usage) == ("name", Usage(3, 1, 7))
    assert read.log_probabilities.tolist() == [-0.5]
    assert read.top_tokens.tolist() == [4]


@pytest.mark.parametrize("kind", [NotServingError, AnswerTimeoutError, SequenceTooLongError, InputError])
def test_errors_keep_their_kind(kind: type[MoepassError]) -> None:
    with pytest.raises(kind, match="the reason") as caught:
        ask(OneAnswer(kind("the reason", name="input")))
    assert type(caught.value) is kind
    assert caught.value.name == "input"


def test_a_full_queue_keeps_its_retry_time() -> None:
    with pytest.raises(QueueFullError) as caught:
        ask(OneAnswer(QueueFullError("full", retry_after_seconds=7.0)))
    assert caught.value.retry_after_seconds == 7.0


def test_other_errors_propagate() -> None:
    with pytest.raises(ZeroDivisionError):
        ask(OneAnswer(ZeroDivisionError()))
