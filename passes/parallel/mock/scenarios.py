"""Routing of tokens in the mock runs of a parallel block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

Draw = Callable[[torch.Generator, int, int], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Routing of tokens in one run.

    `own` and `peers` draw experts for the pairs of this rank and of its peers. A peer brings `peer_pairs` pairs, or one
    for each expert if `full`. If `load` is not 0, the first peer brings `load` times as many as this rank.
    """

    name: str
    own: Draw
    peers: Draw
    peer_pairs: int
    load: int = 0
    full: bool = False


def anywhere(generator: torch.Generator, pairs: int, experts: int) -> torch.Tensor:
    """Draw random experts."""
    return torch.randint(0, experts, (pairs,), generator=generator)


def _all_to_one(generator: torch.Generator, pairs: int, experts: int) -> torch.Tensor:
    return torch.randint(0, experts, (1,), generator=generator).expand(pairs)


def _each_in_turn(generator: torch.Generator, pairs: int, experts: int) -> torch.Tensor:
    return (torch.arange(pairs) % experts)[torch.randperm(pairs, generator=generator)]


def among(ids: Sequence[int]) -> Draw:
    """Return a function that draws random experts, including all `ids` if there are enough pairs."""

    def draw(generator: torch.Generator, pairs: int, experts: int) -> torch.Tensor:
        drawn = anywhere(generator, pairs, experts)
        drawn[: len(ids)] = torch.tensor(ids, dtype=drawn.dtype)[:pairs]
        return drawn[torch.randperm(pairs, generator=generator)]

    return draw


SCENARIOS = (
    Scenario("tokens anywhere", anywhere, anywhere, 13),
    Scenario("all tokens to one expert", _all_to_one, _all_to_one, 7),
    Scenario("peers without tokens", anywhere, anywhere, 0),
    Scenario("a peer with many tokens", anywhere, _all_to_one, 2, load=5),
    Scenario("tokens for every expert", _each_in_turn, _each_in_turn, 0, full=True),
)
