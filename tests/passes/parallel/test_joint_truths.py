"""Rows and positions that depend on several masks are refused unless their combinations have been tried."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moepass.models.reference.expert_parallel import AllToAllExperts
from tests.helpers.graphs.refused_experts import CONFIG, refusal_of_experts

# Four experts on each of two ranks: eight counts arrive.
WIDE = dataclasses.replace(CONFIG, experts=8)


class Arrived(AllToAllExperts):
    """Experts that change arrived rows if two masks of their counts are true.

    Mock runs have both values of each mask, but never both masks true.
    """

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        first, second = arriving[3] > arriving[7], arriving[0] > arriving[1]
        return super()._run_arrived(self.changed(rows, first, second), arriving)

    def changed(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class NestedSelections(Arrived):
    def changed(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.where(second, torch.where(first, rows * 0, rows), rows)


class ProductOfMasks(Arrived):
    def changed(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return rows - rows * first * second


class NestedPlaces(Arrived):
    def changed(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        places = torch.arange(rows.shape[0])
        return rows[torch.where(second, torch.where(first, places.flip(0), places), places)]


class SuccessivePlaces(Arrived):
    """Rows that are reversed only if both masks are true: the first selects positions, the second rows."""

    def changed(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        places = torch.arange(rows.shape[0])
        moved = rows[torch.where(first, places.flip(0), places)]
        return torch.where(second, moved, rows)


class FilledOneAfterTheOther(Arrived):
    def changed(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        lost = rows.masked_fill(first, 0.0) - rows
        return rows + lost.masked_fill(~second, 0.0)


class SumOfMasksAsAFactor(Arrived):
    def changed(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        both = (first.long() + second.long() - 1).clamp(min=0)
        return rows - rows * both


class MovedBetween(Arrived):
    def changed(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        places = torch.arange(rows.shape[0]).unsqueeze(-1)
        begins, ends = places < 1, (places < 1) & second
        lost = torch.where(begins & first, rows * 0, rows).flip(0)
        return torch.where(ends.flip(0), lost, rows.flip(0)).flip(0)


class OneOfSeveralBySorting(AllToAllExperts):
    """Rows are lost if the seventh count is the largest, which depends on a sort instead of a mask."""

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        most = arriving.argsort()[-1:]
        return super()._run_arrived(torch.stack([*[rows] * 6, rows * 0, rows])[most][0], arriving)


class OneOfSeveralByTheLargest(AllToAllExperts):
    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        most = arriving.max(dim=0, keepdim=True).indices
        return super()._run_arrived(torch.stack([*[rows] * 6, rows * 0, rows])[most][0], arriving)


class OneOfSeveralTruths(AllToAllExperts):
    """Each of eight masks has both values in runs, except that of the seventh count."""

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        most = arriving > arriving.sum() - arriving
        far = torch.where(most, 0, arriving)[6] - arriving[6]
        return super()._run_arrived(rows[torch.arange(rows.shape[0]) + far], arriving)


class OneOfSeveralTruthsInASum(AllToAllExperts):
    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        few = torch.where(arriving > arriving.sum() - arriving, 0, arriving)
        far = (few * torch.tensor([0, 0, 0, 0, 0, 0, 1, 0])).sum() - arriving[6]
        return super()._run_arrived(rows[torch.arange(rows.shape[0]) + far], arriving)


class MaskedPlaces(Arrived):
    """Rows that are written by one mask and then by another."""

    def changed(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        begins = torch.arange(rows.shape[0]) < 1
        lost = rows.index_put((begins & first,), torch.zeros(()))
        return torch.where(((torch.arange(rows.shape[0]) > 0) | second).unsqueeze(-1), lost, rows)


class SumOfSelections(Arrived):
    """Each selection by itself loses nothing."""

    def changed(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return rows + rows * (first * 1.0 + second) - rows * (first | second)


class CutAtASize(AllToAllExperts):
    """Rows beyond a multiple of one expert's rows are lost without a comparison."""

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        few = arriving[0].item() + arriving[1].item() + arriving[4].item() + arriving[5].item()
        torch._check(few >= 0)
        selected = torch.arange(rows.shape[0])[: few + few]
        places = torch.zeros(rows.shape[0], dtype=torch.int64).index_copy(0, selected, selected)
        return super()._run_arrived(rows[places], arriving)


NESTED = (
    NestedSelections, ProductOfMasks, NestedPlaces, SuccessivePlaces, FilledOneAfterTheOther, SumOfMasksAsAFactor,
    MovedBetween, OneOfSeveralBySorting, OneOfSeveralByTheLargest, OneOfSeveralTruths, OneOfSeveralTruthsInASum,
    MaskedPlaces, SumOfSelections,
    CutAtASize,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("experts", NESTED, ids=lambda experts: experts.__name__)
def test_mask_combinations_that_were_never_tried_are_refused(experts: type[AllToAllExperts]) -> None:
    assert refusal_of_experts("all_to_all", experts, config=WIDE)


class RowsInTheirPlaces(AllToAllExperts):
    """Experts that copy rows, whose number depends on data, to their own indices."""

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        outputs = super()._run_arrived(rows, arriving)
        return torch.empty_like(outputs).index_copy(0, torch.arange(outputs.shape[0]), outputs)


@pytest.mark.slow
def test_data_dependent_sizes_are_not_compared() -> None:
    assert refusal_of_experts("all_to_all", RowsInTheirPlaces, config=WIDE) == ""
