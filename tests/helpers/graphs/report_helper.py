"""One report that several test files look at: making it captures a graph, which takes seconds."""

from __future__ import annotations

import functools

import moepass
from moepass.explaining.report import Report


@functools.lru_cache(maxsize=1)
def small_report() -> Report:
    """Partly resident, behind a host link that exposes time, on devices without peer links."""
    return moepass.explain("olmoe-1b-7b", hardware="2xl40s", seq=1024, batch=4, memory_budget_bytes=8e9)
