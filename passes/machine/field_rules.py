"""Rules that a record states in the annotations of its fields, and the check of them.

    rate: Annotated[Figure, NumberBounds(1e3, 1e21, "bytes or FLOPs per second")]
    host: TransferLink | None
    flops: Annotated[dict[str, Rate], Keys(("bf16", "fp8"))]

`check_fields` follows nested records and dicts, so an error names the field by its path, such as `host.bytes_per_s`.
`msgspec.Meta` is not used: it is checked only by `msgspec.convert`, and its errors do not name the wrong value.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection
from typing import Any, Protocol

from moepass.models.errors import InputError, one_of


class _FieldRule(Protocol):
    """A condition on the value of one field."""

    def violation(self, value: Any) -> tuple[str, object, object] | None:
        """Return the end of the error message, the wrong value and the right ones; None if `value` is allowed."""


@dataclasses.dataclass(frozen=True)
class NumberBounds:
    """The smallest and the largest number of a field. A Figure counts as its value.

    Attributes:
        reason: why the bounds exist, or the unit, at the end of the error message
    """

    least: float
    most: float
    reason: str

    def violation(self, value: Any) -> tuple[str, object, object] | None:
        """Return an error if the number lies outside the bounds."""
        number = getattr(value, "value", value)
        if self.least <= number <= self.most:
            return None
        bounds = f"between {self.least:g} and {self.most:g}"
        shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
        return f"is {shown}; it must lie {bounds}: {self.reason}", number, (self.least, self.most)


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys that a dict can have."""

    names: Collection[str]

    def violation(self, value: Any) -> tuple[str, object, object] | None:
        """Return an error for the first unknown key."""
        for key in value:
            if key not in self.names:
                return f"has {key!r}; it can have {one_of(self.names)}", key, tuple(self.names)
        return None


@dataclasses.dataclass(frozen=True)
class TableAxes:
    """The axes of a table of seconds, in order."""

    names: tuple[str, ...]

    def violation(self, value: Any) -> tuple[str, object, object] | None:
        """Return an error if the table has other axes."""
        names = tuple(axis.name for axis in value.axes)
        if names == self.names:
            return None
        text = f"is a table with the axes {', '.join(names)}; it must have {', '.join(self.names)}"
        return text, names, self.names


def check_fields(record: Any, context: str) -> None:
    """Raise InputError for the first field of the dataclass `record`, or of records in it, that violates a rule.

    Args:
        record: The dataclass instance to check.
        context: What `record` is, at the start of the error message.
    """
    for name, hint in _hints(type(record)).items():
        _check_value(name, getattr(record, name), hint, context)


def check_value(name: str, value: Any, rule: _FieldRule, context: str) -> None:
    """Raise InputError if `value` violates `rule`. The message calls the value `name`, after the text of `context`."""
    violation = rule.violation(value)
    if violation is not None:
        text, wrong, right = violation
        raise InputError(f"{context}: {name} {text}", name=name, value=wrong, expected=right)


def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _check_value(name: str, value: Any, hint: Any, context: str) -> None:
    if value is None:
        return
    if type(None) in typing.get_args(hint):  # `X | None`
        hint = typing.get_args(hint)[0]
    for rule in getattr(hint, "__metadata__", ()):
        check_value(name, value, rule, context)
    if isinstance(value, dict):
        dict_hint = hint.__origin__ if hasattr(hint, "__metadata__") else hint
        for key, item in value.items():
            _check_value(f"{name}.{key}", item, typing.get_args(dict_hint)[1], context)
    elif dataclasses.is_dataclass(value):
        for field, field_hint in _hints(type(value)).items():
            _check_value(f"{name}.{field}", getattr(value, field), field_hint, context)
