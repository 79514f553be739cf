"""Waiting for an answer ends at the client's timeout, and a timeout error of the answer itself takes precedence."""

from __future__ import annotations

import asyncio

import pytest

from moepass.runtime.serving.requests.answer import Answer, Usage
from moepass.runtime.serving.requests.backend import AnswerTimeoutError, answer_within

ANSWER = Answer("a", (), Usage(1, 0, 1))


async def _after(seconds: float) -> Answer:
    await asyncio.sleep(seconds)
    return ANSWER


async def _failing() -> Answer:
    raise AnswerTimeoutError("no rank began it in time", name="timeout")


def test_an_answer_in_time_is_given() -> None:
    assert asyncio.run(answer_within(30, _after(0))) is ANSWER


def test_an_answer_that_is_late_is_an_error_that_says_how_late() -> None:
    with pytest.raises(AnswerTimeoutError, match=r"no answer within 0\.01 seconds") as raised:
        asyncio.run(answer_within(0.01, _after(30)))
    assert raised.value.expected == 0.01


def test_why_an_answer_cannot_come_in_time_is_told() -> None:
    with pytest.raises(AnswerTimeoutError, match="no rank began it"):
        asyncio.run(answer_within(30, _failing()))
