"""The planner's choice of resident layers: the fastest that fits the budget, or an even spread without a profile."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3MoeForCausalLM

import moepass
from moepass.models.errors import InputError, OptionError
from moepass.passes.ir.planner_decisions import STRUCTURAL
from moepass.passes.machine.hardware import Conditions, Figure, Hardware
from moepass.passes.planner.phases import LayerPhase
from moepass.passes.planner.schedule_search import spread_evenly
from moepass.passes.planner.simulate import ExecutionModel, simulate_phases
from moepass.runtime.offload.offload import OffloadReport
from moepass.runtime.profiles.stored_profiles import store_profile
from moepass.runtime.system.device_names import device_name
from tests.helpers.graphs.error_fields import refused
from tests.helpers.models.planned_models import TOKENS, planned_machine, planned_model
from tests.helpers.processes.halved_format import halve, resting_halved


def placed(model: nn.Module, **wishes: object) -> OffloadReport:
    return moepass.offload_experts(model, tokens=TOKENS, **wishes)  # type: ignore[arg-type]


def device_bytes(model: nn.Module, report: OffloadReport) -> float:
    """Return the bytes of tensors on the device and of the ring."""
    held = {id(value): value.nbytes for value in (*model.parameters(), *model.buffers())}
    assert report.store.placed is not None
    memory = report.store.placed.decisions.memory
    assert memory is not None
    # Banks at rest are parameters too, but do not count.
    return sum(held.values()) - report.home_bytes + report.ring_bytes + memory.activation_bytes


def least_bytes(model: nn.Module, **wishes: object) -> int:
    """Return the number of bytes that the error for a small budget names."""
    with pytest.raises(InputError, match="which is too small") as caught:
        placed(model, memory_budget=1000, **wishes)
    least = caught.value.expected
    assert isinstance(least, int)
    assert f"; use at least {least} bytes" in str(caught.value)
    return least


@pytest.mark.parametrize("hardware", [None, planned_machine()])
def test_the_least_budget_is_named_and_does(hardware: Hardware | None) -> None:
    model = planned_model()
    least = least_bytes(model, hardware=hardware)
    with refused(InputError, name="memory_budget", value=least - 1, expected=least):
        placed(model, memory_budget=least - 1, hardware=hardware)
    report = placed(model, memory_budget=least, hardware=hardware)
    assert (len(report.layers), report.store.slots) == (4, 1)


@pytest.mark.parametrize("hardware", [None, planned_machine()])
@pytest.mark.parametrize("banks", [2, 3, 4.5])
def test_placement_keeps_to_the_budget(banks: float, hardware: Hardware | None) -> None:
    model = planned_model((8, 4, 8, 16))
    largest = 16 * 3 * 64 * 32 * 4
    budget = least_bytes(model, hardware=hardware) + int((banks - 1) * largest / 2)
    report = placed(model, memory_budget=budget, hardware=hardware)
    assert device_bytes(model, report) <= budget
    assert report.resident_layers


@pytest.mark.parametrize("hardware", [None, planned_machine()])
def test_the_budget_includes_the_buffers_from_which_experts_are_decoded(hardware: Hardware | None) -> None:
    plain, model = least_bytes(planned_model(), hardware=hardware), planned_model()
    halve(model)
    with resting_halved():
        least = least_bytes(model, hardware=hardware)
        report = placed(model, memory_budget=least, hardware=hardware)
    assert report.store.encoded_buffer_bytes == report.store.slot_bytes // 2
    assert least - plain == 2 * report.store.encoded_buffer_bytes


def test_layers_are_read_as_they_are_and_not_as_the_config_says() -> None:
    report = placed(
        planned_model((8, 4, 8, 16)),
        hardware=planned_machine(),
        memory_budget=least_bytes(planned_model((8, 4, 8, 16))) + 400_000,
    )
    placed_model = report.store.placed
    assert placed_model is not None
    assert placed_model.architecture is not None
    counts = [layer.experts.count for layer in placed_model.architecture.layers if layer.experts]
    assert counts == [8, 4, 8, 16]
    assert placed_model.decisions.step_seconds is not None


def test_of_unequal_layers_that_stays_whose_copy_hurts_most() -> None:
    """The budget is enough for the largest bank with a slot for the others, or for small banks with a large slot."""
    model = planned_model((8, 8, 32, 8))
    report = placed(model, hardware=planned_machine(), memory_budget=least_bytes(model) + 8 * 3 * 64 * 32 * 4)
    assert report.resident_layers == ("model.layers.2.mlp.experts",)


def test_without_a_profile_layers_that_stay_are_spread_evenly() -> None:
    model = planned_model((8,) * 6)
    bank = 8 * 3 * 64 * 32 * 4
    report = placed(model, memory_budget=least_bytes(model) + 3 * bank)
    assert report.resident_layers == ("model.layers.1.mlp.experts", "model.layers.4.mlp.experts")
    assert report.store.slots == 2
    assert report.store.placed is not None
    decisions = report.store.placed.decisions
    assert decisions.source("resident_layers").startswith(f"{STRUCTURAL}: no hardware profile; moepass calibrate --dev")
    assert decisions.step_seconds is None


@pytest.mark.parametrize("fills_ahead", [True, False])
@given(st.integers(2, 9), st.integers(1, 8), st.integers(1, 3), st.integers(1, 8), st.integers(1, 8), st.integers(0, 8))
def test_an_even_spread_is_never_slower_than_another(
    fills_ahead: bool, layers: int, staying: int, slots: int, transfer: int, experts: int, attention: int
) -> None:
    """Compare the default with other choices, in the steady state of equal layers.

    The alternatives are the first layers, or, without a prefetch between runs, a spread that begins with a streamed
    layer.
    """
    machine = ExecutionModel(fills_ahead=fills_ahead)
    phases = [
        LayerPhase(*[f"{number}"] * 2, seconds, *bank)
        for number in range(layers)
        for seconds, bank in ((float(attention), ()), (float(experts), (1, float(transfer))))
    ]
    banks = list(range(1, 2 * layers, 2))
    staying = min(staying, layers - 1)
    even, alternative = (
        simulate_phases(phases, min(slots, layers - staying), chosen, machine).step_seconds
        for chosen in (
            spread_evenly(banks, staying, fills_ahead),
            banks[:staying] if fills_ahead else spread_evenly(banks, staying),
        )
    )
    assert even <= alternative * (1 + 1e-9)


def test_a_stored_profile_is_used_where_none_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    cpu = torch.device("cpu")
    conditions = Conditions("2026-01-01", device_name(cpu), 1, torch.get_num_threads(), {}, computes_on_host=True)
    store_profile(dataclasses.replace(planned_machine(), name="this machine", ranks=1, conditions=conditions))
    report = placed(planned_model())
    assert report.store.placed is not None
    assert report.store.placed.decisions.profile == "this machine"
    # A profile that does not fit is no error for a model that needs no profile.
    flops = {"bf16": Figure(1e10, "user")}
    store_profile(dataclasses.replace(planned_machine(), ranks=1, conditions=conditions, flops=flops))
    report = placed(planned_model())
    assert report.store.placed is not None
    assert report.store.placed.decisions.profile == ""
    assert "has no fp32 rate" in report.store.placed.decisions.source("step_seconds")


@pytest.mark.parametrize("content", [b"{", b'{"schema": "moepass.hardware/0", "name": "old"}'])
def test_an_unreadable_stored_profile_is_no_error(
    content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    conditions = Conditions(
        "2026-01-01", device_name(torch.device("cpu")), 1, torch.get_num_threads(), {}, computes_on_host=True
    )
    path = store_profile(dataclasses.replace(planned_machine(), ranks=1, conditions=conditions))
    path.write_bytes(content)
    with caplog.at_level("WARNING", "moepass"):
        report = placed(planned_model())
    assert report.store.placed is not None
    source = report.store.placed.decisions.source("step_seconds")
    for text in (source, caplog.text):
        assert str(path) in text
        assert "moepass calibrate --device cpu --ranks 1" in text
    with pytest.raises(InputError):
        placed(planned_model(), hardware=path)


def test_a_profile_in_the_options_must_suffice() -> None:
    with pytest.raises(InputError, match="profile 'made up' has no disk link"):
        moepass.offload_experts(planned_model(), home=moepass.Disk(folder="nowhere"), hardware=planned_machine())
    with pytest.raises(OptionError, match=r"hardware is 8; it must be a preset such as 8xh100-80g"):
        placed(planned_model(), hardware=8)


def test_requested_slots_are_used() -> None:
    model = planned_model()
    budget = least_bytes(model, slots=3)
    report = placed(model, memory_budget=budget, slots=3, hardware=planned_machine())
    assert (report.store.slots, report.resident_layers) == (3, ())


def test_a_budget_for_everything_leaves_the_model_as_it_is() -> None:
    model = planned_model()
    before = sum(value.nbytes for value in model.parameters())
    report = placed(model, memory_budget="1GB")
    assert (report.layers, report.ring_bytes, report.home_bytes) == ((), 0, 0)
    assert len(report.resident_layers) == 4
    assert sum(value.nbytes for value in model.parameters()) == before


@pytest.mark.parametrize("residents", [{"resident_layers": [1]}, {"resident_bytes": 10}])
def test_a_budget_and_residents_together_are_refused(residents: dict[str, object]) -> None:
    name = next(iter(residents))
    with pytest.raises(OptionError, match=f"memory_budget is '6GB', and {name} is .*: the plan decides which layers"):
        placed(planned_model(), memory_budget="6GB", **residents)


@pytest.mark.parametrize("budget", ["6 apples", "", "-1GB", 0, -5, float("nan"), float("inf"), True, [1]])
def test_a_wrong_budget_is_refused(budget: object) -> None:
    with pytest.raises(OptionError, match=r"memory.budget"):
        placed(planned_model(), memory_budget=budget)


@pytest.mark.parametrize("tokens", [0, -1, True, (0, 5), (1, 2, 3), "many", (1, 2.5)])
def test_a_wrong_number_of_tokens_is_refused(tokens: object) -> None:
    with pytest.raises((OptionError, InputError), match="tokens is"):
        moepass.offload_experts(planned_model(), tokens=tokens)  # type: ignore[arg-type]


def test_more_tokens_leave_less_room() -> None:
    with pytest.raises(InputError) as caught:
        moepass.offload_experts(planned_model(), memory_budget=1000, tokens=4096)
    many = caught.value.expected
    assert isinstance(many, int)
    assert many > least_bytes(planned_model())


@pytest.mark.parametrize("wishes", [{}, {"memory_budget": "1GB", "hardware": planned_machine(), "tokens": TOKENS}])
def test_a_model_without_experts_to_move_is_refused_for_that(wishes: dict[str, object]) -> None:
    offloaded = planned_model()
    moepass.offload_experts(offloaded)
    config = copy.deepcopy(offloaded.config)
    config.mlp_only_layers = list(range(config.num_hidden_layers))
    for model in (nn.Linear(4, 4), offloaded, Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32)):
        with pytest.raises(InputError, match=f"{type(model).__name__} has no expert weights to offload"):
            moepass.offload_experts(model, **wishes)  # type: ignore[arg-type]
