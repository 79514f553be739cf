"""Splitting a request into parts for several ranks or steps, and merging their answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from moepass.runtime.serving.requests.answer import Answer, PieceAnswer, Usage
from moepass.runtime.serving.requests.request import Request, TokenPiece


@dataclasses.dataclass(frozen=True, slots=True)
class RequestPart:
    """A subset of the pieces of a request.

    Attributes:
        pieces: ascending indices of the pieces; the parents of a piece are included.
        answered: the pieces whose answers this part provides.
    """

    pieces: tuple[int, ...]
    answered: frozenset[int]

    def of(self, request: Request, name: str) -> Request:
        """Return this part of `request` as a request with the id `name`."""
        indices = {number: index for index, number in enumerate(self.pieces)}
        indices[-1] = -1
        pieces = []
        for number in self.pieces:
            piece = dataclasses.replace(request.pieces[number], parent=indices[request.pieces[number].parent])
            pieces.append(piece if number in self.answered else TokenPiece(piece.parent, piece.tokens))
        return Request(name, tuple(pieces), request.salt)


def prompt_length(request: Request) -> int:
    """Return how many leading pieces form a chain that all other pieces follow; 0 if the first pieces are siblings."""
    children = [0] * (len(request.pieces) + 1)  # index -1 counts the roots
    for piece in request.pieces:
        children[piece.parent] += 1
    # Indices ascend along a chain, and all other pieces follow it, so the chain is a run of leading pieces.
    length = 0
    while children[length - 1] == 1:
        length += 1
    return length


def halves(request: Request) -> tuple[RequestPart, RequestPart] | None:
    """Return two parts with about equally many tokens, each with the prompt; None if nothing branches."""
    prompt = prompt_length(request)
    roots: list[int] = []
    tokens: dict[int, int] = {}
    for number, piece in enumerate(request.pieces):
        is_root = number >= prompt and piece.parent < prompt
        roots.append(number if is_root or number < prompt else roots[piece.parent])
        if number >= prompt:
            tokens[roots[number]] = tokens.get(roots[number], 0) + len(piece.tokens)
    if len(tokens) < 2:
        return None
    first: set[int] = set()
    taken, total = 0, sum(tokens.values())
    for root, count in tokens.items():
        if first and (2 * taken + count > total or len(first) == len(tokens) - 1):
            break
        first.add(root)
        taken += count
    chain = tuple(range(prompt))
    sides = [
        tuple(number for number in range(prompt, len(request.pieces)) if (roots[number] in first) == is_first)
        for is_first in (True, False)
    ]
    return (
        RequestPart(chain + sides[0], frozenset(chain + sides[0])),
        RequestPart(chain + sides[1], frozenset(sides[1])),
    )


def merged_answer(request: Request, parts: Sequence[tuple[RequestPart, Answer]]) -> Answer:
    """Return the answer to `request` from the answers to its parts. Tokens that several parts computed count once.

    Raises:
        ValueError: a piece has no answer.
    """
    answers: dict[int, PieceAnswer] = {}
    for request_part, answer in parts:
        pieces = zip(request_part.pieces, answer.pieces, strict=True)
        answers.update((number, piece) for number, piece in pieces if number in request_part.answered)
    missing = [number for number in range(len(request.pieces)) if number not in answers]
    if missing:
        raise ValueError(f"request {request.id}: pieces {missing} have no answer")
    usages = [answer.usage for _, answer in parts]
    usage = Usage(
        sum(len(piece.tokens) for piece in request.pieces),
        min(usage.cached_tokens for usage in usages),
        sum(usage.flops for usage in usages),
    )
    return Answer(request.id, tuple(answers[number] for number in range(len(request.pieces))), usage)


def everything(request: Request) -> RequestPart:
    """Return the part with all pieces of `request`."""
    numbers = range(len(request.pieces))
    return RequestPart(tuple(numbers), frozenset(numbers))


def chosen_parts(request: Request, prompt: int, parts: Collection[int], *, answers_prompt: bool) -> RequestPart:
    """Return the first `prompt` pieces and the pieces `prompt + part` for each of `parts`.

    `answers_prompt` says whether this part also answers the pieces of the prompt.
    """
    chain = tuple(range(prompt))
    pieces = tuple(prompt + index for index in sorted(parts))
    return RequestPart(chain + pieces, frozenset((chain if answers_prompt else ()) + pieces))
