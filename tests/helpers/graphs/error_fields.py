"""Expect an error by its type and fields, whatever its text says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from moepass.models.errors import MoepassError


@contextlib.contextmanager
def refused(kind: type[MoepassError], **fields: object) -> Iterator[None]:
    """The block raises a `kind`, not a subclass of it, whose fields have these values."""
    with pytest.raises(kind) as raised:
        yield
    assert type(raised.value) is kind
    found = {name: getattr(raised.value, name) for name in fields}
    assert found == fields, f"{found} instead of {fields} in: {raised.value}"
