"""Loops over experts that select rows by boolean masks, or in which each token has one expert, become grouped GEMMs."""

from __future__ import annotations

import re

import pytest
import torch

from tests.helpers.graphs.rewritten_loops import count_gemms_and_selections, rewrite_loop
from tests.helpers.project_styles.local_loops import (
    EXPERTS,
    HIDDEN,
    AnyPlace,
    FlatPairs,
    LastExpertStays,
    MaskLoop,
    OneExpert,
)

aten = torch.ops.aten


class NoWeights(AnyPlace):
    """A loop that applies no weights, so the index of a choice is not read."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, _ = self.route(hidden)
        result = self.start(hidden)
        for number in self.order:
            mask = (chosen == number).any(dim=-1)
            result[mask] += self.module_of(number)(hidden[mask])
        return result


class WiderWeights(AnyPlace):
    """Rows are wider than the result, which casts each sum, as in bfloat16 models with float32 weights."""

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = super().route(hidden)
        return chosen, weights.double()

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()


class WiderResult(AnyPlace):
    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.double()


TAKEN: list[type[MaskLoop]] = [AnyPlace, FlatPairs, OneExpert, NoWeights, WiderWeights, WiderResult]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("model", TAKEN, ids=lambda model: model.__name__)
def test_a_loop_over_boolean_masks_becomes_grouped_gemms(model: type[MaskLoop]) -> None:
    torch.manual_seed(0)
    module, refusals = rewrite_loop(model())
    assert refusals == []
    assert count_gemms_and_selections(module) == (3, 0)
    assert not any(node.target is aten._assert_scalar.default for node in module.graph.nodes)


class WeightsOfNext(MaskLoop):
    """Each row is scaled by the weight that its token has for another expert."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        result = self.start(hidden)
        for number in self.order:
            mask = (chosen == number).any(dim=-1)
            scales = (weights * (chosen == number).roll(1, dims=1)).sum(dim=-1, keepdim=True)
            result[mask] += self.module_of(number)(hidden[mask]) * scales[mask]
        return result


class AllExpertsButOne(OneExpert):
    """The rows of one expert keep their initial values."""

    order = tuple(range(EXPERTS - 1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(hidden).softmax(dim=-1).topk(1, dim=-1)
        weights, chosen = weights.squeeze(-1), chosen.squeeze(-1)
        result = hidden.clone()
        for number in self.order:
            mask = chosen == number
            result[mask] = self.module_of(number)(hidden[mask]) * weights[mask].unsqueeze(-1)
        return result


class AlongExperts(OneExpert):
    """Each expert takes the token with the largest score for it; several experts may take the same token."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = self.router(hidden).argmax(dim=0)
        result = torch.zeros(EXPERTS, HIDDEN)
        for number in self.order:
            mask = chosen == number
            result[mask] += self.module_of(number)(self.router.weight[mask])
        return result


class PositiveWeights(MaskLoop):
    """A chosen expert whose weight is 0 computes nothing."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        result = self.start(hidden)
        table = torch.zeros(hidden.shape[0], EXPERTS).scatter(1, chosen, weights)
        for number in self.order:
            mask = table[:, number] > 0
            result[mask] += self.module_of(number)(hidden[mask]) * table[mask, number].unsqueeze(-1)
        return result


class PairsOfRows(MaskLoop):
    """Each token has one row for each of its choices, in rows [tokens, k, H]."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        rows = hidden.unsqueeze(1).repeat(1, self.top_k, 1)
        result = torch.zeros_like(rows)
        for number in self.order:
            result[chosen == number] = self.module_of(number)(rows[chosen == number])
        return (result * weights.unsqueeze(-1)).sum(dim=1)


class OneValue(OneExpert):
    """All tokens of an expert get the same row, a sum over them."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = self.router(hidden).topk(1, dim=-1)[1].squeeze(-1)
        result = torch.empty_like(hidden)
        for number in self.order:
            result[chosen == number] = self.module_of(number)(hidden[chosen == number]).sum(0, keepdim=True)
        return result


class TwoRouters(OneExpert):
    """Every second expert takes the tokens that another router chose for it."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        both = [self.router(rows).topk(1, dim=-1)[1].squeeze(-1) for rows in (hidden, -hidden)]
        result = torch.zeros_like(hidden)
        for number in self.order:
            mask = both[number % 2] == number
            result[mask] += self.module_of(number)(hidden[mask])
        return result


class MaskOfFeatures(AnyPlace):
    """Rows are selected by a mask of all features, so torch learns their number only from the view."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        result = self.start(hidden)
        for number in self.order:
            mask = (chosen == number).any(dim=-1, keepdim=True)
            rows = hidden[mask.expand(-1, HIDDEN)].view(-1, HIDDEN)
            result[mask.squeeze(-1)] += self.module_of(number)(rows) * weights[chosen == number].unsqueeze(-1)
        return result


KEPT: dict[type[MaskLoop], str] = {
    LastExpertStays: "overwrites rows, and does not add to them",
    WeightsOfNext: "compares ids of experts, but does not select rows or weights by them alone",
    AllExpertsButOne: r"the rows of experts \[0, 1, 2\] of the 4 that a router chooses among",
    AlongExperts: "is not computed from expert ids",
    PositiveWeights: "is not computed from expert ids",
    PairsOfRows: r"selects pairs of a token and one of its experts by a mask \[tokens, k\]",
    OneValue: "values that are not known to be one for each row",
    TwoRouters: "list rows by different expert ids",
    MaskOfFeatures: "",
}


@pytest.mark.slow
@pytest.mark.parametrize("model", KEPT, ids=lambda model: model.__name__)
def test_a_loop_over_unsupported_masks_is_unchanged(model: type[MaskLoop]) -> None:
    torch.manual_seed(0)
    module, refusals = rewrite_loop(model())
    assert count_gemms_and_selections(module)[0] == 0
    if KEPT[model]:
        (refusal,) = refusals
        assert re.search(KEPT[model], refusal.reason), refusal.reason


class ExpertByExpert(MaskLoop):
    """A loop over the choices inside the loop over experts, after a loop that is rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.before = AnyPlace()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.before(hidden)
        chosen, weights = self.route(hidden)
        result = self.start(hidden)
        for number in self.order:
            for choice in range(self.top_k):
                mask = chosen[:, choice] == number
                result[mask] += self.module_of(number)(hidden[mask]) * weights[mask, choice].unsqueeze(-1)
        return result


@pytest.mark.slow
def test_a_refused_loop_after_a_rewritten_loop_has_a_reason() -> None:
    torch.manual_seed(0)
    module, (refusal,) = rewrite_loop(ExpertByExpert())
    assert count_gemms_and_selections(module)[0] == 3
    assert "is not computed from expert ids" in refusal.reason
