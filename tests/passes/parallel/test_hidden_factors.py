"""Constants composed of operations that are allowed once: quotients of quotients, sums of sums, differences of 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moepass.models.reference.expert_parallel import AllReduceExperts, AllToAllExperts
from moepass.models.reference.grouped_experts import count_per_expert, sort_by_expert
from tests.helpers.graphs.refused_experts import refusal_of_experts

# Takes the sorted indices [S] of pairs, their experts [S], and the number of experts of a token; returns indices [S].
Places = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def _variant(places: Places) -> type[AllReduceExperts]:
    """Return experts that run the rows at other `places` than those of their pairs."""

    class Moved(AllReduceExperts):
        def run_some(self, hidden_states: torch.Tensor, local_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            experts, top_k = self.gate_up_proj.shape[0], local_ids.shape[1]
            sorted_ids, order = sort_by_expert(local_ids)
            rows = hidden_states[places(order, sorted_ids, top_k) // top_k]
            rows = self.run_groups(rows, count_per_expert(sorted_ids, experts))
            return rows.masked_fill((sorted_ids == experts).unsqueeze(-1), 0.0), order

    return Moved


def _quotient_of_quotients(order: torch.Tensor, ids: torch.Tensor, top_k: int) -> torch.Tensor:
    far = order
    for _ in range(7):
        far = far // top_k
    return order - far


def _many_times_a_count(order: torch.Tensor, ids: torch.Tensor, top_k: int) -> torch.Tensor:
    many = (ids >= 0).sum()
    for _ in range(6):
        many = many + many
    return torch.where(order < many, order, 0)


def _a_count_many_times(order: torch.Tensor, ids: torch.Tensor, top_k: int) -> torch.Tensor:
    return torch.where(order < (ids == ids[0]).sum().expand(64).sum(), order, 0)


def _nothing_and_one(order: torch.Tensor, ids: torch.Tensor, top_k: int) -> torch.Tensor:
    nothing = count_per_expert(ids, 4) - count_per_expert(ids, 4).clone()
    many = (nothing + 1).sum()
    for _ in range(6):
        many = (nothing + many).sum()
    return order - (order - many).clamp(min=0)


def _nothing_and_one_times_top_k(order: torch.Tensor, ids: torch.Tensor, top_k: int) -> torch.Tensor:
    counts = count_per_expert(ids, 4)
    many = (counts - counts.flip(0).flip(0) + 1)[0] * top_k * top_k * top_k * top_k * top_k * top_k
    return torch.where(order < many, order, 0)


def _truths_many_times(order: torch.Tensor, ids: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return 64 in every run, as a sum of a mask and its complement."""
    counts = count_per_expert(ids, 4)
    larger = counts[0] > counts[1]
    many = larger.expand(64).sum() + (~larger).expand(64).sum()
    return torch.where(order < many, order, 0)


def _truths_times_a_constant(order: torch.Tensor, ids: torch.Tensor, top_k: int) -> torch.Tensor:
    counts = count_per_expert(ids, 4)
    larger = counts[0] > counts[1]
    return torch.where(order < larger * 64 + (~larger) * 64, order, 0)


def _bounded_by_a_count(order: torch.Tensor, ids: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return a number beyond all pairs, unless an expert has more than 64 of them."""
    far = (ids >= 0).sum() + (ids >= 0).sum()
    return order - (order - far).clamp(min=0)


HIDDEN = (
    _quotient_of_quotients, _many_times_a_count, _a_count_many_times, _nothing_and_one, _nothing_and_one_times_top_k,
    _truths_many_times, _truths_times_a_constant, _bounded_by_a_count,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("places", HIDDEN, ids=lambda places: places.__name__.strip("_"))
def test_a_constant_that_is_put_together_is_not_taken(places: Places) -> None:
    assert refusal_of_experts("all_reduce", _variant(places))


@pytest.mark.slow
def test_unchanged_positions_are_taken() -> None:
    """The variant itself is no reason to refuse, and neither is a single operation."""
    assert refusal_of_experts("all_reduce", _variant(lambda order, ids, top_k: order)) == ""
    assert refusal_of_experts("all_reduce", _variant(lambda order, ids, top_k: order + order - order)) == ""
    assert refusal_of_experts("all_reduce", _variant(lambda order, ids, top_k: order - (order - order))) == ""


class TenTimes(AllToAllExperts):
    """Experts that replace arrived rows beyond 128 times the rows of the first expert."""

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        most = arriving[0] + (arriving[0] == 0) * arriving.sum()
        for _ in range(7):
            most = most + most
        places = torch.arange(rows.shape[0])
        return super()._run_arrived(rows[places - (places - most).clamp(min=0)], arriving)


@pytest.mark.slow
def test_a_ratio_that_no_run_has_is_not_taken() -> None:
    assert refusal_of_experts("all_to_all", TenTimes)
