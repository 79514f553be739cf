"""Records of options. Checks and the command line are derived from them, and the documentation follows them.

An option is one field of a `msgspec.Struct`: its name, its type with bounds, its default, and `option(...)`, which
describes it. This module imports no torch, because `moepass --help` must not wait for it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, inspect

from moepass.models.errors import OptionError, one_of

_Record = TypeVar("_Record", bound=msgspec.Struct)

# A whole number from 1 on.
Count = Annotated[int, Meta(ge=1)]


def option(
    description: str, *, unset: str = "", details: str = "", metavar: str = "", expected: str = "", short: str = ""
) -> Meta:
    """Describe an option, for use in `Annotated`.

    The description is one or two sentences in Markdown, shown by `--help` and in the documentation. Only the
    documentation shows `details`. `unset` is the meaning of None, shown as the default. `metavar` is the placeholder of
    the value on the command line, `short` a second name there, such as `-i`. `expected` has the valid values, for error
    messages; if it is empty, they are derived from the type.
    """
    texts = {"unset": unset, "details": details, "metavar": metavar, "expected": expected, "short": short}
    return Meta(description=description, extra=texts)


@dataclasses.dataclass(frozen=True)
class OptionField:
    """An option of a record: its annotated type, its default, and the arguments of `option` as `texts`.

    `info` is the type without its description, as msgspec's inspection presents it. The default is `msgspec.NODEFAULT`
    if the option is required.
    """

    name: str
    type: Any
    info: inspect.Type
    default: Any
    texts: Mapping[str, str]

    @property
    def flag(self) -> str:
        """The name on the command line, such as `--queue-bytes`."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_required(self) -> bool:
        """True if the record has no default for the option."""
        return self.default is msgspec.NODEFAULT

    @property
    def values(self) -> tuple[inspect.Type, ...]:
        """The types of the values besides None."""
        types = self.info.types if isinstance(self.info, inspect.UnionType) else (self.info,)
        return tuple(_plain(kind) for kind in types if not isinstance(kind, inspect.NoneType))

    @property
    def expected(self) -> str:
        """The valid values, as an error message names them."""
        return self.texts["expected"] or ", or ".join(_expected(kind) for kind in self.values)


def fields_of(record: type[msgspec.Struct]) -> tuple[OptionField, ...]:
    """Return the options of a record that are described, in the order of their declaration."""
    fields = []
    for field in msgspec.structs.fields(record):
        info = inspect.type_info(field.type)
        if isinstance(info, inspect.Metadata) and info.extra is not None and "unset" in info.extra:
            assert info.extra_json_schema is not None
            texts = {**info.extra, "description": info.extra_json_schema["description"]}
            fields.append(OptionField(field.name, field.type, info.type, field.default, texts))
    return tuple(fields)


def read_options(record: type[_Record], values: Mapping[str, Any], *, strict: bool = True) -> _Record:
    """Check `values` by the types of a record and make the record of them.

    Names that the record lacks are ignored: see `check_names`. Without `strict`, numbers and truth values may be text.
    Raises OptionError with the name of the first option that has a wrong value, that value, and the valid values.
    """
    converted = {}
    for field in fields_of(record):
        if field.name in values:
            value = values[field.name]
            try:
                converted[field.name] = msgspec.convert(value, field.type, strict=strict)
            except msgspec.ValidationError as error:
                text = f"option {field.name} is {value!r}; it must be {field.expected}"
                raise OptionError(text, name=field.name, value=value, expected=field.expected) from error
        elif field.is_required:
            text = f"option {field.name} is missing; it must be {field.expected}"
            raise OptionError(text, name=field.name, expected=field.expected)
    return record(**converted)


def check_names(values: Iterable[object], records: Iterable[type[msgspec.Struct]]) -> None:
    """Raise OptionError for the first of the names `values` that no record has, with the most similar name."""
    names = [field.name for record in records for field in fields_of(record)]
    for name in values:
        if name not in names:
            similar = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {similar[0]}? " if similar else ""
            text = f"option {name!r} is unknown; {hint}the options are {', '.join(names)}"
            raise OptionError(text, name=str(name), expected=names)


def _plain(kind: inspect.Type) -> inspect.Type:
    return _plain(kind.type) if isinstance(kind, inspect.Metadata) else kind


def _expected(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.BoolType):
        return "True or False"
    if isinstance(kind, inspect.LiteralType):
        return f"one of {one_of(kind.values)}" if len(kind.values) > 1 else repr(kind.values[0])
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        least = f" above {kind.gt}" if kind.gt is not None else f" from {kind.ge}" if kind.ge is not None else ""
        most = f" to {kind.le:.15g}" if kind.le is not None else " on" if kind.ge is not None else ""
        return noun + least + most
    return "a list" if isinstance(kind, inspect.VarTupleType) else "text"
