"""The marks `covering` and `sampled`: which combinations of parameters run, and which of them are fast."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
AXES = {"letter": 3, "number": 4, "flag": 2}
_TESTS = f"""
import pytest

slow = pytest.mark.slow

def axes(function):
    for name, count in {AXES}.items():
        function = pytest.mark.parametrize(name, range(count))(function)
    return function

@axes
def test_all(letter, number, flag): ...

@pytest.mark.covering(1)
@axes
def test_values(letter, number, flag): ...

@pytest.mark.covering(2)
@axes
def test_pairs(letter, number, flag): ...

@pytest.mark.covering(2)
@pytest.mark.sampled(every=3)
@axes
def test_sample(letter, number, flag): ...

@pytest.mark.covering(1)
@pytest.mark.parametrize(("left", "right"), [(0, 5), (0, 6), (1, 5), (1, 6)])
@pytest.mark.parametrize("letter", range(3))
def test_rows(left, right, letter): ...

@pytest.mark.covering(1)
@pytest.mark.parametrize("letter", [pytest.param(0, marks=slow), 1, 2])
@pytest.mark.parametrize("number", [pytest.param(0, marks=slow), 1])
def test_fast_ones_first(letter, number): ...
"""
# The conftest.py of these tests is the one that is tested, so a plugin lists the tests that run.
_PLUGIN = """
import json

def pytest_collection_finish(session):
    for item in session.items:
        is_slow = item.get_closest_marker("slow") is not None
        print(json.dumps([item.originalname, item.callspec.params, is_slow]))
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """A combination that runs: the value of each parameter."""

    values: Mapping[str, int]
    is_slow: bool


Runs = dict[str, list[Run]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the combinations of each test above that run."""
    folder = tmp_path_factory.mktemp("covering")
    shutil.copy(CONFTEST, folder)
    (folder / "test_some.py").write_text(_TESTS)
    (folder / "listing.py").write_text(_PLUGIN)
    options = ("--collect-only", "-q", "-p", "listing", "-p", "no:schemathesis", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, "test_some.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    listed: Runs = {}
    for line in done.stdout.splitlines():
        if line.startswith("["):
            name, values, is_slow = json.loads(line)
            listed.setdefault(name, []).append(Run(values, is_slow))
    return listed


def _tuples(listed: list[Run], names: tuple[str, ...]) -> list[tuple[int, ...]]:
    return [tuple(run.values[name] for name in names) for run in listed]


@pytest.mark.parametrize(("test", "strength", "most"), [("test_values", 1, 4), ("test_pairs", 2, 14)])
def test_every_value_or_pair_of_values_occurs_in_few_combinations(
    runs: Runs, test: str, strength: int, most: int
) -> None:
    assert len(runs["test_all"]) == 3 * 4 * 2
    assert len(runs[test]) <= most
    for names in itertools.combinations(AXES, strength):
        every = itertools.product(*(range(AXES[name]) for name in names))
        assert set(_tuples(runs[test], names)) == set(every), names
    combinations = _tuples(runs[test], tuple(AXES))
    assert len(set(combinations)) == len(combinations)


def test_rows_of_several_parameters_are_one_value(runs: Runs) -> None:
    assert sorted(_tuples(runs["test_rows"], ("left", "right"))) == [(0, 5), (0, 6), (1, 5), (1, 6)]
    assert set(_tuples(runs["test_rows"], ("letter",))) == {(0,), (1,), (2,)}


def test_of_combinations_that_add_as_much_a_fast_one_runs(runs: Runs) -> None:
    listed = [(run.values["letter"], run.values["number"]) for run in runs["test_fast_ones_first"] if not run.is_slow]
    assert listed == [(1, 1), (2, 1)]
    (slow,) = [run.values for run in runs["test_fast_ones_first"] if run.is_slow]
    assert slow == {"letter": 0, "number": 0}


def test_one_in_several_of_those_that_run_is_fast(runs: Runs) -> None:
    assert _tuples(runs["test_sample"], tuple(AXES)) == _tuples(runs["test_pairs"], tuple(AXES))
    fast = [run for run in runs["test_sample"] if not run.is_slow]
    assert len(runs["test_sample"]) // 3 <= len(fast) <= len(runs["test_sample"]) // 3 + 1
