"""Numbers that are known to be non-negative; their values are checked too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moepass.passes.tokens.expert_ids import never_negative

# Functions of scores [tokens, experts] and an integer for each token.
Ids = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
KNOWN: dict[str, Ids] = {
    "of a top-k": lambda scores, numbers: scores.topk(2).indices.reshape(-1),
    "of a sort": lambda scores, numbers: scores.sort(-1, descending=True).indices[:, :2].to(torch.int32),
    "of the largest": lambda scores, numbers: scores.argmax(-1),
    "of the largest, with its value": lambda scores, numbers: scores.max(-1).indices,
    "remainders": lambda scores, numbers: (numbers - 3) % 4,
    "none is one more": lambda scores, numbers: torch.where(numbers > 2, scores.argmax(-1), 4),
    "cut from below": lambda scores, numbers: numbers.clamp(min=0),
    "cut to a range": lambda scores, numbers: (numbers - 3).clamp(0, 3),
    "places of places": lambda scores, numbers: torch.arange(4).flip(0)[scores.topk(2).indices] + 1,
    "of a running maximum": lambda scores, numbers: scores.cummax(-1).indices,
    "written among others": lambda scores, numbers: scores.topk(2).indices.scatter(1, scores.topk(1).indices // 2, 7),
    "of groups": lambda scores, numbers: torch.cat([scores.argmax(-1), scores.argmin(-1) * 2]),
}
UNKNOWN: dict[str, Ids] = {
    "given": lambda scores, numbers: numbers,
    "none is minus one": lambda scores, numbers: torch.where(numbers > 2, scores.argmax(-1), -1),
    "none is filled in": lambda scores, numbers: scores.topk(2).indices.masked_fill(scores[:, :2] > 0, -1),
    "one less": lambda scores, numbers: scores.argmax(-1) - 1,
    "remainders of a negative number": lambda scores, numbers: numbers % -4,
    "cut to less than zero": lambda scores, numbers: numbers.clamp(0, -1),
    "cut from above": lambda scores, numbers: scores.argmax(-1).clamp(max=-1),
    "in fewer bits": lambda scores, numbers: (scores.argmax(-1) + 200).to(torch.int8),
    "of numbers with a fraction": lambda scores, numbers: scores.to(torch.int64),
    "one less, with a factor": lambda scores, numbers: torch.add(scores.argmax(-1), 1, alpha=-1),
    "read from a table": lambda scores, numbers: torch.tensor([-1, 0, 1, -1])[scores.argmin(-1)],
    "written among others": lambda scores, numbers: scores.topk(2).indices.scatter(1, scores.topk(1).indices // 2, -1),
    "of the same bytes": lambda scores, numbers: torch.full((6,), -0.0).view(torch.int32),
    "values of a top-k": lambda scores, numbers: numbers.topk(2, largest=False).values,
}


def _is_known(ids: Ids) -> tuple[bool, torch.Tensor]:
    scores = torch.arange(24.0).reshape(6, 4).sin()
    numbers = torch.tensor([-2, 3, 0, 1, 5, -7])
    graph = make_fx(ids, tracing_mode="fake")(scores, numbers).graph
    (result,) = graph.output_node().all_input_nodes
    return never_negative(result), ids(scores, numbers)


@pytest.mark.parametrize("name", KNOWN)
def test_known_non_negative_numbers_are_non_negative(name: str) -> None:
    is_known, numbers = _is_known(KNOWN[name])
    assert is_known
    assert int(numbers.min()) >= 0


@pytest.mark.parametrize("name", UNKNOWN)
def test_some_may_be_below_zero(name: str) -> None:
    is_known, numbers = _is_known(UNKNOWN[name])
    assert not is_known
    assert int(numbers.min()) < 0 or name == "of numbers with a fraction"
