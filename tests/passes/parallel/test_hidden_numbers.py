"""Thresholds behind small numbers: values computed from ids and constants must not act as masks, gates or selections.

Every variant is right in all mock runs. It changes positions after many rows, for some experts (`few` [S], 0 or 1 by
expert id) or for some choices of a token. Until then all numbers have their usual values.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from moepass.models.reference.expert_parallel import AllGatherExperts, AllReduceExperts, AllToAllExperts, ShardedExperts
from moepass.models.reference.grouped_experts import count_per_expert, grouped_gemm, sort_by_expert, undo_order
from tests.helpers.graphs.refused_experts import refusal_of_experts

T = torch.Tensor
TIMES = 120

# Takes rows [S, H], their sort order [S], their sorted experts [S], and the number of rows of one rank (other ranks may
# have more than five times as many); returns the sorted rows.
Rows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _arrived(change: Rows) -> type[AllToAllExperts]:
    class Changed(AllToAllExperts):
        def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
            owned, ranks = len(self.placement.owned), self.placement.ranks
            local_ids = torch.arange(owned).repeat(ranks).repeat_interleave(arriving, output_size=rows.shape[0])
            ids, order = sort_by_expert(local_ids)
            changed = change(rows, order, ids, arriving.view(ranks, -1)[0].sum())
            return undo_order(self.run_groups(changed, count_per_expert(ids, owned)), order)

    return Changed


def _five(number: torch.Tensor) -> torch.Tensor:
    return number + number + number + number + number


def _column(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.unsqueeze(-1)


# ---------------------------------------------------------------------------------------------------- from expert ids


def _many_times(few: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    far = order
    for _ in range(TIMES):
        far = far - few
    return (far >= 0).long() + few - 1


def _subtracted_again_and_again(rows: T, order: T, ids: T, number: T) -> T:
    return rows[order - _many_times(ids.clamp(max=1), order)]


def _subtracted_again_and_again_as_a_factor(rows: T, order: T, ids: T, number: T) -> T:
    return rows[order] - rows[order] * _column(_many_times(ids.clamp(max=1), order))


def _beyond(order: torch.Tensor, few: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return a mask of rows beyond five times those of one rank, which no run has, for some experts."""
    return order >= few * _five(number)


def _as_a_shift(few: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
    def change(rows: torch.Tensor, order: torch.Tensor, ids: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        gate = few(ids)
        return rows[order - (_beyond(order, gate, number).long() + gate - 1)]

    return change


_FEW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamp": lambda ids: ids.clamp(max=1),
    "remainder": lambda ids: ids % 2,
    "floor_divide": lambda ids: (ids + 2) // 3,
    "comparison": lambda ids: (ids > 0).long(),
    "where": lambda ids: torch.where(ids > 0, 1, 0),
    "where_of_numbers": lambda ids: torch.where(ids < 1, ids, 1),
    "minimum": lambda ids: torch.minimum(ids, torch.ones_like(ids)),
    "product": lambda ids: ids.clamp(max=1) * (ids > 0),
    "table": lambda ids: torch.tensor([0, 1, 1, 1])[ids],
    "range": lambda ids: torch.arange(4).clamp(max=1)[ids],
    "offset": lambda ids: (ids + 1).clamp(min=1, max=2) - 1,
    "sentinel": lambda ids: torch.where(ids == 0, -1, ids) * 0 + torch.where(ids == 0, -1, 0) + 1,
    "exclusive_or": lambda ids: ((ids > 0) ^ (ids < 0)).long(),
    "floats": lambda ids: torch.tensor([0.0, 1.0, 1.0, 1.0])[ids].long(),
}


def _as_a_factor(rows: T, order: T, ids: T, number: T) -> T:
    few, ordered = ids.clamp(max=1), rows[order]
    return ordered - ordered * _column(_beyond(order, few, number).long() + few - 1)


def _as_two_factors(rows: T, order: T, ids: T, number: T) -> T:
    """Combine rows instead of numbers."""
    few, ordered = ids.clamp(max=1), rows[order]
    return ordered + ordered - ordered * _column(_beyond(order, few, number)) - ordered * _column(few)


def _as_floats(rows: T, order: T, ids: T, number: T) -> T:
    few, ordered = ids.clamp(max=1), rows[order]
    half = torch.tensor([0.0, 0.5, 0.5, 0.5])[ids]
    return (
        ordered
        + ordered
        - ordered * _column(_beyond(order, few, number))
        - ordered * _column(half)
        - ordered * _column(half)
    )


def _as_selected_rows(rows: T, order: T, ids: T, number: T) -> T:
    few, ordered = ids.clamp(max=1), rows[order]
    lost = ordered.masked_fill(_column(_beyond(order, few, number)), 0.0)
    places = torch.arange(rows.shape[0])
    return torch.stack([ordered, lost])[few, places]


def _as_rows_that_are_put(rows: T, order: T, ids: T, number: T) -> T:
    few, ordered = ids.clamp(max=1), rows[order]
    lost = ordered * _column(_beyond(order, few, number))
    return (
        ordered
        - torch.zeros_like(ordered)
        .expand(2, -1, -1)
        .scatter(0, few.view(1, -1, 1).expand_as(ordered[None]), lost[None])[1]
    )


def _as_a_sum_by_place(rows: T, order: T, ids: T, number: T) -> T:
    """Move rows by the number of the second expert's rows that are beyond, which is 0 in all runs."""
    few = ids.clamp(max=1)
    beyond = _beyond(order, few, number).long()
    return rows[order - torch.zeros(2, dtype=torch.int64).index_add(0, few, beyond)[1].clamp(max=1)]


def _as_a_sum_by_place_without_a_bound(rows: T, order: T, ids: T, number: T) -> T:
    few = ids.clamp(max=1)
    beyond = _beyond(order, few, number).long()
    return rows[order - torch.zeros(2, dtype=torch.int64).index_add(0, few, beyond)[1]]


def _as_an_equality(rows: T, order: T, ids: T, number: T) -> T:
    few = ids.clamp(max=1)
    same = _beyond(order, few, number).long() == few
    return rows[order - same.long()]


def _as_a_difference(rows: T, order: T, ids: T, number: T) -> T:
    """Move rows by a number between -1 and 1, and back by its values that occur in runs."""
    few = ids.clamp(max=1)
    seen = torch.where(ids == 0, 1, 0)
    moved = _beyond(order, few, number).long() + few - 1 - seen
    return rows[order - moved - seen]


def _as_a_chosen_number(rows: T, order: T, ids: T, number: T) -> T:
    """Select a number instead of computing with it."""
    few = ids.clamp(max=1)
    chosen = torch.where(order >= few * _five(number), few, 0)
    return rows[order - chosen]


def _as_a_selected_size(rows: T, order: T, ids: T, number: T) -> T:
    """Look the size up by the number; the size is lost where the mask is false, as in all runs."""
    few = ids.clamp(max=1)
    return rows[order - torch.stack([number - number, number])[few] * _beyond(order, few, number)]


def _as_a_divisor(rows: T, order: T, ids: T, number: T) -> T:
    few = ids.clamp(max=1)
    return rows[order - (_beyond(order, few, number).long() + few - 1) // (few + 1)]


def _as_a_bound(rows: T, order: T, ids: T, number: T) -> T:
    few = ids.clamp(max=1)
    return rows[order - torch.minimum(_beyond(order, few, number).long(), few)]


def _as_a_lower_bound(rows: T, order: T, ids: T, number: T) -> T:
    few = ids.clamp(max=1)
    return rows[order - torch.maximum(_beyond(order, few, number).long() - 1, -few) - few]


def _as_a_sign(rows: T, order: T, ids: T, number: T) -> T:
    few = ids.clamp(max=1)
    return rows[order - (_beyond(order, few, number).long() + few - 1).sign()]


def _moved_between(rows: T, order: T, ids: T, number: T) -> T:
    """Combine a mask with ids that are no longer in the order of the rows."""
    ordered, few = rows[order], ids > 0
    beyond = order >= torch.where(few, _five(number), 0)
    lost = ordered.masked_fill(_column(~few), 0.0).flip(0)
    return ordered - lost.masked_fill(_column(~beyond).flip(0), 0.0).flip(0)


def _numbers_moved_between(rows: T, order: T, ids: T, number: T) -> T:
    ordered, few = rows[order], ids.clamp(max=1)
    lost = (ordered * _column(few)).flip(0)
    return ordered - lost.masked_fill(_column(~_beyond(order, few, number)).flip(0), 0.0).flip(0)


CHANGES: tuple[Rows, ...] = (
    _subtracted_again_and_again, _subtracted_again_and_again_as_a_factor, _as_a_factor, _as_two_factors, _as_floats,
    _as_selected_rows, _as_rows_that_are_put, _as_a_sum_by_place, _as_a_sum_by_place_without_a_bound, _as_an_equality,
    _as_a_difference, _as_a_chosen_number, _as_a_selected_size, _as_a_divisor, _as_a_bound, _as_a_lower_bound,
    _as_a_sign, _moved_between, _numbers_moved_between,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_numbers_computed_from_ids_cannot_hide_a_threshold(change: Rows) -> None:
    assert refusal_of_experts("all_to_all", _arrived(change))


@pytest.mark.slow
@pytest.mark.parametrize("few", _FEW)
def test_no_way_to_a_small_number_hides_a_threshold(few: str) -> None:
    assert refusal_of_experts("all_to_all", _arrived(_as_a_shift(_FEW[few])))


@pytest.mark.slow
def test_rows_in_order_are_taken() -> None:
    """The variant itself is no reason to refuse, and neither is a number from ids without a mask."""
    assert refusal_of_experts("all_to_all", _arrived(lambda rows, order, ids, number: rows[order])) == ""


# --------------------------------------------------------------------------------------------------- from constants


Slots = Callable[[int], torch.Tensor]


def _by_slot(form: type[ShardedExperts], slots: Slots, moves: bool) -> type[ShardedExperts]:
    """Return experts that change rows of one choice of each token, whose index is a constant next to every token."""

    class Changed(form):  # type: ignore[misc, valid-type]
        def run_some(self, hidden_states: torch.Tensor, local_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            experts, (tokens, top_k) = self.gate_up_proj.shape[0], local_ids.shape
            ids, order = sort_by_expert(local_ids)
            few = slots(top_k)
            if moves:
                few = few.expand(tokens, top_k)
            places = _many_times(few, torch.arange(tokens)[:, None]).reshape(-1)[order]
            rows = self.run_groups(hidden_states[order // top_k - places], count_per_expert(ids, experts))
            return rows.masked_fill((ids == experts).unsqueeze(-1), 0.0), order

    return Changed


SLOTS: dict[str, Slots] = {
    "range": torch.arange,
    "table": lambda top_k: torch.tensor([0, 1]),
    "truths": lambda top_k: (torch.arange(top_k) > 0).long(),
    "remainder": lambda top_k: (torch.arange(top_k) + 2) % 2,
}


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("slots", SLOTS)
def test_the_slot_of_an_expert_hides_no_threshold(slots: str, moves: bool) -> None:
    assert refusal_of_experts("all_reduce", _by_slot(AllReduceExperts, SLOTS[slots], moves))


@pytest.mark.slow
def test_the_slot_of_an_expert_hides_no_threshold_among_gathered_tokens() -> None:
    assert refusal_of_experts("all_gather", _by_slot(AllGatherExperts, torch.arange, False))


class ConstantsInside(AllReduceExperts):
    """A constant of the activation function is the same for every row, and is combined with no mask of rows."""

    def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = grouped_gemm(rows, self.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
        scale = torch.tensor([0.5, 1.0] * (gate.shape[1] // 2))
        return grouped_gemm(F.silu(gate) * up * scale, self.down_proj.transpose(1, 2), ends)


@pytest.mark.slow
def test_constants_of_the_activation_function_are_taken() -> None:
    assert refusal_of_experts("all_reduce", ConstantsInside) == ""
