"""Step functions of a number of rows, as models round it up, have the predicted properties for all numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moepass.passes.parallel.ranges.any_padding import AnyPadding
from moepass.passes.parallel.ranges.step_functions import StepFunction

ROWS = np.arange(3000)
Rows = np.ndarray
X = StepFunction.identity()


def _shifted(number: int) -> StepFunction:
    shifted = X.plus(StepFunction.constant(number))
    assert shifted is not None
    return shifted


def _some(function: StepFunction | None) -> StepFunction:
    assert function is not None
    return function


@given(
    st.lists(
        st.tuples(st.sampled_from(["plus", "times", "divided", "at_least", "again"]), st.integers(1, 19)), max_size=6
    )
)
def test_functions_have_their_values(steps: list[tuple[str, int]]) -> None:
    function: StepFunction | None = X
    expected = ROWS.copy()
    for name, number in steps:
        assert function is not None
        if name == "plus":
            function, expected = function.plus(StepFunction.constant(number), -1), expected - number
        elif name == "times":
            function, expected = function.times(number - 9), expected * (number - 9)
        elif name == "divided":
            function, expected = function.divided(number), expected // number
        elif name == "at_least":
            function, expected = function.at_least(number), np.maximum(expected, number)
        else:
            function, expected = function.plus(X, number), expected + number * ROWS
        if function is None:
            return  # there would be too many steps
    assert function is not None
    assert np.array_equal(function.at(ROWS), expected)
    if function.bounds is not None:
        assert function.bounds == (expected.min(), expected.max())


WRITINGS: dict[str, Callable[[], StepFunction]] = {
    "quotient": lambda: _some(_shifted(15).divided(16)).times(16),
    "negative quotient": lambda: _some(X.times(-1).divided(16)).times(-16),
    "remainder": lambda: _some(X.plus(_some(X.times(-1).plus(_some(X.times(-1).divided(16)).times(16), -1)))),
}


@pytest.mark.parametrize("writing", WRITINGS)
def test_equal_functions_have_equal_keys(writing: str) -> None:
    function = WRITINGS[writing]()
    assert function.key == WRITINGS["quotient"]().key
    assert _some(function.plus(X, -1)).bounds == (0, 15)
    assert function.key != _some(_shifted(15).divided(8)).times(8).key


def test_functions_with_other_slopes_are_not_padding() -> None:
    more = _some(_shifted(7).divided(8)).times(8)
    more = _some(more.plus(_some(X.divided(4096)).times(8)))
    assert _some(more.plus(X, -1)).bounds is None
    assert _some(X.divided(2)).at_least(3) is not None
    assert StepFunction.constant(5).at_least(3) is None
    assert X.divided(10**6) is None


@pytest.mark.parametrize("unit", [0, 1, 7, 200])
def test_any_padding_stays_within_its_bounds(unit: int) -> None:
    quotient = WRITINGS["quotient"]()
    counts = torch.arange(1000)
    seen = set()
    for seed in range(5):
        added = AnyPadding(0, 1, 0, quotient).padded(counts, unit, seed) - counts
        assert bool((added >= 0).all())
        assert bool((added <= unit).all())
        seen |= set(added.tolist())
        room = AnyPadding(4, 6, 1, quotient).padded(counts, unit, seed) - counts
        assert bool((room >= 4 * unit).all())
        assert bool((room <= 6 * unit).all())
    assert {0, unit} <= seen
    assert len(seen) > unit // 2
    assert torch.equal(AnyPadding(0, 1, 0, quotient).padded(counts, None, 0), (counts + 15) // 16 * 16)
