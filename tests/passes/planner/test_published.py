"""The predictions of `benchmarks/published.py` stay within 15 % of the published results, cell by cell."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def published() -> ModuleType:
    return importlib.import_module("benchmarks.published")


@pytest.mark.parametrize(("table", "cells"), [("by_context", 4), ("mfu_ranges", 5), ("end_to_end", 4)])
def test_every_cell_is_within_bounds(published: ModuleType, table: str, cells: int) -> None:
    rows = getattr(published, table)()
    assert len(rows) == cells
    assert [row for row in rows if row[-1] != "yes"] == []


def test_the_best_baseline_is_the_published_one(published: ModuleType) -> None:
    assert {row[1] for row in published.by_context()} == {published.STRONGEST}


def test_the_lengths_of_the_real_workloads_hold_the_published_tokens(published: ModuleType) -> None:
    assert published.real_tokens(published.real_shape()) == pytest.approx(published.REAL_TOKENS, rel=1e-3)
