"""Command-line options that Typer reads from records of options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer
from msgspec import inspect as msgspec_inspect

from moepass.option_records import OptionField, fields_of, read_options

_TYPES: dict[type, type] = {
    msgspec_inspect.BoolType: bool,
    msgspec_inspect.IntType: int,
    msgspec_inspect.FloatType: float,
    msgspec_inspect.StrType: str,
    msgspec_inspect.VarTupleType: list[str],
}


def takes_records(command: Callable[..., None]) -> Callable[..., None]:
    """Let a Typer command take records: each field of a record becomes an option of the command line.

    A parameter of `command` that is annotated with a `msgspec.Struct` is replaced by one option for each field that
    `moepass.option_records.option` describes; `--help` lists them together. The command is called with the checked
    record.
    """
    records: dict[str, type[msgspec.Struct]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            records[parameter.name] = kind
            panel = None if parameter.name == "options" else f"{parameter.name.capitalize()} options"
            parameters += [_parameter(field, panel) for field in fields_of(kind)]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def with_records(**arguments: Any) -> None:
        for name, record in records.items():
            values = {field.name: _typed(field, arguments.pop(field.name)) for field in fields_of(record)}
            arguments[name] = read_options(record, values, strict=False)
        command(**arguments)

    with_records.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_records.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_records


def _parameter(field: OptionField, panel: str | None) -> inspect.Parameter:
    value, *alternatives = field.values
    if isinstance(value, msgspec_inspect.LiteralType):
        kind: Any = _literal(field.type)
    else:
        kind = str if alternatives else _TYPES[type(value)]
    is_flag = kind is bool and field.default is False
    number = (
        value if isinstance(value, msgspec_inspect.IntType | msgspec_inspect.FloatType) and not alternatives else None
    )
    settings = typer.Option(
        *([field.flag, *filter(None, [field.texts["short"]])] if is_flag or kind is not bool else []),
        help=field.texts["description"],
        metavar=field.texts["metavar"] or ("N" if number else None),
        show_default=field.texts["unset"] or not is_flag,
        rich_help_panel=panel,
        min=number.ge if number else None,
        max=number.le if number else None,
    )
    default = inspect.Parameter.empty if field.is_required else None if field.default == () else field.default
    annotation = kind if default is not None else kind | None
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, settings]
    )


def _literal(kind: Any) -> Any:
    """Return the `Literal` in an annotated type, whose values msgspec sorts."""
    if get_origin(kind) is Literal:
        return kind
    return next((literal for member in get_args(kind) if (literal := _literal(member)) is not None), None)


def _typed(field: OptionField, value: Any) -> Any:
    """Return a value of Typer as the record has it: an option that was not repeated is an empty tuple there."""
    return () if value is None and field.default == () else value
