"""Comparison of replies that were computed at different times."""

from __future__ import annotations

from typing import Any

import pytest


def lasting(reply: Any, *others: str) -> Any:
    """Return the reply without the fields that differ from call to call, and without `others`."""
    if not isinstance(reply, dict):
        return reply
    return {name: value for name, value in reply.items() if name not in ("id", "created", *others)}


def check_alike(reply: Any, expected: Any) -> None:
    """Check that two replies are equal up to rounding, because a prefix may have come from the cache."""
    if isinstance(expected, dict):
        assert list(reply) == list(expected)
        for name, value in expected.items():
            check_alike(reply[name], value)
    elif isinstance(expected, list):
        assert len(reply) == len(expected)
        for actual_item, expected_item in zip(reply, expected, strict=True):
            check_alike(actual_item, expected_item)
    elif isinstance(expected, float):
        assert reply == pytest.approx(expected, abs=1e-5, rel=1e-5)
    else:
        assert reply == expected
