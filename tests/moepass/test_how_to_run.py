"""The Python code in a report runs the chosen strategy."""

from __future__ import annotations

import ast
import dataclasses

import pytest

from moepass.explaining.explain_model import explain
from moepass.explaining.forecasts import how_to_run
from moepass.explaining.report_parts import StrategyPart
from moepass.models.homes import HOMES


def _strategy(chosen: str) -> StrategyPart:
    return StrategyPart(
        chosen=chosen, reason="", runner_up=None, home="peer", homes_tried=(), memory_budget_bytes=1.0,
        crossover_tokens=None,
    )  # fmt: skip


@pytest.mark.slow
def test_the_call_names_home_slots_and_layers_of_the_schedule() -> None:
    report = explain("qwen3-235b-a22b", hardware="8xh100-80g")
    assert report.schedule is not None
    call, compiled = report.how_to_run.split("; ")
    (offload,) = ast.parse(call).body
    assert isinstance(offload, ast.Expr)
    assert isinstance(offload.value, ast.Call)
    keywords = {word.arg: ast.literal_eval(word.value) for word in offload.value.keywords}
    assert keywords == {
        "home": report.strategy.home,
        "slots": report.schedule.slots,
        "resident_layers": list(report.schedule.resident_layers),
    }
    ast.parse(compiled)
    row = next(row for row in report.comparison if row.strategy == "asyncep")
    assert row.comm_bytes_per_layer == 0
    assert report.saturation is not None
    assert row.background_bytes_per_layer == report.saturation.gather_bytes


@pytest.mark.slow
def test_each_rank_loads_its_part_of_a_checkpoint() -> None:
    report = explain("qwen3-235b-a22b", hardware="8xh100-80g")
    assert report.schedule is not None
    call, _ = how_to_run(report.strategy, report.schedule, "./my checkpoint", "", "bf16", "cuda").split("; ")
    assert call.startswith('model = moepass.load_pretrained("./my checkpoint", home=')
    ast.parse(call)


@pytest.mark.slow
def test_code_that_cannot_run_yet_has_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HOMES, "hybrid", dataclasses.replace(HOMES["hybrid"], devices=("cpu",)))
    report = explain("qwen3-235b-a22b", hardware="8xh100-80g", home="hybrid", lower="eager")
    assert report.how_to_run.endswith(
        "  # home hybrid only works on cpu so far; plan for cuda with --home disk or --home host or --home peer"
    )
    ast.parse(report.how_to_run)
    assert "#" not in how_to_run(report.strategy, report.schedule, None, "", "bf16", "cpu")


def test_nothing_is_offloaded_if_all_experts_fit() -> None:
    report = explain("demo", hardware="8xh100-80g", home="peer")
    assert report.strategy.chosen == "resident"
    assert report.how_to_run == 'compiled = torch.compile(model, backend="asyncep")'


@pytest.mark.parametrize(
    ("chosen", "dtype", "words"),
    [("dp_ep", "bf16", "moepass does not run dp_ep"), ("asyncep", "fp8", "moepass computes only experts in fp8")],
)
def test_the_reason_replaces_code_that_cannot_run(chosen: str, dtype: str, words: str) -> None:
    assert how_to_run(_strategy(chosen), None, None, "", dtype, "cuda").startswith(words)


def test_the_reason_has_figures_if_nothing_fits() -> None:
    report = explain("qwen3-235b-a22b", hardware="8xh100-80g", memory_budget_bytes=1e9)
    needed = min(row.memory_bytes for row in report.comparison) / 1e9
    assert report.how_to_run == (
        f"no strategy fits: the smallest needs {needed:.1f} GB per device, the budget is 1.0 GB; see the advice"
    )
