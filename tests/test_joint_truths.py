"""Rows and places that depend on several truths: what these make together must have been tried, too."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_hidden_thresholds import CONFIG, refusal

from moepass.models.expert_parallel import AllToAllExperts

# Four experts on each of two ranks: eight counts arrive.
WIDE = dataclasses.replace(CONFIG, experts=8, max_tokens=400)


class Arrived(AllToAllExperts):
    """Changes the rows that arrived, where two truths about their counts hold, each of which mock runs have both ways;
    but never both in one.
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
    """Turned round twice is as it was, once is not; what the second truth turns back it turns only with the first."""

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


class SortedMasks(Arrived):
    """The order of three truths is another one only where both hold."""

    def changed(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        order = torch.stack([~first, ~second]).long().sort(stable=True).indices
        return torch.where(order[0] == 1, torch.where(first, rows * 0, rows), rows)


NESTED = (
    NestedSelections, ProductOfMasks, NestedPlaces, SuccessivePlaces, FilledOneAfterTheOther, SumOfMasksAsAFactor,
    MovedBetween,
)  # fmt: skip


@pytest.mark.parametrize("experts", NESTED, ids=lambda experts: experts.__name__)
def test_truths_that_were_never_tried_together_are_not_taken(experts: type[AllToAllExperts]) -> None:
    assert refusal("all_to_all", experts, config=WIDE)
