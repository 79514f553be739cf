"""Errors that moepass raises on purpose. They are defined here because every other package may import `models`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound="MoepassError")
_PLAIN = (bool, int, float, complex, str, bytes, PurePath)


class MoepassError(Exception):
    """Base class of all errors raised on purpose. Its text is one line that names the wrong value and the right ones.

    An error can be pickled and copied. Attributes that are not plain data (strings, numbers, paths, and collections of
    them) are then replaced by their `repr`, so that the error reaches another process with any user value.

    Attributes (None if they do not apply):
        name: the wrong object: an option, an argument, a tensor, a bank, a segment, a pass
        value: its value
        expected: the right value, the possible values, or the limit
        ranks: the ranks in question, or those that differ
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
        """Return the error of a single wrong value: `NAME is VALUE; it must be EXPECTED`."""
        return cls(f"{name} is {value!r}; it must be {expected}", name=name, value=value, expected=expected)

    @classmethod
    def unknown(cls: type[_Error], name: str, value: object, known: Iterable[object]) -> _Error:
        """Return the error of a value that is not one of several: `NAME is VALUE; it must be one of KNOWN`."""
        return cls(
            f"{name} is {value!r}; it must be one of {one_of(known)}", name=name, value=value, expected=tuple(known)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, {name: _portable(value) for name, value in vars(self).items()})


class OptionError(MoepassError, ValueError):
    """An option is unknown or has an invalid value."""


class CheckpointError(MoepassError, ValueError):
    """A path is not a checkpoint, or its files do not fit together."""


class InputError(MoepassError, ValueError):
    """An input of the user (texts, labels, a device) cannot be used."""


def one_of(values: Iterable[object]) -> str:
    """Return `values` for an error message: sorted and separated by commas."""
    return ", ".join(sorted(str(value) for value in values))


def _rebuild(kind: type[MoepassError], args: tuple[object, ...], fields: dict[str, object]) -> MoepassError:
    # `__init__` is not called, because subclasses may have other arguments than the text.
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
