"""The host memory of a machine: the bytes that ranks keep there, and plans that do not fit."""

from __future__ import annotations

import dataclasses

import pytest

from moepass.models.sizes.presets import preset
from moepass.passes.machine.hardware import Conditions, Figure, Hardware
from moepass.passes.machine.layer_times import Sequences
from moepass.passes.planner.forecast import forecast
from moepass.passes.planner.host_memory import host_memory
from moepass.passes.planner.strategies import ASYNCEP, Setting, banks_bytes
from moepass.runtime.profiles.hardware_profiles import load_hardware


def setting(host_memory_bytes: float | None, **changes: object) -> Setting:
    hardware: Hardware = dataclasses.replace(load_hardware("8xh100"), **changes)  # type: ignore[arg-type]
    if host_memory_bytes is not None:
        hardware = dataclasses.replace(hardware, host_memory_bytes=Figure(host_memory_bytes, "user"))
    return Setting(preset("qwen3-30b-a3b"), hardware, Sequences(1, 4096), "bf16", 72e9)


@pytest.mark.parametrize(("home", "copies"), [("host", 8), ("hybrid", 1), ("peer", 0), ("disk", 0), ("device", 0)])
def test_banks_are_counted_once_per_copy_that_the_machine_holds(home: str, copies: int) -> None:
    asked = setting(1e12)
    counted = host_memory(asked, home, 60e9)
    assert counted.needed_bytes == copies * banks_bytes(asked)
    assert counted.available_bytes == 1e12
    assert counted.fits
    assert not counted.holds_devices


def test_missing_values_of_a_profile_are_not_guessed() -> None:
    assert host_memory(setting(None), "host", 60e9).fits is None


def test_devices_of_a_cpu_are_part_of_its_memory() -> None:
    conditions = Conditions("2026-01-01", "CPU", 2, 1, {}, computes_on_host=True)
    asked = setting(None, conditions=conditions, ranks=2, memory_bytes=Figure(100e9, "measured"))
    counted = host_memory(asked, "host", 5e9)
    assert counted.needed_bytes == 2 * banks_bytes(asked) + 2 * 5e9
    assert counted.available_bytes == 200e9
    assert counted.holds_devices


def test_asyncep_does_not_fit_where_host_memory_is_too_small_for_its_banks() -> None:
    enough, banks = setting(1e12), banks_bytes(setting(None))
    assert forecast(enough, "host").cost(ASYNCEP).fits
    made = forecast(setting(8 * banks - 1), "host")
    assert made.host.fits is False
    assert not made.cost(ASYNCEP).fits
    # Every bank once is an eighth of that.
    assert forecast(setting(banks), "hybrid").cost(ASYNCEP).fits
