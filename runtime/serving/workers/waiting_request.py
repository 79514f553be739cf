"""A request in progress: it is split into the work of its assignments, and their answers are merged."""

from __future__ import annotations

import asyncio
import dataclasses

from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.request_parts import RequestPart, chosen_parts, everything, merged_answer
from moepass.runtime.serving.router.assignments import Assignment


class WaitingRequest:
    """A request whose answer is awaited.

    Args:
        request: The request.
        prompt_pieces: The number of leading pieces that form the prompt of all assignments. The remaining pieces are
            the parts that the router may distribute over ranks. The assignment with part 0 also answers the prompt's
            reads.
        future: Receives the answer.
        arrived: The time of arrival. `began` is the time when a rank started the request, None before.
    """

    def __init__(self, request: Request, prompt_pieces: int, future: asyncio.Future[Answer], arrived: float) -> None:
        self.request, self.prompt_pieces, self.future = request, prompt_pieces, future
        self.arrived = arrived
        self.began: float | None = None
        self._answers: list[tuple[RequestPart, Answer]] = []

    def work_of(self, assignment: Assignment) -> Request:
        """Return the request that the rank of `assignment` computes; its id is the assignment's number."""
        name = str(assignment.number)
        if assignment.parts is None:
            return dataclasses.replace(self.request, id=name)
        return self._part(assignment).of(self.request, name)

    def add(self, assignment: Assignment, answer: Answer) -> None:
        """Store the answer of one assignment."""
        self._answers.append((self._part(assignment), answer))

    def answer(self) -> Answer:
        """Return the merged answer; call it when all assignments are done."""
        return merged_answer(self.request, self._answers)

    def _part(self, assignment: Assignment) -> RequestPart:
        if assignment.parts is None:
            return everything(self.request)
        answers_prompt = 0 in assignment.parts
        return chosen_parts(self.request, self.prompt_pieces, assignment.parts, answers_prompt=answers_prompt)
