"""Records of the router: requests as it sees them, as sizes and hashes of blocks without tokens, and its decisions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.requests.request import NO_TOKENS, Request, Tokens
from moepass.runtime.serving.requests.request_parts import prompt_and_branches

# The hash of a block covers all tokens before it, so equal hashes mean equal prefixes.
BlockHash = int | bytes


class FlopsFormula(Protocol):
    """The cost of tokens as a function of their positions."""

    def flops(self, prefix_tokens: int, new_tokens: int) -> int:
        """Return the exact FLOPs of `new_tokens` tokens after `prefix_tokens` computed or cached tokens.

        The result is monotonic in both arguments, and additive: `flops(0, p) + flops(p, n) == flops(0, p + n)`.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class RoutableQuestion:
    """Pieces behind the prompt that one rank computes together, such as a question and its labels.

    `parts` are their ascending indices, counted from the end of the prompt. `runs` are the tokens before, and the
    tokens of, each run to compute.
    """

    parts: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RoutableRequest:
    """A prompt and the questions that follow it, which may go to different ranks.

    Attributes:
        blocks: hashes of the prompt's blocks of BLOCK_TOKENS tokens, in order. Without questions, the block with the
            last token is left out, because that token is always computed.
        prompt_tokens: length of the prompt; 0 if the questions have no common prefix, or if ranks share no prefixes.
        priority: a level is worth PRIORITY_SECONDS of waiting; higher levels come first.
        deadline: the request expires if any question has not started by then. In seconds of the clock of `arrived`.
    """

    id: str
    blocks: tuple[BlockHash, ...]
    prompt_tokens: int
    questions: tuple[RoutableQuestion, ...] = ()
    priority: int = 0
    deadline: float = math.inf
    arrived: float = 0.0


class Assignment(NamedTuple):
    """A request, or some of its questions, assigned to a rank.

    Attributes:
        number: unique number of the assignment. Later events refer to it, so that a late report is never mistaken for
            one about another assignment.
        parts: ascending indices of the assigned parts; None for the complete request. Every assignment computes the
            prompt or takes it from the cache. The assignment with part 0 answers the reads of the prompt itself.
        flops: FLOPs added to the load of the rank, without tokens that it holds, or will hold for other assignments.
    """

    number: int
    request_id: str
    rank: int
    parts: tuple[int, ...] | None
    flops: int


class Withdrawal(NamedTuple):
    """A request that ended without an answer, and its assignments that ranks no longer need to compute."""

    request_id: str
    assignments: tuple[Assignment, ...]


class Round(NamedTuple):
    """The decisions of one call of `route`. Expired requests had passed their deadline before the round began."""

    assignments: list[Assignment]
    expired: list[Withdrawal]


class RankLoss(NamedTuple):
    """The ids of requests that wait again after the loss of a rank, and the requests that lost a second rank."""

    rerun: tuple[str, ...]
    failed: tuple[Withdrawal, ...]


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

    `hashes` returns the hashes of the complete blocks of tokens, for a salt. With `shares_prefixes=False`, ranks
    compute each sequence of the tree separately from its first token. Then there are no blocks, and if there are
    questions, no prompt: each question computes complete sequences.
    """
    pieces, depths = request.pieces, request.depths()
    prompt, branches = prompt_and_branches(request)
    tokens = np.concatenate([NO_TOKENS, *(piece.tokens for piece in pieces[:prompt])])
    if shares_prefixes:
        runs = [(depth, len(piece.tokens)) for depth, piece in zip(depths, pieces, strict=True)]
        reusable = (len(tokens) - (not branches)) // BLOCK_TOKENS * BLOCK_TOKENS
        computed = set(range(len(pieces)))
    else:
        runs = [(0, depth + len(piece.tokens)) for depth, piece in zip(depths, pieces, strict=True)]
        reusable = 0
        computed = set(range(len(pieces))) - {piece.parent for piece in pieces}
    questions = tuple(
        RoutableQuestion(
            tuple(number - prompt for number in branch), tuple(runs[number] for number in branch if number in computed)
        )
        for branch in branches
    )
    blocks = tuple(hashes(tokens[:reusable], request.salt)) if reusable else ()
    prompt_tokens = len(tokens) if shares_prefixes or not branches else 0
    return RoutableRequest(request.id, blocks, prompt_tokens, questions, priority, deadline, arrived), prompt
