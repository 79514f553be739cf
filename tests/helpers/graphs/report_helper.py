"""One report for several test modules: it captures a graph, which takes seconds."""

from __future__ import annotations

import functools

import moepass
from moepass.explaining.report import Report


@functools.lru_cache(maxsize=1)
def small_report() -> Report:
    """Return a report of a model that is partly resident and exposes transfer time, on devices without peer links."""
    return moepass.explain("olmoe-1b-7b", hardware="2xl40s", seq=1024, batch=4, memory_budget_bytes=8e9)
