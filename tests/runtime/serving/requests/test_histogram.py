"""A histogram counts the same as a plain loop over the values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepass.runtime.serving.requests.view import Histogram

NUMBERS = st.integers(-5, 20) | st.floats(-5, 20)


@given(st.lists(NUMBERS, max_size=6, unique=True).map(sorted), st.lists(NUMBERS, max_size=30))
def test_values_are_counted_up_to_each_bound(bounds: list[float], values: list[float]) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    assert histogram.cumulative == (*(sum(value <= bound for value in values) for bound in bounds), len(values))
    assert histogram.sum == pytest.approx(sum(values))
