"""A request on its way: cut into what ranks are assigned, and put together again from their answers."""

from __future__ import annotations

import asyncio
import dataclasses

from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.request_parts import RequestPart, chosen_parts, everything, merged_answer
from moepass.runtime.serving.router.decisions import Assignment


class WaitingRequest:
    """A request that `arrived` at that time, and whose answer somebody waits for in `future`. A rank `began` it.

    `prompt_pieces` of its pieces, from the first, are the prompt of all assignments; the others are the parts that the
    router may give to several ranks. What is read of the prompt is answered by the assignment that has part 0.
    """

    def __init__(self, request: Request, prompt_pieces: int, future: asyncio.Future[Answer], arrived: float) -> None:
        self.request, self.prompt_pieces, self.future = request, prompt_pieces, future
        self.arrived = arrived
        self.began: float | None = None
        self._answers: list[tuple[RequestPart, Answer]] = []

    def work_of(self, assignment: Assignment) -> Request:
        """What the rank of `assignment` computes, under the assignment's number."""
        name = str(assignment.number)
        if assignment.parts is None:
            return dataclasses.replace(self.request, id=name)
        return self._part(assignment).of(self.request, name)

    def add(self, assignment: Assignment, answer: Answer) -> None:
        self._answers.append((self._part(assignment), answer))

    def answer(self) -> Answer:
        """The whole answer, when all assignments are done."""
        return merged_answer(self.request, self._answers)

    def _part(self, assignment: Assignment) -> RequestPart:
        if assignment.parts is None:
            return everything(self.request)
        answers_prompt = 0 in assignment.parts
        return chosen_parts(self.request, self.prompt_pieces, assignment.parts, answers_prompt=answers_prompt)
