"""Loops over masks of experts become grouped GEMMs over sorted rows, without data-dependent sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings
from torch.nn import functional as F

from tests.helpers.graphs.rewritten_loops import count_gemms_and_selections, rewrite_loop
from tests.helpers.project_styles.local_loops import (
    EXPERTS,
    HIDDEN,
    GatedMlp,
    MaskLoop,
    MixtralLoop,
    NonzeroLoop,
    SelectedLoop,
)

aten = torch.ops.aten
TAKEN: list[type[MaskLoop]] = [MixtralLoop, NonzeroLoop, SelectedLoop]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("model", TAKEN, ids=lambda model: model.__name__)
def test_a_loop_over_masks_becomes_grouped_gemms(model: type[MaskLoop]) -> None:
    torch.manual_seed(0)
    module, refusals = rewrite_loop(model())
    assert refusals == []
    assert count_gemms_and_selections(module) == (3, 0)
    assert not any(node.target is aten._assert_scalar.default for node in module.graph.nodes)


@pytest.mark.slow
def test_inductor_lowers_every_operator() -> None:
    torch.manual_seed(0)
    module, _ = rewrite_loop(MixtralLoop(), lower="inductor")
    assert count_gemms_and_selections(module) == (3, 0)
    taken_apart = {node.target for node in module.graph.nodes if node.target in select_decomp_table()}
    assert {target for target in taken_apart if target not in lowerings} == set()


class Descending(MixtralLoop):
    order = tuple(range(EXPERTS))[::-1]


class SomeExperts(MixtralLoop):
    """The pairs of one expert are left out."""

    order = tuple(range(EXPERTS - 1))


class OneExpertTwice(MixtralLoop):
    order = (*range(EXPERTS - 1), 0)


class OtherWeights(MixtralLoop):
    """The rows of each mask are computed by another expert, which is valid and gives another result."""

    def module_of(self, number: int) -> nn.Module:
        return self.experts[(number + 1) % EXPERTS]


class OrderOfMask(MixtralLoop):
    """The result of a row depends on its index in the mask, which lists all first choices first."""

    def add(self, result: torch.Tensor, number: int, rows: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return result.index_add(0, token, rows * torch.arange(rows.shape[0]).unsqueeze(1))


class SumOverRows(MixtralLoop):
    def add(self, result: torch.Tensor, number: int, rows: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return result.index_add(0, token, rows - rows.sum(0, keepdim=True))


class OtherTokens(MixtralLoop):
    """Results are added to the next token."""

    def add(self, result: torch.Tensor, number: int, rows: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return result.index_add(0, (token + 1) % result.shape[0], rows)


class Places(MixtralLoop):
    """Results are added at the index of a choice instead of the index of its token."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, _ = self.route(hidden)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        result = torch.zeros_like(hidden)
        for number in self.order:
            choice, token = torch.where(mask[number])
            result = result.index_add(0, choice, self.module_of(number)(hidden[token]))
        return result


class OverwrittenNotAdded(SelectedLoop):
    def add(self, result: torch.Tensor, number: int, rows: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return result.index_put((token,), rows)


class PartialSums(MixtralLoop):
    """The results of earlier experts are added to the input of the next expert."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        result = torch.zeros_like(hidden)
        for number in self.order:
            choice, token = torch.where(mask[number])
            rows = self.module_of(number)((hidden + result)[token]) * weights[token, choice, None]
            result = result.index_add(0, token, rows)
        return result


class ChosenByThreshold(MixtralLoop):
    """Each token chooses any number of experts."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = (self.router(hidden) > 0).T
        result = torch.zeros_like(hidden)
        for number in self.order:
            (token,) = torch.where(mask[number])
            result = result.index_add(0, token, self.module_of(number)(hidden[token]))
        return result


class NarrowIds(MixtralLoop):
    """Ids in a type that cannot represent them: as Booleans, all ids but 0 are 1."""

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = super().route(hidden)
        return chosen.bool().long(), weights


class ChosenAmongFewer(MixtralLoop):
    """The router chooses among two experts more than the loop has, so some pairs belong to no expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS + 2, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        result = torch.zeros_like(hidden)
        for number in self.order:
            token, choice = torch.where(chosen == number)
            result = result.index_add(0, token, self.module_of(number)(hidden[token]) * weights[token, choice, None])
        return result


class MixedMasks(MixtralLoop):
    """Tokens are selected by one mask and weights by another, which lists the same pairs in another order."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        result = torch.zeros_like(hidden)
        for number in self.order:
            _, token = torch.where(mask[number])
            token_of, choice = torch.where(chosen == number)
            torch._check(token.shape[0] == token_of.shape[0])
            rows = self.module_of(number)(hidden[token]) * weights[token_of, choice, None]
            result = result.index_add(0, token, rows)
        return result


class DoubledPairs(SelectedLoop):
    """Both choices of a token are the same expert, and the last write remains."""

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = super().route(hidden)
        return chosen[:, :1].expand(-1, 2), weights


class ComparedNarrowIds(SelectedLoop):
    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = super().route(hidden)
        return chosen.bool().long(), weights


class TiedWeights(SelectedLoop):
    def __init__(self) -> None:
        super().__init__()
        first, third = self.experts[0], self.experts[2]
        assert isinstance(first, GatedMlp)
        assert isinstance(third, GatedMlp)
        third.w1.weight = first.w1.weight


KEPT: list[type[MixtralLoop]] = [
    Descending, SomeExperts, OneExpertTwice, OrderOfMask, SumOverRows, OtherTokens, Places, OverwrittenNotAdded,
    PartialSums, ChosenByThreshold, NarrowIds, ChosenAmongFewer, MixedMasks, DoubledPairs,
]  # fmt: skip
# These sums have other readers, so no loop is detected.
NO_SUMS = (PartialSums,)


@pytest.mark.slow
@pytest.mark.parametrize("model", KEPT, ids=lambda model: model.__name__)
def test_code_similar_to_a_mask_loop_is_unchanged(model: type[MaskLoop]) -> None:
    torch.manual_seed(0)
    module, refusals = rewrite_loop(model())
    assert count_gemms_and_selections(module)[0] == 0
    assert len(refusals) == (model not in NO_SUMS)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (SomeExperts, r"the rows of experts \[0, 1, 2\] of the 4 that a router chooses among; expected all of them"),
        (TiedWeights, r"^input .* is a weight of several experts"),
        (OverwrittenNotAdded, "overwrites rows, and does not add to them"),
        (ComparedNarrowIds, r"compares something other than the ids \[tokens, k\] that torch.topk gives"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_refused_loop_has_a_reason(model: type[MaskLoop], reason: str) -> None:
    _, (refusal,) = rewrite_loop(model())
    assert re.search(reason, refusal.reason)


def _turned(table: torch.Tensor, number: int) -> torch.Tensor:
    return table.view(4, 1) if number % 2 else table.view(1, 4)


# Functions of an expert's rows, a table [2 * experts, hidden] and the expert's number, which differ between experts.
BY_NUMBER: dict[str, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "table from behind": lambda rows, table, number: rows * table[EXPERTS - 1 - number : EXPERTS - number],
    "every other of a table": lambda rows, table, number: rows * table[2 * number : 2 * number + 1],
    "columns": lambda rows, table, number: rows * table[:EXPERTS, 2 * number : 2 * number + 1].sum(),
    "features": lambda rows, table, number: F.pad(rows[:, number : number + 8], (0, 8)),
    "number": lambda rows, table, number: rows * torch.full((1,), number + 1.0),
    "view": lambda rows, table, number: (rows.view(-1, 4, 4) * _turned(table[0, :4], number)).reshape(-1, HIDDEN),
    "count": lambda rows, table, number: rows / (1 + torch.ones(rows.shape[0]).sum()),
    "counted up": lambda rows, table, number: rows / (2 + torch.arange(rows.shape[0] + 1).max()),
    "number of rows": lambda rows, table, number: rows * torch.full((1,), rows.shape[0] + 1.0),
    "for each row": lambda rows, table, number: rows + table[:1].expand(rows.shape[0], HIDDEN),
}


class ByNumber(MixtralLoop):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.change = BY_NUMBER[name]
        self.table = nn.Parameter(torch.randn(2 * EXPERTS, HIDDEN))

    def module_of(self, number: int) -> Any:
        return lambda rows: self.change(self.experts[number](rows), self.table, number)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NUMBER)
def test_experts_that_differ_only_in_constants_are_refused(name: str) -> None:
    torch.manual_seed(0)
    module, (refusal,) = rewrite_loop(ByNumber(name))
    assert count_gemms_and_selections(module)[0] == 0
    assert re.search("other arguments than in other branches|with a different value for each", refusal.reason)


@pytest.mark.slow
def test_experts_in_another_order_than_their_masks() -> None:
    torch.manual_seed(0)
    module, _ = rewrite_loop(OtherWeights())
    assert count_gemms_and_selections(module) == (3, 0)


class OnTop(MixtralLoop):
    """Results are added to an initial value."""

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2


class OnWhatItReads(MixtralLoop):
    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def add(self, result: torch.Tensor, number: int, rows: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return result.index_add(0, token, rows)


class TwoLoops(nn.Module):
    """The second loop adds to the result of the first, which its experts read too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MixtralLoop(), OnWhatItReads()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first = self.first(hidden)
        return first + self.second(first)


class BlankedTokens(MixtralLoop):
    """The sums of some tokens are overwritten at the end."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result = super().forward(hidden)
        result[hidden[:, 0] > 0] = 0.0
        return result


class NormInEachBranch(SelectedLoop):
    """Each branch normalises all tokens separately."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        result = self.start(hidden)
        for number in self.order:
            token, choice = torch.where(chosen == number)
            rows = self.module_of(number)(F.layer_norm(hidden, (HIDDEN,))[token])
            result = self.add(result, number, rows * weights[token, choice, None], token)
        return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "grouped"),
    [(OnTop, 3), (TwoLoops, 6), (BlankedTokens, 3), (NormInEachBranch, 3)],
    ids=["on top", "two loops", "blanked tokens", "norm in each branch"],
)
def test_sums_may_start_with_an_initial_value(model: type[nn.Module], grouped: int) -> None:
    torch.manual_seed(0)
    module, refusals = rewrite_loop(model())
    assert count_gemms_and_selections(module) == (grouped, 0), refusals
