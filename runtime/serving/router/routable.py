"""Requests as the router sees them: sizes and hashes of blocks, no tokens."""

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
    """The cost of tokens as a function of their positions."""

    def flops(self, prefix_tokens: int, new_tokens: int) -> int:
        """Return the exact FLOPs of `new_tokens` tokens after `prefix_tokens` computed or cached tokens.

        The result is monotonic in both arguments, and additive: `flops(0, p) + flops(p, n) == flops(0, p + n)`.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class RoutablePart:
    """A run of tokens after the part `parent`, an index of an earlier part; -1 for parts that follow the prompt."""

    parent: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class RoutableRequest:
    """A prompt and the tree of parts that follow it. Times are in seconds of one monotonic clock.

    Attributes:
        blocks: hashes of the prompt's blocks of BLOCK_TOKENS tokens, in order. Only blocks that can come from a cache:
            if nothing follows the prompt, its last token is always computed.
        prompt_tokens: tokens of the prompt; 0 if the parts have no common prefix.
        parts: questions and their labels. A part that follows the prompt directly is a question. Different ranks may
            get different questions, but the parts of one question stay together.
        priority: a level is worth `priority_seconds` of waiting; higher levels come first.
        deadline: the request expires if a part of it has not started by then.
        arrived: time of arrival.
        shares_prefixes: False if ranks compute each sequence of the tree separately from its first token. Then there
            are no blocks, and if there are parts, no prompt: the tokens of the prompt are included in the first parts.

    Raises:
        InputError: the request has no tokens or more blocks than its prompt, a part has no tokens, a parent is not an
            earlier part, or a time is not a number.
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
                f"request {self.id} has {len(self.blocks)} blocks; of its {self.prompt_tokens} tokens at most {most} "
                f"blocks of {BLOCK_TOKENS} can come from a cache",
                name="blocks",
                value=len(self.blocks),
                expected=most,
            )
        for number, node in enumerate(self.parts):
            if node.tokens < 1:
                raise InputError(f"part {number} of request {self.id} has no tokens", name="tokens", value=node.tokens)
            if not -1 <= node.parent < number:
                raise InputError(
                    f"part {number} of request {self.id} has parent {node.parent}; it must be an earlier part, or -1",
                    name="parent",
                    value=node.parent,
                    expected=range(-1, number),
                )
        if not math.isfinite(self.arrived):
            raise InputError(
                f"request {self.id} arrived at {self.arrived}; it must be a finite time",
                name="arrived",
                value=self.arrived,
            )
        if math.isnan(self.deadline):
            raise InputError(f"the deadline of request {self.id} is not a number", name="deadline", value=self.deadline)


@dataclasses.dataclass(frozen=True, slots=True)
class RoutedQuestion:
    """A part that follows the prompt, with all its descendants: their ascending indices and total FLOPs."""

    parts: tuple[int, ...]
    flops: int


def questions_of(request: RoutableRequest, formula: FlopsFormula) -> tuple[RoutedQuestion, ...]:
    """Return the questions of a request, in order. Their cost does not depend on whether the prompt is cached."""
    ends: list[int] = []
    roots: list[int] = []
    members: dict[int, list[int]] = {}
    flops: dict[int, int] = {}
    for number, node in enumerate(request.parts):
        before = request.prompt_tokens if node.parent < 0 else ends[node.parent]
        root = number if node.parent < 0 else roots[node.parent]
        ends.append(before + node.tokens)
        roots.append(root)
        members.setdefault(root, []).append(number)
        if request.shares_prefixes:
            flops[root] = flops.get(root, 0) + formula.flops(before, node.tokens)
    if not request.shares_prefixes:
        inner = {node.parent for node in request.parts}
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
    """Return `request` as the router sees it, and how many of its leading pieces are the prompt.

    The prompt is the chain of pieces that all other pieces follow. The other pieces are the parts: part k is piece
    (prompt pieces + k).

    Args:
        request: the request.
        hashes: returns the hashes of the complete blocks of tokens, for a salt.
        priority: as in `RoutableRequest`.
        deadline: as in `RoutableRequest`.
        arrived: as in `RoutableRequest`.
        shares_prefixes: as in `RoutableRequest`; a property of the ranks.
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
