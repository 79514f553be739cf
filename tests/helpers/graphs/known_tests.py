"""Stored captures are for code that is known by a version; tests have models of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moepass.runtime.captures import known_code


@contextlib.contextmanager
def known_tests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this block the code of the tests, and that in `folder`, counts as known."""
    tests = Path(__file__).parents[2]
    folders = (*known_code.known_folders(), *(os.path.join(path, "") for path in (tests, folder)))
    monkeypatch.setattr(known_code, "known_folders", lambda: folders)
    known_code.is_known_file.cache_clear()
    try:
        yield
    finally:
        known_code.is_known_file.cache_clear()
