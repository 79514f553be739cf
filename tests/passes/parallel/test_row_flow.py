"""Activation functions that mix rows are refused, and those that compute rows independently are taken and right."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from moepass.models.reference.expert_parallel import EP_FORMS
from moepass.models.reference.grouped_experts import grouped_gemm
from moepass.passes.ir.plan import Plan
from moepass.passes.rows.row_layout import Layout, broadcast, features, reshaped, rows_first
from tests.helpers.graphs.eliminated_graphs import complete_banks, eliminate
from tests.helpers.graphs.simulated_ranks import Captured, capture, hidden_states, run_ranks, with_tokens
from tests.helpers.models.moe_stack import StackConfig
from tests.helpers.mutants.random_cases import times

# A function of the rank and the outputs of the gate and up GEMMs.
Activation = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]

CONFIG = StackConfig(layers=1, hidden=16, width=16, experts=4, top_k=2)


def _captured(
    form: str, activation: Activation, rank: int, tokens: int = 9, dynamic: bool = True, config: StackConfig = CONFIG
) -> Captured:
    class Experts(EP_FORMS[form]):  # type: ignore[misc]
        def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            ends = counts.cumsum(0, dtype=torch.int32)
            gate, up = grouped_gemm(rows, self.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
            inner = activation(self.placement.rank, gate, up)
            return grouped_gemm(inner, self.down_proj.transpose(1, 2), ends)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EP_FORMS, form, Experts)
        return capture(config, form, rank, 2, tokens, dynamic=dynamic)


def _plan(form: str, activation: Activation, rank: int = 1, tokens: int = 9, dynamic: bool = True) -> Plan:
    return eliminate(_captured(form, activation, rank, tokens, dynamic)).plan


def _largest_difference(
    form: str, activation: Activation, times: float = 1.0, tokens: int = 9, dynamic: bool = True
) -> float | None:
    """Return the largest difference between the ranks' results before and after the passes; None if they are refused.

    Hidden states are `times` as large as usual.
    """
    ranks = [_captured(form, activation, rank, tokens, dynamic) for rank in range(2)]
    results = [eliminate(captured_rank) for captured_rank in ranks]
    if not all(result.plan.local_blocks for result in results):
        return None
    hidden = [times * hidden_states(CONFIG, tokens, 0 if form == "all_reduce" else rank) for rank in range(2)]
    inputs = [with_tokens(captured_rank, values) for captured_rank, values in zip(ranks, hidden, strict=True)]
    wanted = run_ranks([captured_rank.module for captured_rank in ranks], inputs)
    outputs = run_ranks([result.module for result in results], inputs, complete_banks(ranks, results))
    pairs = zip(wanted, outputs, strict=True)
    return max(
        float((expected - actual).abs().max() / expected.abs().max().clamp(min=1)) for (expected,), (actual,) in pairs
    )


def _refusal(form: str, activation: Activation, dynamic: bool = True, tokens: int = 9) -> str:
    plan = _plan(form, activation, tokens=tokens, dynamic=dynamic)
    return plan.refusals[0].reason if plan.refusals else ""


# ------------------------------------------------------------------------------------------------------ rows that meet


def _beyond(limit: int) -> Activation:
    def activation(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        inner = F.silu(gate) * up
        return torch.where((inner[:, :1] == inner[:, :1]).cumsum(0) > limit, torch.zeros_like(inner), inner)

    return activation


def _by_norm_of_all(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up / gate.pow(2).mean().sqrt().clamp(min=1.0)


def _by_largest_row(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    inner = F.silu(gate) * up
    return inner / inner.abs().amax(0, keepdim=True).clamp(min=1.0)


def _by_number_of_truths(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up * ((gate[:, :1].abs() >= 0).sum() <= 5000)


def _turned_far_out(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    inner = F.silu(gate) * up
    return torch.where(torch.arange(inner.shape[1]) < 100, inner, inner.flip(0))


def _with_random_numbers(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up + torch.rand_like(gate)


def _with_gemms_of_rows(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up + (gate @ gate.t()) @ up


def _shifted(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up.roll(1, 0)


def _flattened(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up.flatten().cumsum(0).view(up.shape)


@torch.library.custom_op("moepass_tests::some_activation", mutates_args=())
def _some_activation(gate: torch.Tensor) -> torch.Tensor:
    return F.silu(gate)


@_some_activation.register_fake
def _(gate: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate)


def _unknown(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _some_activation(gate) * up
    return result


MIXING: dict[str, tuple[Activation, str]] = {
    "a norm over all rows": (_by_norm_of_all, "mean"),
    "the largest of all rows": (_by_largest_row, "amax"),
    "a place among the rows": (_beyond(5000), "cumsum"),
    "a number of rows that is counted": (_by_number_of_truths, "sum"),
    "rows in another order beyond some feature": (_turned_far_out, "flip"),
    "random numbers": (_with_random_numbers, "rand"),
    "GEMMs of rows": (_with_gemms_of_rows, "mm"),
    "other rows": (_shifted, "roll"),
    "sums over everything": (_flattened, "cumsum"),
    "an unknown operator": (_unknown, "some_activation"),
}


@pytest.mark.sampled(every=10)
@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mixes", MIXING)
def test_rows_that_meet_are_refused_with_the_operation(mixes: str, dynamic: bool) -> None:
    activation, operation = MIXING[mixes]
    reason = _refusal("all_reduce", activation, dynamic)
    assert operation in reason
    assert "computes every row alone" in reason
    assert "_at_" not in reason  # names of nodes must not appear


@pytest.mark.slow
@pytest.mark.parametrize("form", EP_FORMS)
def test_rows_that_meet_only_for_large_numbers_are_refused_in_every_form(form: str) -> None:
    """The values of the mock runs are bounded by 1, and so are those that `clamp(min=1)` changes."""
    assert _largest_difference(form, _by_norm_of_all, times=10.0) is None


@pytest.mark.slow
def test_a_wide_activation_is_not_judged_by_a_narrow_one() -> None:
    config = dataclasses.replace(CONFIG, width=256)
    plan = eliminate(_captured("all_to_all", _turned_far_out, 1, config=config)).plan
    assert "flip" in plan.refusals[0].reason


@pytest.mark.slow
def test_reads_by_some_features_are_proved_too() -> None:
    """One GEMM counts its rows wrongly, and only the last features read it."""
    config = dataclasses.replace(CONFIG, width=256)

    class Experts(EP_FORMS["all_to_all"]):  # type: ignore[misc]
        def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            ends = counts.cumsum(0, dtype=torch.int32)
            weights = self.gate_up_proj.transpose(1, 2)
            right = F.silu(grouped_gemm(rows, weights, ends)[:, :256])
            wrong = grouped_gemm(rows, weights, counts.flip(0).cumsum(0, dtype=torch.int32))[:, :256]
            inner = torch.where(torch.arange(256) < 200, right, wrong)
            return grouped_gemm(inner, self.down_proj.transpose(1, 2), ends)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EP_FORMS, "all_to_all", Experts)
        captured = capture(config, "all_to_all", 1, 2, 9)
    assert not eliminate(captured).plan.local_blocks


def _features_first(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    inner = (F.silu(gate) * up).t().contiguous()
    by_feature = inner.view(-1, inner.shape[1])
    return by_feature.softmax(0).view(inner.shape[0], -1).t()


def _unpadded(form: str) -> type[torch.nn.Module]:
    """Return experts for ranks with equal numbers of tokens, which need no rows of padding."""

    class Experts(EP_FORMS[form]):  # type: ignore[misc]
        def _most_tokens(self, hidden_states: torch.Tensor) -> int:
            return hidden_states.shape[0]

    return Experts


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [3, 5, 8])
def test_a_number_that_is_the_number_of_the_blocks_rows_is_no_number_of_features(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local form has half as many rows, so a view by the block's number of rows would mix features and rows."""
    monkeypatch.setitem(EP_FORMS, "all_gather", _unpadded("all_gather"))
    assert _largest_difference("all_gather", _features_first, tokens=tokens, dynamic=False) is None
    reason = _refusal("all_gather", _features_first, tokens=tokens, dynamic=False)
    assert "view" in reason
    assert f"[16, {4 * tokens}]" in reason


@pytest.mark.slow
def test_rows_behind_features_are_taken_where_no_number_of_them_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (F.silu(gate) * up).t().contiguous().softmax(0).t()

    monkeypatch.setitem(EP_FORMS, "all_gather", _unpadded("all_gather"))
    difference = _largest_difference("all_gather", turned, tokens=5, dynamic=False)
    assert difference is not None
    assert difference < 1e-4


# ------------------------------------------------------------------------------------------------- what ranks compare


def _summed_places(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up * torch.arange(4 + rank).sum()


def _own_number(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up * torch.full((4 + rank,), 1.0).sum()


def _by_feature(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up * (1 + torch.arange(gate.shape[1]) * 0.1)


def _every_second(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(gate.shape[1]) % 2 == 0, F.silu(gate) * up, up)


def _half(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.pad(gate[:, ::2], (0, gate.shape[1] // 2)) * up


def _largest_four(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(gate).scatter(-1, gate.topk(4, -1)[1], 1.0) * up


def _normed(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.silu(gate) * up, (gate.shape[1],))


def _low_rank(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up + gate @ torch.ones(16, 2) @ torch.ones(2, 16)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("form", EP_FORMS)
@pytest.mark.parametrize("activation", [_summed_places, _own_number])
def test_ranks_with_other_constants_have_other_signatures(form: str, activation: Activation) -> None:
    digests = {_plan(form, activation, rank).local_blocks[0].experts for rank in range(2)}
    assert len(digests) == 2


def _of_two_results(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(up)
    return F.silu(gate) * mantissa + exponent


def _log_sigmoid(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.logsigmoid(gate) * up


def _in_fours(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.silu(gate) * up).view(-1, 4).softmax(-1).view_as(gate)


def _with_ones(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up * torch.ones(gate.shape[0], 1)


def _stretched(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up * torch.full((1,), 1.5).expand(gate.shape[0], 1)


def _by_einsum(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.einsum("rf,fg->rg", F.silu(gate) * up, torch.eye(16) * 2)


def _by_groups(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.group_norm(F.silu(gate) * up, 4)


ALONE = (_by_feature, _every_second, _half, _largest_four, _normed, _low_rank)
# Functions that write the number of rows into the graph.
SIZED = (_in_fours, _with_ones, _stretched, _by_einsum, _by_groups)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("activation", [*ALONE, *SIZED])
@pytest.mark.parametrize("form", ["all_to_all", "all_reduce"])
def test_the_text_of_the_experts_does_not_depend_on_the_number_of_tokens(form: str, activation: Activation) -> None:
    digests = {
        _plan(form, activation, 1, tokens, dynamic).local_blocks[0].experts
        for tokens, dynamic in ((9, False), (8, False), (9, True))
    }
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("form", EP_FORMS)
@pytest.mark.parametrize("activation", [_of_two_results, _log_sigmoid])
def test_an_operation_on_elements_may_have_several_results(form: str, activation: Activation) -> None:
    difference = _largest_difference(form, activation)
    assert difference is not None
    assert difference < 1e-4


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("form", EP_FORMS)
@pytest.mark.parametrize("activation", SIZED)
def test_the_number_of_rows_may_say_how_long_something_is(form: str, activation: Activation) -> None:
    difference = _largest_difference(form, activation)
    assert difference is not None
    assert difference < 1e-4


def _masked_features(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.silu(gate) * up).masked_fill(torch.arange(16) >= 12, 0.0)


def _chosen_features(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.where((torch.arange(16) < 12).unsqueeze(0), F.silu(gate) * up, torch.zeros(()))


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("form", EP_FORMS)
@pytest.mark.parametrize("activation", [_masked_features, _chosen_features])
def test_a_constant_mask_of_features_is_repeated(form: str, activation: Activation) -> None:
    difference = _largest_difference(form, activation)
    assert difference is not None
    assert difference < 1e-4


@pytest.mark.sampled(every=9)
@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("form", EP_FORMS)
def test_a_constant_mask_of_rows_is_refused(form: str, dynamic: bool) -> None:
    def masked(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        inner = F.silu(gate) * up
        return inner.masked_fill((torch.arange(inner.shape[0]) >= 5).unsqueeze(-1), 0.0)

    plan = _plan(form, masked, dynamic=dynamic)
    assert not plan.local_blocks


@pytest.mark.slow
@pytest.mark.parametrize("form", ["all_to_all", "all_gather", "all_reduce"])
def test_the_number_of_rows_may_say_nothing_else(form: str) -> None:
    assert "`aten.div.Tensor` computes with the number of rows" in _refusal(form, lambda _, g, u: g * u / g.shape[0])
    copies = _refusal(form, lambda _, g, u: g * u + u.unsqueeze(0).expand(u.shape[0], -1, -1).sum(0))
    assert "as many features as there are rows" in copies
    places = _refusal(form, lambda _, g, u: g * u * torch.arange(u.shape[0]).unsqueeze(-1))
    assert "`aten.arange.default` computes with the number of rows" in places


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_reads_of_exchanged_values_are_named(dynamic: bool) -> None:
    class Experts(EP_FORMS["all_gather"]):  # type: ignore[misc]
        def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            ends = counts.cumsum(0, dtype=torch.int32)
            inner = grouped_gemm(rows, self.gate_up_proj.transpose(1, 2), ends)[:, :16].relu()
            return grouped_gemm(inner / rows.abs().amax(), self.down_proj.transpose(1, 2), ends)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EP_FORMS, "all_gather", Experts)
        captured = capture(CONFIG, "all_gather", 1, 2, 9, dynamic=dynamic)
    (refusal,) = eliminate(captured).plan.refusals
    assert "reads what ranks exchange at `_c10d_functional.all_gather" in refusal.reason


@pytest.mark.slow
@pytest.mark.parametrize("form", ["all_gather", "all_reduce"])
def test_another_size_is_named(form: str) -> None:
    reason = _refusal(form, lambda _, g, u: g * u * torch.ones(g.shape[0] // 2 + 1).sum())
    assert "reads a size" in reason
    assert "is not a multiple of the number of its experts' rows" in reason


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("form", EP_FORMS)
@pytest.mark.parametrize("activation", [_by_feature, _normed])
def test_features_may_differ_from_each_other(form: str, activation: Activation) -> None:
    difference = _largest_difference(form, activation)
    assert difference is not None
    assert difference < 1e-4


# ------------------------------------------------------------------------------------------------------ random programs

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BY_ROW: dict[str, Step] = {
    "silu": lambda a, b: F.silu(a) * b,
    "clamp": lambda a, b: a.clamp(-0.5, 0.5) + b,
    "softmax": lambda a, b: a.softmax(-1),
    "mean": lambda a, b: a - a.mean(-1, keepdim=True),
    "max": lambda a, b: a / a.abs().amax(1, keepdim=True).clamp(min=1.0),
    "cumsum": lambda a, b: a.cumsum(-1) * 0.1,
    "flip": lambda a, b: a + b.flip(1),
    "sort": lambda a, b: a.sort(-1)[0],
    "cat": lambda a, b: torch.cat([a[:, :4], b[:, 4:]], 1),
    "stack": lambda a, b: torch.stack([a, b], 1).sum(1),
    "select": lambda a, b: a * b[:, 3].unsqueeze(-1),
    "where": lambda a, b: torch.where(a > b, a, b * 2),
    "interleave": lambda a, b: torch.cat([a[..., ::2], b[..., 1::2]], -1),
    "gather": lambda a, b: a.gather(-1, b.argsort(dim=-1, stable=True)),
    "transpose": lambda a, b: (a.t() * b.t()).t(),
    "by feature": lambda a, b: a * torch.arange(16),
    "matrix": lambda a, b: a @ torch.eye(16) * 2,
    "index": lambda a, b: a[:, torch.tensor([3, 1, 2, 0]).repeat(4)],
}
ACROSS: dict[str, Step] = {
    "sum": lambda a, b: a + b.sum(0),
    "softmax": lambda a, b: a.softmax(0),
    "cumsum": lambda a, b: a + b.cumsum(0),
    "flip": lambda a, b: a * b.flip(0),
    "sort": lambda a, b: a.sort(0)[0],
    "first": lambda a, b: a + b[:1],
    "any": lambda a, b: a * (b > 0.9).any(),
    "gram": lambda a, b: (a.t() @ b).sum(0) + a,
    "norm": lambda a, b: a / b.norm().clamp(min=1.0),
    "order": lambda a, b: a[b[:, 0].argsort(dim=0, stable=True)],
}


def _program(steps: Sequence[Step]) -> Activation:
    def activation(rank: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda inner, step: step(inner, up), steps, gate)

    return activation


EXAMPLES = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
MANY = settings(max_examples=times(10), **EXAMPLES)
FORMS, STEPS = st.sampled_from(list(EP_FORMS)), st.sampled_from(list(BY_ROW))
ROWS_ALONE = given(FORMS, st.lists(STEPS, min_size=3, max_size=6))
ROWS_MEET = given(FORMS, st.lists(STEPS, max_size=3), st.sampled_from(list(ACROSS)), st.lists(STEPS, max_size=3))


def _check_rows_alone(form: str, names: list[str]) -> None:
    difference = _largest_difference(form, _program([BY_ROW[name] for name in names]))
    assert difference is not None
    assert difference < 1e-3


def _check_rows_meet(form: str, before: list[str], across: str, after: list[str]) -> None:
    steps = [*(BY_ROW[name] for name in before), ACROSS[across], *(BY_ROW[name] for name in after)]
    assert "between its GEMMs" in _refusal(form, _program(steps))


@pytest.mark.slow
@MANY
@ROWS_ALONE
def test_programs_with_independent_rows_are_taken_and_right(form: str, names: list[str]) -> None:
    _check_rows_alone(form, names)


@pytest.mark.slow
@MANY
@ROWS_MEET
def test_programs_with_one_step_across_rows_are_refused(
    form: str, before: list[str], across: str, after: list[str]
) -> None:
    _check_rows_meet(form, before, across, after)


# -------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("rows", "shapes"),
    [
        (9, [[9, 2, 4], [9, 8]]),
        (9, [[18, 4], [9, 8]]),
        (9, [[72], [9, 8]]),
        (6, [[2, 3, 8], [2, 24], [6, 8]]),
        (0, [[0, 4], [0, 2, 4], [0, 8]]),
        (1, [[1, 2, 4], [8], [1, 8]]),
    ],
)
def test_views_and_back_keep_rows(rows: int, shapes: list[list[int]]) -> None:
    before = rows_first([rows, 8])
    assert functools.reduce(lambda layout, shape: _reshaped(layout, shape), shapes, before) == before


def _reshaped(layout: Layout, shape: Sequence[int]) -> Layout:
    reshaped_layout = reshaped(layout, shape)
    assert reshaped_layout is not None
    return reshaped_layout


def test_shares_of_rows_in_another_order_are_no_rows() -> None:
    shared = _reshaped(rows_first([6, 8]), [2, 3, 8])
    turned = Layout(operator.itemgetter(1, 0, 2)(shared.dimensions))
    assert not _reshaped(turned, [6, 8]).is_by_row
    assert _reshaped(shared, [6, 8]).is_by_row


def test_rows_depend_only_on_themselves() -> None:
    rows = rows_first([8, 8])
    turned = Layout(rows.dimensions[::-1])
    assert broadcast([rows, rows], [8, 8]) == rows
    assert broadcast([rows, turned], [8, 8]) is None
    column = Layout((rows.dimensions[0], features(1)))
    assert broadcast([rows, column], [8, 8]) == rows
    assert broadcast([column, Layout((features(1), rows.dimensions[0]))], [8, 8]) is None
