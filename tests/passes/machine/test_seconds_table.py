"""Tables of seconds are exact at their points, linear in log-log scale between them, and never decreasing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepass.models.errors import InputError
from moepass.passes.machine.seconds_table import Axis, SecondsTable, table_of, without_dips

_SIZES = st.floats(1e-3, 1e9)
_SECONDS = st.floats(1e-9, 1e4)


@st.composite
def tables(draw: st.DrawFn, monotone: bool = False) -> SecondsTable:
    axes = {
        name: sorted(draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=4, unique=True)))
        for name in ("rows", "columns")[: draw(st.integers(1, 2))]
    }
    count = math.prod(len(points) for points in axes.values())
    seconds = draw(st.lists(_SECONDS, min_size=count, max_size=count))
    if monotone:
        return table_of(axes, seconds, "calibrated")
    return SecondsTable(tuple(Axis(name, tuple(points)) for name, points in axes.items()), tuple(seconds), "user")


def _position(table: SecondsTable, sizes: tuple[float, float]) -> dict[str, float]:
    return {axis.name: size for axis, size in zip(table.axes, sizes, strict=False)}


@given(tables())
def test_exact_at_every_point(table: SecondsTable) -> None:
    points = itertools.product(*[axis.points for axis in table.axes])
    for point, seconds in zip(points, table.seconds, strict=True):
        assert table.at(**_position(table, point)) == pytest.approx(seconds, rel=1e-9)  # type: ignore[arg-type]


@given(tables(), st.floats(0, 1), st.floats(0, 1))
def test_interpolation_stays_between_neighbouring_points(table: SecondsTable, x: float, y: float) -> None:
    position = {
        axis.name: math.exp(math.log(axis.points[0]) * (1 - fraction) + math.log(axis.points[-1]) * fraction)
        for axis, fraction in zip(table.axes, (x, y), strict=False)
    }
    assert min(table.seconds) * (1 - 1e-9) <= table.at(**position) <= max(table.seconds) * (1 + 1e-9)


@given(st.floats(0, 2), st.floats(0, 2), st.floats(1, 1e4), st.floats(1, 1e4))
def test_a_power_law_is_met_exactly(power: float, other: float, rows: float, columns: float) -> None:
    axes = {"rows": (1, 30, 10_000), "columns": (1, 7, 10_000)}
    seconds = [1e-6 * x**power * y**other for x, y in itertools.product(*axes.values())]
    wanted = 1e-6 * rows**power * columns**other
    assert table_of(axes, seconds, "calibrated").at(rows=rows, columns=columns) == pytest.approx(wanted, rel=1e-6)


@given(tables(monotone=True), _SIZES, _SIZES, _SIZES)
def test_more_never_takes_less(table: SecondsTable, first: float, second: float, other: float) -> None:
    """This holds inside and outside the table."""
    small, large = sorted((first, second))
    for sizes in (((small, other), (large, other)), ((other, small), (other, large))):
        before, after = (table.at(**_position(table, point)) for point in sizes)
        assert before <= after * (1 + 1e-9)


@given(tables(), st.floats(1, 1e3))
def test_the_rate_is_constant_beyond_the_last_point(table: SecondsTable, factor: float) -> None:
    last = {axis.name: axis.points[-1] for axis in table.axes}
    name = table.axes[0].name
    assert table.at(**{**last, name: last[name] * factor}) == pytest.approx(table.at(**last) * factor, rel=1e-6)


def test_below_its_first_point_seconds_fall_no_faster_than_anywhere_in_the_table() -> None:
    flat = table_of({"bytes": (100, 1000)}, (1.0, 1.0), "calibrated")
    assert flat.at(bytes=1) == pytest.approx(1.0)
    steep = table_of({"bytes": (10, 20)}, (1.0, 8.0), "calibrated")
    assert steep.at(bytes=5) == pytest.approx(0.5)


@given(st.lists(_SECONDS, min_size=12, max_size=12))
def test_smoothing_removes_dips_and_changes_nothing_else(seconds: list[float]) -> None:
    smooth = without_dips((3, 4), seconds)
    for row in range(3):
        for column in range(4):
            value = smooth[row * 4 + column]
            assert column == 3 or value <= smooth[row * 4 + column + 1]
            assert row == 2 or value <= smooth[row * 4 + column + 4]
    assert without_dips((3, 4), smooth) == pytest.approx(smooth, rel=1e-9)
    assert min(seconds) * (1 - 1e-9) <= min(smooth)
    assert max(smooth) <= max(seconds) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("axes", "seconds", "message"),
    [
        ((), (1.0,), "no axes"),
        ((Axis("bytes", (2.0, 1.0)),), (1.0, 1.0), r"axis 'bytes' of a table has the points \[2.0, 1.0\]"),
        ((Axis("bytes", (0.0, 1.0)),), (1.0, 1.0), "above 0 and increase"),
        ((Axis("bytes", ()),), (), "above 0 and increase"),
        ((Axis("bytes", (1.0, 2.0)),), (1.0,), "2 bytes has 1 times in seconds; it must have 2"),
        ((Axis("bytes", (1.0, 2.0)),), (1.0, 0.0), "has a time of 0.0 seconds; every time must be above 0"),
        ((Axis("bytes", (1.0, 2.0)),), (1.0, math.nan), "has a time of nan seconds"),
    ],
)
def test_numbers_that_make_no_table(axes: Any, seconds: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SecondsTable(axes, seconds, "user")


def test_a_table_names_its_axes() -> None:
    with pytest.raises(TypeError, match=r"given for \['rows'\]; the axes of the table are \['bytes'\]"):
        table_of({"bytes": (1, 2)}, (1.0, 2.0), "user").at(rows=1)
