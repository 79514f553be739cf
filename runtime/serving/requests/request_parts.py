"""Splitting a request into parts for several ranks or steps, and merging their answers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from moepass.runtime.serving.requests.answer import Answer, PieceAnswer, Usage
from moepass.runtime.serving.requests.request import Request, TokenPiece


@dataclasses.dataclass(frozen=True, slots=True)
class RequestPart:
    """Ascending indices of some pieces of a request, parents included, and of those that this part answers."""

    pieces: tuple[int, ...]
    answered: frozenset[int]

    def of(self, request: Request, name: str) -> Request:
        """Return this part of `request` as a request with the id `name`."""
        if len(self.answered) == len(request.pieces):
            return dataclasses.replace(request, id=name)
        indices = {number: index for index, number in enumerate(self.pieces)}
        indices[-1] = -1
        pieces = []
        for number in self.pieces:
            piece = dataclasses.replace(request.pieces[number], parent=indices[request.pieces[number].parent])
            pieces.append(piece if number in self.answered else TokenPiece(piece.parent, piece.tokens))
        return Request(name, tuple(pieces), request.salt)


def prompt_and_branches(request: Request) -> tuple[int, list[list[int]]]:
    """Return how many leading pieces form the prompt, a chain that all other pieces follow, and the other pieces.

    The prompt is empty if the first pieces are siblings. Each branch is a piece that follows the prompt directly, with
    all its descendants, ascending.
    """
    children = [0] * (len(request.pieces) + 1)  # index -1 counts the roots
    for piece in request.pieces:
        children[piece.parent] += 1
    # Indices ascend along a chain, and all other pieces follow it, so the chain is a run of leading pieces.
    prompt = 0
    while children[prompt - 1] == 1:
        prompt += 1
    branches: list[list[int]] = []
    branch_of: dict[int, list[int]] = {}
    for number in range(prompt, len(request.pieces)):
        parent = request.pieces[number].parent
        if parent < prompt:
            branches.append([])
        branch_of[number] = branches[-1] if parent < prompt else branch_of[parent]
        branch_of[number].append(number)
    return prompt, branches


def request_part(prompt: int, behind: Iterable[int], *, answers_prompt: bool) -> RequestPart:
    """Return the part with the first `prompt` pieces, answered if `answers_prompt`, and those `behind` them."""
    chain, pieces = tuple(range(prompt)), tuple(sorted(behind))
    return RequestPart(chain + pieces, frozenset(chain + pieces if answers_prompt else pieces))


def halves(request: Request) -> tuple[RequestPart, RequestPart] | None:
    """Return two parts with about equally many tokens, each with the prompt; None if nothing branches."""
    prompt, branches = prompt_and_branches(request)
    if len(branches) < 2:
        return None
    sizes = [sum(len(request.pieces[number].tokens) for number in branch) for branch in branches]
    count, taken, total = 1, sizes[0], sum(sizes)
    while count < len(branches) - 1 and 2 * taken + sizes[count] <= total:
        taken += sizes[count]
        count += 1
    first, second = (itertools.chain.from_iterable(half) for half in (branches[:count], branches[count:]))
    return request_part(prompt, first, answers_prompt=True), request_part(prompt, second, answers_prompt=False)


def merged_answer(request: Request, parts: Sequence[tuple[RequestPart, Answer]]) -> Answer:
    """Return the answer to `request` from the answers to its parts. Tokens that several parts computed count once."""
    answers: dict[int, PieceAnswer] = {}
    for request_part, answer in parts:
        pieces = zip(request_part.pieces, answer.pieces, strict=True)
        answers.update((number, piece) for number, piece in pieces if number in request_part.answered)
    usages = [answer.usage for _, answer in parts]
    usage = Usage(
        sum(len(piece.tokens) for piece in request.pieces),
        min(usage.cached_tokens for usage in usages),
        sum(usage.flops for usage in usages),
    )
    return Answer(request.id, tuple(answers[number] for number in range(len(request.pieces))), usage)
