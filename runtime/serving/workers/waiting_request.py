"""A request on its way: cut into what ranks are assigned, and put together again from their answers."""

from __future__ import annotations

import asyncio
import dataclasses

from moepass.runtime.serving.requests.answer import Answer, PieceAnswer, Usage
from moepass.runtime.serving.requests.request import Request, TokenPiece
from moepass.runtime.serving.router.decisions import Assignment


class WaitingRequest:
    """A request whose answer somebody waits for in `future`.

    `prompt_pieces` of its pieces, from the first, are the prompt of all assignments; the others are the parts that the
    router may give to several ranks.
    """

    def __init__(self, request: Request, prompt_pieces: int, future: asyncio.Future[Answer]) -> None:
        self.request, self.prompt_pieces, self.future = request, prompt_pieces, future
        self._pieces: dict[int, PieceAnswer] = {}
        self._cached_tokens: list[int] = []
        self._flops = 0

    def work_of(self, assignment: Assignment) -> Request:
        """What the rank of `assignment` computes, under the assignment's number.

        What is read of the prompt is answered by the assignment that has part 0 alone.
        """
        pieces = self.request.pieces
        numbers = self._numbers(assignment)
        if len(numbers) == len(pieces):
            return dataclasses.replace(self.request, id=str(assignment.number))
        place = {number: index for index, number in enumerate(numbers)}
        place[-1] = -1
        made = []
        for number in numbers:
            piece = dataclasses.replace(pieces[number], parent=place[pieces[number].parent])
            if number < self.prompt_pieces and not self._answers_prompt(assignment):
                piece = TokenPiece(piece.parent, piece.tokens)
            made.append(piece)
        return Request(str(assignment.number), tuple(made), self.request.salt)

    def add(self, assignment: Assignment, answer: Answer) -> None:
        numbers = self._numbers(assignment)
        keeps_prompt = self._answers_prompt(assignment)
        for number, piece in zip(numbers, answer.pieces, strict=True):
            if number >= self.prompt_pieces or keeps_prompt:
                self._pieces[number] = piece
        self._cached_tokens.append(answer.usage.cached_tokens)
        self._flops += answer.usage.flops

    def answer(self) -> Answer:
        """The whole answer, when all assignments are done. A prompt that several ranks had is counted once.

        Raises ValueError where a piece has no answer.
        """
        missing = [number for number in range(len(self.request.pieces)) if number not in self._pieces]
        if missing:
            raise ValueError(f"pieces {missing} of request {self.request.id} have no answer")
        tokens = sum(len(piece.tokens) for piece in self.request.pieces)
        pieces = tuple(self._pieces[number] for number in range(len(self.request.pieces)))
        return Answer(self.request.id, pieces, Usage(tokens, min(self._cached_tokens), self._flops))

    def _numbers(self, assignment: Assignment) -> list[int]:
        if assignment.parts is None:
            return list(range(len(self.request.pieces)))
        return [*range(self.prompt_pieces), *(self.prompt_pieces + part for part in assignment.parts)]

    def _answers_prompt(self, assignment: Assignment) -> bool:
        return assignment.parts is None or 0 in assignment.parts
