"""What a router is told of a request: sizes and hashes of blocks, no tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.requests.request import Request, Tokens
from moepass.runtime.serving.requests.request_parts import prompt_length

# The hash of a block covers all tokens before it, so equal hashes mean equal prefixes.
BlockHash = int | bytes


class FlopsFormula(Protocol):
    def flops(self, prefix_tokens: int, new_tokens: int) -> int:
        """Exact FLOPs of `new_tokens` tokens behind `prefix_tokens` that are there already.

        Never falls in either argument, and adds up: `flops(0, p) + flops(p, n) == flops(0, p + n)`.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class RoutablePart:
    """`tokens` tokens behind those of the part `parent`, an index of an earlier part; -1: behind the prompt."""

    parent: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class RoutableRequest:
    """One request: a prompt, and the tree of its parts behind it. Times are seconds of one clock, any clock.

    blocks         hashes of the prompt's blocks of BLOCK_TOKENS tokens, first tokens first. Only those that may come
                   from a cache: where nothing follows the prompt, its last token is computed in any case
    prompt_tokens  tokens of the prompt; 0 where the parts have none in common
    parts          what follows the prompt: questions and their labels. A part that hangs on the prompt is a question;
                   different ranks may get different questions, but never parts of one
    shares_prefixes  False: ranks compute every way through the tree by itself, from its first token to its last. Then
                   there are no blocks and no prompt where there are parts: those that hang on it begin with it
    priority       a level is worth as much as a router's `priority_seconds` of waiting; higher comes first
    deadline       when it must have been started; it expires if any of it has not
    arrived        when it was submitted

    Raises InputError for a request without tokens, more blocks than its prompt has, a part without tokens or whose
    parent is no earlier part, and times that are no numbers.
    """

    id: str
    blocks: tuple[BlockHash, ...]
    prompt_tokens: int
    parts: tuple[RoutablePart, ...] = ()
    priority: int = 0
    deadline: float = math.inf
    arrived: float = 0.0
    shares_prefixes: bool = True

    def __post_init__(self) -> None:
        least = 0 if self.parts else 1
        if self.prompt_tokens < least:
            raise InputError(
                f"the prompt of request {self.id} has {self.prompt_tokens} tokens; at least {least} are needed",
                name="prompt_tokens",
                value=self.prompt_tokens,
                expected=least,
            )
        most = (self.prompt_tokens - least) // BLOCK_TOKENS
        if len(self.blocks) > most:
            raise InputError(
                f"request {self.id} has {len(self.blocks)} blocks; at most {most} of its {self.prompt_tokens} tokens "
                f"can come from a cache",
                name="blocks",
                value=len(self.blocks),
                expected=most,
            )
        for number, part in enumerate(self.parts):
            if part.tokens < 1:
                raise InputError(f"part {number} of request {self.id} has no tokens", name="tokens", value=part.tokens)
            if not -1 <= part.parent < number:
                raise InputError(
                    f"part {number} of request {self.id} has parent {part.parent}; it must be an earlier part, or -1",
                    name="parent",
                    value=part.parent,
                    expected=range(-1, number),
                )
        if not math.isfinite(self.arrived):
            raise InputError(f"request {self.id} arrived at {self.arrived}", name="arrived", value=self.arrived)
        if math.isnan(self.deadline):
            raise InputError(f"the deadline of request {self.id} is no number", name="deadline", value=self.deadline)


@dataclasses.dataclass(frozen=True, slots=True)
class RoutedQuestion:
    """A part that hangs on the prompt with all that hangs on it: their indices, ascending, and their FLOPs."""

    parts: tuple[int, ...]
    flops: int


def questions_of(request: RoutableRequest, formula: FlopsFormula) -> tuple[RoutedQuestion, ...]:
    """The questions of a request, in order. What they cost does not depend on where the prompt comes from."""
    ends: list[int] = []
    roots: list[int] = []
    members: dict[int, list[int]] = {}
    flops: dict[int, int] = {}
    for number, part in enumerate(request.parts):
        before = request.prompt_tokens if part.parent < 0 else ends[part.parent]
        root = number if part.parent < 0 else roots[part.parent]
        ends.append(before + part.tokens)
        roots.append(root)
        members.setdefault(root, []).append(number)
        if request.shares_prefixes:
            flops[root] = flops.get(root, 0) + formula.flops(before, part.tokens)
    if not request.shares_prefixes:
        inner = {part.parent for part in request.parts}
        for number in set(range(len(ends))) - inner:
            flops[roots[number]] = flops.get(roots[number], 0) + formula.flops(0, ends[number])
    return tuple(RoutedQuestion(tuple(numbers), flops[root]) for root, numbers in members.items())


def routable_request(
    request: Request,
    hashes: Callable[[Tokens, bytes], Sequence[BlockHash]],
    *,
    priority: int = 0,
    deadline: float = math.inf,
    arrived: float = 0.0,
    shares_prefixes: bool = True,
) -> tuple[RoutableRequest, int]:
    """What a router is told of `request`, and how many of its pieces, from the first, are the prompt.

    The other pieces are its parts: part k is piece (prompt pieces + k). The prompt is the chain of pieces that all
    others hang on. `hashes` gives those of the complete blocks of tokens, for a salt. `shares_prefixes`: as ranks do.
    """
    pieces = request.pieces
    prompt = prompt_length(request)
    tokens = np.concatenate([piece.tokens for piece in pieces[:prompt]]) if prompt else pieces[0].tokens[:0]
    is_complete = prompt == len(pieces)
    prompt_tokens = len(tokens)
    reusable = (prompt_tokens - is_complete) // BLOCK_TOKENS if prompt and shares_prefixes else 0
    repeated = 0 if shares_prefixes or is_complete else prompt_tokens
    parts = tuple(
        RoutablePart(max(piece.parent - prompt, -1), len(piece.tokens) + (repeated if piece.parent < prompt else 0))
        for piece in pieces[prompt:]
    )
    blocks = tuple(hashes(tokens[: reusable * BLOCK_TOKENS], request.salt)) if reusable else ()
    routable = RoutableRequest(
        request.id, blocks, prompt_tokens - repeated, parts, priority, deadline, arrived, shares_prefixes
    )
    return routable, prompt
