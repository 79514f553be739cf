"""The errors that moepass raises on purpose. They stand here because every other part may import `models`."""

from __future__ import annotations

from collections.abc import Iterable


class MoepassError(Exception):
    """Base of every error raised on purpose; its text is one line that names the value and what would be right."""


class OptionError(MoepassError, ValueError):
    """An option is unknown or has a value that it cannot have."""


class CheckpointError(MoepassError, ValueError):
    """A path is no checkpoint, or its files do not fit together."""


class InputError(MoepassError, ValueError):
    """Something that the user gave to run on (texts, labels, a device) cannot be used."""


def one_of(values: Iterable[object]) -> str:
    """`values` as they stand in an error message: sorted and separated by commas."""
    return ", ".join(sorted(str(value) for value in values))
