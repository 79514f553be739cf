"""A request computed in parts, by several ranks or in several steps, and its answer put together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from moepass.runtime.serving.requests.answer import Answer, PieceAnswer, Usage
from moepass.runtime.serving.requests.request import Request, TokenPiece


@dataclasses.dataclass(frozen=True, slots=True)
class RequestPart:
    """Some pieces of a request, by number, ascending; with every piece its parents. `answered` of them are answered."""

    pieces: tuple[int, ...]
    answered: frozenset[int]

    def of(self, request: Request, name: str) -> Request:
        """The part as a request called `name`."""
        place = {number: index for index, number in enumerate(self.pieces)}
        place[-1] = -1
        made = []
        for number in self.pieces:
            piece = dataclasses.replace(request.pieces[number], parent=place[request.pieces[number].parent])
            made.append(piece if number in self.answered else TokenPiece(piece.parent, piece.tokens))
        return Request(name, tuple(made), request.salt)


def prompt_length(request: Request) -> int:
    """How many pieces, from the first, are a chain that all others hang on: 0 where the first pieces are siblings."""
    children = [0] * (len(request.pieces) + 1)  # the last one: of no piece
    for piece in request.pieces:
        children[piece.parent] += 1
    # Numbers ascend along a chain, and all else hangs on it, so a chain is a run of pieces from the first.
    length = 0
    while children[length - 1] == 1:
        length += 1
    return length


def halves(request: Request) -> tuple[RequestPart, RequestPart] | None:
    """Two parts of about as many tokens, each with the prompt; None where nothing branches."""
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
    """The answer to `request` from the answers to its parts. Tokens that several of them computed are counted once.

    Raises ValueError where a piece has no answer.
    """
    found: dict[int, PieceAnswer] = {}
    for part, answer in parts:
        pieces = zip(part.pieces, answer.pieces, strict=True)
        found.update((number, piece) for number, piece in pieces if number in part.answered)
    missing = [number for number in range(len(request.pieces)) if number not in found]
    if missing:
        raise ValueError(f"pieces {missing} of request {request.id} have no answer")
    usages = [answer.usage for _, answer in parts]
    usage = Usage(
        sum(len(piece.tokens) for piece in request.pieces),
        min(usage.cached_tokens for usage in usages),
        sum(usage.flops for usage in usages),
    )
    return Answer(request.id, tuple(found[number] for number in range(len(request.pieces))), usage)


def everything(request: Request) -> RequestPart:
    numbers = range(len(request.pieces))
    return RequestPart(tuple(numbers), frozenset(numbers))


def chosen_parts(request: Request, prompt: int, parts: Collection[int], *, answers_prompt: bool) -> RequestPart:
    """The first `prompt` pieces and those that follow them at places `parts`."""
    chain = tuple(range(prompt))
    others = tuple(prompt + part for part in sorted(parts))
    return RequestPart(chain + others, frozenset((chain if answers_prompt else ()) + others))
