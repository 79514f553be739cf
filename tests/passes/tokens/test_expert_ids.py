"""Which numbers are known never to be below zero; the numbers themselves must say the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moepass.passes.tokens.expert_ids import never_negative

# Of scores [tokens, experts] and a whole number for each token.
Ids = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
KNOWN: dict[str, Ids] = {
    "of a top-k": lambda scores, given: scores.topk(2).indices.reshape(-1),
    "of a sort": lambda scores, given: scores.sort(-1, descending=True).indices[:, :2].to(torch.int32),
    "of the largest": lambda scores, given: scores.argmax(-1),
    "of the largest, with its value": lambda scores, given: scores.max(-1).indices,
    "remainders": lambda scores, given: (given - 3) % 4,
    "none is one more": lambda scores, given: torch.where(given > 2, scores.argmax(-1), 4),
    "cut from below": lambda scores, given: given.clamp(min=0),
    "cut to a range": lambda scores, given: (given - 3).clamp(0, 3),
    "places of places": lambda scores, given: torch.arange(4).flip(0)[scores.topk(2).indices] + 1,
    "of groups": lambda scores, given: torch.cat([scores.argmax(-1), scores.argmin(-1) * 2]),
}
UNKNOWN: dict[str, Ids] = {
    "given": lambda scores, given: given,
    "none is minus one": lambda scores, given: torch.where(given > 2, scores.argmax(-1), -1),
    "none is filled in": lambda scores, given: scores.topk(2).indices.masked_fill(scores[:, :2] > 0, -1),
    "one less": lambda scores, given: scores.argmax(-1) - 1,
    "remainders of a negative number": lambda scores, given: given % -4,
    "cut to less than zero": lambda scores, given: given.clamp(0, -1),
    "cut from above": lambda scores, given: scores.argmax(-1).clamp(max=-1),
    "in fewer bits": lambda scores, given: (scores.argmax(-1) + 200).to(torch.int8),
    "of numbers with a fraction": lambda scores, given: scores.to(torch.int64),
    "one less, with a factor": lambda scores, given: torch.add(scores.argmax(-1), 1, alpha=-1),
    "read from a table": lambda scores, given: torch.tensor([-1, 0, 1, -1])[scores.argmin(-1)],
    "values of a top-k": lambda scores, given: given.topk(2, largest=False).values,
}


def _is_known(ids: Ids) -> tuple[bool, torch.Tensor]:
    scores = torch.arange(24.0).reshape(6, 4).sin()
    given = torch.tensor([-2, 3, 0, 1, 5, -7])
    graph = make_fx(ids, tracing_mode="fake")(scores, given).graph
    (result,) = graph.output_node().all_input_nodes
    return never_negative(result), ids(scores, given)


@pytest.mark.parametrize("name", KNOWN)
def test_none_is_below_zero(name: str) -> None:
    is_known, numbers = _is_known(KNOWN[name])
    assert is_known
    assert int(numbers.min()) >= 0


@pytest.mark.parametrize("name", UNKNOWN)
def test_some_may_be_below_zero(name: str) -> None:
    is_known, numbers = _is_known(UNKNOWN[name])
    assert not is_known
    assert int(numbers.min()) < 0 or name == "of numbers with a fraction"
