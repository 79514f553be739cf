"""Expect an error by its type and fields, independent of its text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from moepass.models.errors import MoepassError


@contextlib.contextmanager
def refused(kind: type[MoepassError], **fields: object) -> Iterator[None]:
    """Check that the block raises a `kind`, not a subclass of it, with these values of its fields."""
    with pytest.raises(kind) as raised:
        yield
    assert type(raised.value) is kind
    actual = {name: getattr(raised.value, name) for name in fields}
    assert actual == fields, f"{actual} instead of {fields} in: {raised.value}"
