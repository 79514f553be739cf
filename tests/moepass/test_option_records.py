"""Options are declared once: the command line, the environment and the documentation follow the records."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
import pytest
import typer

from moepass.cli.client_commands import BatchOptions
from moepass.cli.explain_command import ExplainOptions
from moepass.cli.main import app
from moepass.cli.score_command import ScoreOptions
from moepass.cli.serve_options import FrontendOptions, RankOptions, ServerOptions
from moepass.clients.workloads import BenchOptions
from moepass.models.errors import OptionError
from moepass.option_records import OptionField, check_names, fields_of, read_options
from moepass.options import Options
from moepass.ray_serve.ray_options import ApplicationOptions
from moepass.runtime.lowering.lower_segments import LOWERINGS

DOCS = Path(__file__).resolve().parents[2] / "docs"
RECORDS = (
    *(ApplicationOptions, BatchOptions, BenchOptions, ExplainOptions, FrontendOptions),
    *(Options, RankOptions, ScoreOptions, ServerOptions),
)


def _option_table(record: type[msgspec.Struct], *, flags: bool) -> str:
    """Return the options of a record as a Markdown table. `flags` names them as on the command line."""
    rows = [
        (f"`{field.flag if flags else field.name}`", _default(field, flags), _meaning(field))
        for field in fields_of(record)
    ]
    lines = [f"| {' | '.join(row)} |" for row in [("option", "default", "meaning"), ("---",) * 3, *rows]]
    return "\n".join(lines) + "\n"


def _default(field: OptionField, flags: bool) -> str:
    if field.texts["unset"]:
        return field.texts["unset"]
    if field.is_required:
        return "required"
    if flags and isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, float):
        return f"`{field.default:g}`"
    return f"`{field.default}`" if flags else f"`{field.default!r}`".replace("'", '"')


def _meaning(field: OptionField) -> str:
    return " ".join(text for text in (field.texts["description"], field.texts["details"]) if text)


@pytest.mark.parametrize(
    ("page", "record", "flags"),
    [
        ("options.md", Options, False),
        ("explain.md", ExplainOptions, True),
        ("serving.md", ServerOptions, True),
        ("serving.md", RankOptions, True),
        ("serving.md", ApplicationOptions, False),
    ],
)
def test_the_documentation_has_the_table_of_each_record(page: str, record: type[msgspec.Struct], flags: bool) -> None:
    table = _option_table(record, flags=flags)
    assert table in (DOCS / page).read_text(encoding="utf-8"), f"docs/{page} must contain:\n{table}"


@pytest.mark.parametrize(
    ("name", "records"),
    [
        ("bench", (BenchOptions,)),
        ("serve", (ServerOptions, RankOptions)),
        ("batch", (BatchOptions, RankOptions)),
        ("score", (ScoreOptions,)),
        ("explain", (ExplainOptions,)),
    ],
)
def test_a_command_has_the_options_of_its_records(name: str, records: tuple[type[msgspec.Struct], ...]) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    options = {parameter.name: parameter for parameter in command.params}
    for field in (field for record in records for field in fields_of(record)):
        parameter = options[field.name]
        assert field.flag in parameter.opts
        assert parameter.help == field.texts["description"]
        assert parameter.required == field.is_required
        if not field.is_required:
            assert parameter.default == (None if field.default == () else field.default)


def test_serve_takes_each_option_from_the_environment() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    for field in (*fields_of(ServerOptions), *fields_of(RankOptions)):
        text = "true" if field.default is False else "31" if field.name != "device" else "cuda"
        context = click.Context(command, auto_envvar_prefix="MOEPASS")
        parameter = next(parameter for parameter in command.params if parameter.name == field.name)
        assert parameter.resolve_envvar_value(context) is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(f"MOEPASS_{field.name.upper()}", text)
            assert parameter.resolve_envvar_value(context) == text


@pytest.mark.parametrize("record", RECORDS)
def test_every_field_is_described_and_its_default_is_valid(record: type[msgspec.Struct]) -> None:
    fields = fields_of(record)
    assert [field.name for field in fields] == list(record.__struct_fields__)
    assert all(field.texts["description"].endswith(".") and field.expected for field in fields)
    values = {field.name: field.default for field in fields if not field.is_required}
    if not any(field.is_required for field in fields):
        assert read_options(record, values) == record()


def test_the_lowerings_of_the_backend_are_those_that_exist() -> None:
    (lower,) = (field for field in fields_of(Options) if field.name == "lower")
    assert lower.expected == f"one of {', '.join(sorted(LOWERINGS))}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70000}, r"option port is 70000; it must be a whole number from 0 to 65535"),
        ({"port": "80"}, r"option port is '80'; it must be a whole number"),
        ({"drain": -1}, r"option drain is -1; it must be a number from 0 to 10000000"),
        ({"host": 3}, r"option host is 3; it must be text"),
        ({"name": [3]}, r"option name is \[3\]; it must be a list"),
    ],
)
def test_a_wrong_value_is_named_with_the_valid_ones(values: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read_options(ServerOptions, values)


def test_text_is_read_as_a_number_where_that_is_wanted() -> None:
    assert read_options(ServerOptions, {"port": "80"}, strict=False).port == 80


def test_an_unknown_name_has_a_suggestion() -> None:
    with pytest.raises(OptionError, match="option 'prot' is unknown; did you mean port"):
        check_names(["prot"], [ServerOptions, RankOptions])
