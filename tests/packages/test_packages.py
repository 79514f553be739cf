"""The layers of other projects' own packages: right on real ranks, and taken or refused as the page says."""

from __future__ import annotations

import importlib.metadata

import pytest

from tests.helpers.packages.package_cases import CASES, PackageCase, RunSettings, run_case, settings_of
from tests.helpers.packages.package_table import BEGIN, END, PAGE, read_results, table

RUNS = [(case, settings) for case in CASES for settings in settings_of(case)]


def test_the_page_contains_the_recorded_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == table(read_results()).strip()


def test_every_case_is_recorded() -> None:
    recorded = {case.name: case for case in read_results().cases}
    assert list(recorded) == [case.name for case in CASES]
    for case in CASES:
        settings = [recorded_run.run.settings for recorded_run in recorded[case.name].runs]
        assert settings
        assert set(settings) <= set(settings_of(case))
        assert recorded[case.name].needs == case.needs


@pytest.mark.packages
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "settings"),
    RUNS,
    ids=[f"{case.name}-{run_settings.ranks}-{run_settings.lower}-{run_settings.dtype}" for case, run_settings in RUNS],
)
def test_a_layer_is_right_and_taken_as_recorded(case: PackageCase, settings: RunSettings) -> None:
    (recorded,) = (case_results for case_results in read_results().cases if case_results.name == case.name)
    version = importlib.metadata.version(case.package)
    # A run that is not recorded has to be right; what becomes of the layer may depend on ranks and lowering.
    before = next((recorded_run for recorded_run in recorded.runs if recorded_run.run.settings == settings), None)
    run = run_case(case, settings)
    if before is None:
        return
    assert version == before.version, "`make test-packages` installs the versions that were recorded"
    assert (run.is_taken, run.forms, run.exchanges) == (before.run.is_taken, before.run.forms, before.run.exchanges), (
        run
    )
