"""Blocks that behave differently only for more tokens than the proof tries are refused, for many ways to write this."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moepass.models.reference.collectives import gather_rows, scatter_sums, sum_over_ranks
from moepass.models.reference.expert_parallel import (
    AllGatherExperts,
    AllReduceExperts,
    AllToAllExperts,
    ShardedExperts,
)
from moepass.models.reference.grouped_experts import count_per_expert, sort_by_expert, undo_order, weighted_sum
from tests.helpers.graphs.refused_experts import CONFIG, refusal_of_experts
from tests.helpers.mutants.random_cases import times

Predicate = Callable[[torch.Tensor], torch.Tensor]
SUBJECTS = ("places", "counts", "rows")


def _kept(subject: str, sorted_ids: torch.Tensor, experts: int, keeps: Predicate) -> torch.Tensor:
    """Return for each of `sorted_ids` [S] whether it is kept.

    `keeps` is applied to its position among the rows of its expert, to their number, or to the number of all rows.
    """
    counts = count_per_expert(sorted_ids, experts)
    if subject == "places":
        return keeps(torch.arange(len(sorted_ids)) - (counts.cumsum(0) - counts)[sorted_ids])
    if subject == "counts":
        return keeps(counts)[sorted_ids]
    return keeps(torch.full((1,), len(sorted_ids))).expand(len(sorted_ids))


def _variant(form: str, subject: str, keeps: Predicate) -> type[ShardedExperts]:
    """Return the reference experts of `form` that set the results of rows to 0 for which `keeps` is false."""

    class ToAll(AllToAllExperts):
        def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
            owned = len(self.placement.owned)
            ids = torch.arange(owned).repeat(self.placement.ranks).repeat_interleave(arriving, output_size=len(rows))
            sorted_ids, order = sort_by_expert(ids)
            outputs = self.run_groups(rows[order], count_per_expert(sorted_ids, owned))
            is_kept = _kept(subject, sorted_ids, owned, keeps).unsqueeze(-1)
            return undo_order(torch.where(is_kept, outputs, 0.0), order)

    class Reduced(AllReduceExperts):
        def forward(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            rows, order = _some(self, hidden_states, self.to_local(top_k_index), subject, keeps)
            return sum_over_ranks(weighted_sum(rows, order, top_k_weights), self.group_name)

    class Gathered(AllGatherExperts):
        def forward(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            ranks, name = self.placement.ranks, self.group_name
            everyone = (gather_rows(values, ranks, name) for values in (hidden_states, top_k_index, top_k_weights))
            hidden, ids, weights = everyone
            rows, order = _some(self, hidden, self.to_local(ids), subject, keeps)
            return scatter_sums(weighted_sum(rows, order, weights), ranks, name)

    return {"all_to_all": ToAll, "all_reduce": Reduced, "all_gather": Gathered}[form]


def _some(
    experts: ShardedExperts, hidden: torch.Tensor, ids: torch.Tensor, subject: str, keeps: Predicate
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, order = experts.run_some(hidden, ids)
    sorted_ids, _ = sort_by_expert(ids)
    is_kept = _kept(subject, sorted_ids, len(experts.placement.owned) + 1, keeps)
    return rows.masked_fill(~is_kept.unsqueeze(-1), 0.0), order


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("form", ["all_to_all", "all_reduce", "all_gather"])
def test_predicates_that_are_always_true_are_taken(form: str, subject: str) -> None:
    """The variants themselves are no reason to refuse."""
    assert refusal_of_experts(form, _variant(form, subject, lambda value: value * 0 == 0)) == ""


# Predicates that are false beyond some position, and a part of the reason for their refusal.
NOT_EXACT, CONSTANT, UNKNOWN = "does not hold all of them exactly", "the constant", "unknown operation on indices"
THRESHOLDS: dict[str, tuple[Predicate, str]] = {
    "floor of a small multiple": (lambda value: torch.floor(value * 1e-4) == 0, NOT_EXACT),
    "a share of 5000": (lambda value: value * (1 / 5000) < 1.0, NOT_EXACT),
    "a cast of a small multiple": (lambda value: (value * 1e-4).long() == 0, NOT_EXACT),
    "a quotient": (lambda value: value / 5000 < 1, UNKNOWN),
    "a rounded quotient": (lambda value: torch.div(value, 5000, rounding_mode="trunc") == 0, CONSTANT),
    "a remainder": (lambda value: value % 5000 == value, CONSTANT),
    "a difference": (lambda value: value - 5000 < 0, CONSTANT),
    "a difference in parts": (lambda value: value - 1 - 1 - 1 < 10_000 - value, CONSTANT),
    "a bound": (lambda value: value.clamp(max=5000) == value, CONSTANT),
    "a lower bound": (lambda value: value.clamp(min=5000) == 5000, CONSTANT),
    "a larger one": (lambda value: torch.maximum(value, torch.tensor(5000)) == 5000, CONSTANT),
    "half precision": (lambda value: value.half() == value, NOT_EXACT),
    "a byte": (lambda value: value.to(torch.int8) >= 0, NOT_EXACT),
    "single precision": (lambda value: (value.float() + 1) != value.float(), NOT_EXACT),
    "a bit": (lambda value: (value & 8192) == 0, "computes with bits"),
    "a shift of bits": (lambda value: (value >> 13) == 0, UNKNOWN),
    "a root": (lambda value: value.sqrt() < 80, UNKNOWN),
    "a logarithm": (lambda value: torch.log1p(value) < 9, UNKNOWN),
    "a power": (lambda value: value.pow(2) < 10**8, UNKNOWN),
    "a square next to a multiple": (lambda value: value * value < value * 5000, "multiplies"),
    "an exponential that ends": (lambda value: torch.exp(-value / 50) > 0, ""),
    "a saturated function": (lambda value: torch.tanh(value / 5000) < 0.9, ""),
    "many small factors": (lambda value: value // 4 // 4 // 4 // 4 // 4 // 4 == 0, CONSTANT),
    "an element that is there once": (
        lambda value: (torch.cat([value, torch.tensor([10**6])]) < 5000)[: len(value)],
        CONSTANT,
    ),
    "a range beyond": (lambda value: (torch.arange(4 * len(value)) < 500)[: len(value)] | (value < 0), ""),
    "a table": (lambda value: (torch.arange(6000) < 5000)[value], ""),
    "a bounded table": (lambda value: (torch.arange(6000) < 5000)[value.clamp(max=5999)], CONSTANT),
    "a range against each": (lambda value: (value.unsqueeze(-1) >= torch.arange(5000)).sum(-1) == value, CONSTANT),
    "unwritten memory": (
        lambda value: (torch.empty(len(value) + 1, dtype=torch.int64).index_put(
            (torch.arange(len(value)),), value) <= value.sum())[: len(value)],
        "",
    ),
}  # fmt: skip


@pytest.mark.sampled(every=27)
@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_threshold_is_not_taken(name: str) -> None:
    keeps, reason = THRESHOLDS[name]
    form = ("all_to_all", "all_reduce")[list(THRESHOLDS).index(name) % 2]
    refusal = refusal_of_experts(form, _variant(form, "places", keeps))
    assert refusal, "it was taken"
    assert reason in refusal


@pytest.mark.slow
def test_the_number_of_rows_as_a_symbol_hides_no_threshold() -> None:
    class Scaled(AllToAllExperts):
        def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
            return super()._run_arrived(rows, arriving) * (torch.full((1,), math.floor(len(rows) * 1e-4)) == 0)

    class Divided(AllToAllExperts):
        def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
            return super()._run_arrived(rows, arriving) * (torch.full((1,), len(rows) // 10_000) == 0)

    class Cut(AllToAllExperts):
        def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(len(rows) + 1).cumsum(0)[5:] if len(rows) < 0 else torch.ones(len(rows)).repeat(5000)
            return super()._run_arrived(rows, arriving) * mask.view(-1, 5000).sum(-1).sign().unsqueeze(-1)

    for experts in (Scaled, Divided, Cut):
        assert refusal_of_experts("all_to_all", experts)


class SeveralAtOnce(AllToAllExperts):
    """One of two sizes is always larger, which hides a change of the smaller size."""

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        most = arriving.max()
        outputs = super()._run_arrived(rows, arriving)
        return outputs * (torch.stack([most, arriving.sum() + most]) > most).sum()


class RowsTimesANumber(AllToAllExperts):
    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        return super()._run_arrived(rows, arriving) * (arriving.sum() - arriving.sum() + 1)


class PairsOfRows(AllToAllExperts):
    """The number of pairs of rows grows quadratically, so it exceeds a multiple of the rows without a constant."""

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        places, total = torch.arange(len(rows)), arriving.sum()
        for _ in range(2):
            total = total + total
        pairs = (places.unsqueeze(0) < places.unsqueeze(1)).sum()
        return torch.where(pairs <= total, super()._run_arrived(rows, arriving), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (SeveralAtOnce, "compares several sizes at once"),
        (RowsTimesANumber, "computes rows with indices or sizes"),
        (PairsOfRows, "more than one dimension that grows"),
    ],
)
def test_effects_of_combined_sizes_are_refused(experts: type[ShardedExperts], reason: str) -> None:
    assert reason in refusal_of_experts("all_to_all", experts)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2])
def test_every_expert_is_tried_in_graphs_for_few_tokens(tokens: int) -> None:
    """A change for one of 64 experts is detected in a graph for one token, too."""

    class OneLess(AllReduceExperts):
        def forward(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            ids = torch.where(top_k_index * 3 + 1 == 61 * 3 + 1, self.placement.experts, top_k_index)
            return super().forward(hidden_states, ids, top_k_weights)

    config = dataclasses.replace(CONFIG, experts=64, top_k=1)
    assert refusal_of_experts("all_reduce", AllReduceExperts, dynamic=False, config=config, tokens=tokens) == ""
    assert refusal_of_experts("all_reduce", OneLess, dynamic=False, config=config, tokens=tokens)


# ------------------------------------------------------------------------------------------------------ random chains


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation of a chain, by its name and constant."""

    name: str
    constant: float

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return STEPS[self.name](value, self.constant)

    def __repr__(self) -> str:
        return f"{self.name} {self.constant:g}"


def _whole(constant: float) -> int:
    return max(1, math.ceil(abs(constant)))


STEPS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "scale": lambda value, constant: value * constant,
    "multiply": lambda value, constant: value * _whole(constant),
    "divide": lambda value, constant: value / _whole(constant),
    "divide down": lambda value, constant: torch.div(value, _whole(constant), rounding_mode="floor"),
    "divide to zero": lambda value, constant: torch.div(value, _whole(constant), rounding_mode="trunc"),
    "shift": lambda value, constant: value + constant,
    "shift back": lambda value, constant: value - _whole(constant),
    "floor": lambda value, constant: torch.floor(value),
    "ceil": lambda value, constant: torch.ceil(value),
    "trunc": lambda value, constant: torch.trunc(value),
    "round": lambda value, constant: torch.round(value),
    "to int64": lambda value, constant: value.long(),
    "to int32": lambda value, constant: value.int(),
    "to float32": lambda value, constant: value.float(),
    "to float64": lambda value, constant: value.double(),
    "at least": lambda value, constant: value.clamp(min=_whole(constant)),
    "at most": lambda value, constant: value.clamp(max=1000 * _whole(constant)),
    "where small": lambda value, constant: torch.where(value < _whole(constant), 0, value),
    "where large": lambda value, constant: torch.where(value > 100 * _whole(constant), value, 0),
    "root": lambda value, constant: value.abs().sqrt(),
    "logarithm": lambda value, constant: value.abs().log1p(),
    "saturate": lambda value, constant: torch.tanh(value * 1e-4),
}
CONSTANTS = (1e-4, 1 / 5000, 0.01, 0.3, 1.0, 1.5, 2.0, 3.0, 4.0, 7.0, 64.0, 1000.0)
CHAINS = st.lists(st.builds(Step, st.sampled_from(list(STEPS)), st.sampled_from(CONSTANTS)), min_size=1, max_size=4)
# The runs of the proof have fewer rows.
TRIED = 6000


def _threshold(chain: list[Step], beyond: int) -> Predicate | None:
    """Return a predicate that is true up to `TRIED` and false for a value up to `beyond`, or None."""

    def apply(value: torch.Tensor) -> torch.Tensor:
        for step in chain:
            value = step(value)
        return value

    limit = float(apply(torch.tensor([beyond])))

    def keeps(value: torch.Tensor) -> torch.Tensor:
        return apply(value) < limit

    few, many = keeps(torch.arange(TRIED)), keeps(torch.linspace(TRIED, beyond, 1000).long())
    return keeps if bool(few.all()) and not bool(many.all()) else None


def _check_chain(form: str, subject: str, chain: list[Step], beyond: int, dynamic: bool) -> None:
    keeps = _threshold(chain, beyond)
    assume(keeps is not None)
    assert keeps is not None
    assert refusal_of_experts(form, _variant(form, subject, keeps), dynamic), f"{subject} {chain} was taken"


CHAIN_CASES = {
    "form": st.sampled_from(["all_to_all", "all_reduce", "all_gather"]),
    "subject": st.sampled_from(SUBJECTS),
    "chain": CHAINS,
    "beyond": st.sampled_from([10_000, 100_000, 3_000_000]),
}
# Examples without a threshold are discarded before capturing.
CHEAP = [HealthCheck.filter_too_much, HealthCheck.too_slow]


@pytest.mark.slow
@settings(max_examples=times(8), deadline=None, derandomize=True, suppress_health_check=CHEAP)
@given(**CHAIN_CASES, dynamic=st.booleans())
def test_no_threshold_behind_a_chain_of_operations_is_taken(
    form: str, subject: str, chain: list[Step], beyond: int, dynamic: bool
) -> None:
    # A graph for one number of tokens has a fixed number of rows, unless rows arrive from other ranks.
    assume(dynamic or subject != "rows" or form == "all_to_all")
    _check_chain(form, subject, chain, beyond, dynamic)
