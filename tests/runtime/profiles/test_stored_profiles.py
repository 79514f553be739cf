"""Profiles that were stored for this machine are found again, and no others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from moepass.models.errors import InputError
from moepass.passes.machine.hardware import Conditions, Hardware
from moepass.runtime.profiles.hardware_profiles import load_hardware
from moepass.runtime.profiles.stored_profiles import calibrate_command, profiles_folder, store_profile, stored_profile
from moepass.runtime.system.device_names import device_name
from tests.helpers.graphs.error_fields import refused

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def measured(ranks: int, threads: int, device: str | None = None) -> Hardware:
    conditions = Conditions(
        "2026-01-01", device_name(CPU) if device is None else device, ranks, threads, {}, computes_on_host=True
    )
    return dataclasses.replace(load_hardware(f"{ranks}xh100-80g"), conditions=conditions)


def test_a_stored_profile_is_found_by_ranks_and_threads() -> None:
    threads = torch.get_num_threads()
    assert stored_profile(CPU, 1) is None
    alone, both = measured(1, threads), measured(2, threads)
    store_profile(both)
    assert stored_profile(CPU, 1) is None, "ranks on a CPU share its cores"
    path = store_profile(alone)
    assert path.parent == profiles_folder()
    assert (stored_profile(CPU, 1), stored_profile(CPU, 2)) == (alone, both)


def test_profiles_of_other_machines_and_thread_numbers_are_ignored() -> None:
    store_profile(measured(1, torch.get_num_threads() + 1))
    store_profile(measured(1, torch.get_num_threads(), "another processor"))
    assert stored_profile(CPU, 1) is None
    assert stored_profile(torch.device("meta"), 1) is None


def test_on_gpus_a_profile_for_any_number_of_ranks_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moepass.runtime.profiles.stored_profiles.device_name", lambda device: "NVIDIA H100")
    cuda = torch.device("cuda", 0)
    eight, two = measured(8, 4, "NVIDIA H100"), measured(2, 16, "NVIDIA H100")
    store_profile(eight)
    assert stored_profile(cuda, 1) == stored_profile(cuda, 2) == eight
    store_profile(two)
    assert stored_profile(cuda, 2) == two
    assert stored_profile(cuda, 8) == eight


def test_profiles_without_measurements_are_not_stored() -> None:
    with refused(InputError, name="profile", value="1xh100-80g"):
        store_profile(load_hardware("1xh100-80g"))


def test_a_damaged_file_is_an_error_and_not_a_missing_profile() -> None:
    path = store_profile(measured(1, torch.get_num_threads()))
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="is not JSON"):
        stored_profile(CPU, 1)


def test_the_command_matches_the_profile_that_is_looked_up() -> None:
    assert calibrate_command(torch.device("cuda"), 8) == "moepass calibrate --device cuda --ranks 8"
    assert calibrate_command(CPU, 2) == f"moepass calibrate --device cpu --ranks 2 --threads {torch.get_num_threads()}"
