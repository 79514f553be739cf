"""The errors that moepass raises on purpose. They stand here because every other part may import `models`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound="MoepassError")
_PLAIN = (bool, int, float, complex, str, bytes, PurePath)


class MoepassError(Exception):
    """Base of every error raised on purpose; its text is one line that names the value and what would be right.

    What a handler may want to look at stands in fields; each is None where it does not apply:

        name      what is wrong: an option, an argument, a tensor, a bank, a segment, a pass
        value     the value that it has
        expected  what would be right: a value, the values to choose from, or the limit
        path      the file or folder that it is about
        rank      the rank that it is about
        ranks     the ranks that it is about, or that differ

    An error can be pickled and copied; fields that are no plain data (strings, numbers, paths, and collections of
    them) become their `repr` then, so that it reaches another process whatever the user had given.
    """

    def __init__(
        self,
        message: str = "",
        *,
        name: str | None = None,
        value: object = None,
        expected: object = None,
        path: str | PurePath | None = None,
        rank: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(message)
        self.name = name
        self.value = value
        self.expected = expected
        self.path = path
        self.rank = rank
        self.ranks = None if ranks is None else tuple(ranks)

    @classmethod
    def wrong(cls: type[_Error], name: str, value: object, expected: str) -> _Error:
        """The error of a value that stands by itself: `NAME is VALUE; it must be EXPECTED`."""
        return cls(f"{name} is {value!r}; it must be {expected}", name=name, value=value, expected=expected)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, {name: _portable(value) for name, value in vars(self).items()})


class OptionError(MoepassError, ValueError):
    """An option is unknown or has a value that it cannot have."""


class CheckpointError(MoepassError, ValueError):
    """A path is no checkpoint, or its files do not fit together."""


class InputError(MoepassError, ValueError):
    """Something that the user gave to run on (texts, labels, a device) cannot be used."""


def one_of(values: Iterable[object]) -> str:
    """`values` as they stand in an error message: sorted and separated by commas."""
    return ", ".join(sorted(str(value) for value in values))


def _rebuild(kind: type[MoepassError], args: tuple[object, ...], fields: dict[str, object]) -> MoepassError:
    # Without `__init__`: subclasses may take other arguments than their text.
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(fields)
    return error


def _portable(value: object) -> object:
    if value is None or type(value) in _PLAIN or isinstance(value, PurePath):
        return value
    for collection in (list, tuple, set, frozenset):
        if type(value) is collection:
            return collection(_portable(item) for item in value)
    if type(value) is dict:
        return {_portable(key): _portable(item) for key, item in value.items()}
    return repr(value)
