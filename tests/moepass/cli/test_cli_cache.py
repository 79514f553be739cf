"""`moepass score` a second time, and `moepass cache`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from typer.testing import CliRunner

from moepass.cli.main import app
from moepass.runtime.captures.capture_store import SCHEMA
from tests.helpers.graphs.tiny_checkpoint import save_tiny_checkpoint

TEXT = json.dumps({"text": "the cat sat on the mat"}) + "\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOEPASS_CACHE_DIR", str(tmp_path / "captures"))
    return tmp_path / "captures"


def _run(*arguments: str | Path, text: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


def _score(checkpoint: Path) -> Any:
    torch._dynamo.reset()
    counters.clear()
    result = _run("score", checkpoint, "--lower", "eager", "--labels", "yes,no", text=TEXT)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.slow
@pytest.mark.usefixtures("known_tests")
def test_a_second_score_compiles_nothing_and_a_damaged_file_is_reported(
    checkpoint: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = _score(checkpoint)
    assert counters["stats"]["unique_graphs"] == 1
    second = _score(checkpoint)
    assert counters["stats"]["unique_graphs"] == 0
    assert second.stdout == first.stdout
    assert second.stderr == ""
    listed = _run("cache", "--list")
    assert listed.exit_code == 0
    assert "1 compiled graph," in listed.stdout
    assert str(folder) in listed.stdout.replace("\n", "")
    assert "torch" in listed.stdout

    (file,) = folder.iterdir()
    file.write_bytes(b"{}")
    assert "not used" in _run("cache").stdout
    assert "is ignored" not in caplog.text
    third = _score(checkpoint)
    assert counters["stats"]["unique_graphs"] == 1
    assert third.stdout == first.stdout
    assert caplog.text.count("is ignored") == 1
    _score(checkpoint)
    assert counters["stats"]["unique_graphs"] == 0  # the new capture replaced the damaged one

    cleared = _run("cache", "--clear")
    assert cleared.stdout.startswith("1 compiled graph,")
    assert "removed from" in cleared.stdout
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("model", "\x1b[2J\x07me", "?[2J?me"),
        ("model", "[red]me[/blue]", "[red]me[/blue]"),
        ("created", 1e300, "not used"),
        ("created", -1e18, "not used"),
    ],
)
def test_cache_lists_strange_files_safely(folder: Path, field: str, value: object, shown: str) -> None:
    header = {
        "key": "a" * 64,
        "digest": "",
        "model": "",
        "created": 1.0,
        "versions": {},
        "schema": SCHEMA,
        field: value,
    }
    folder.mkdir(mode=0o700)
    (folder / "a.capture").write_text(json.dumps(header) + "\n")
    result = _run("cache", "--list")
    assert result.exit_code == 0, result.output
    assert shown in result.stdout
    assert "\x1b" not in result.stdout


def test_tuned_kernels_are_counted_and_removed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "a.tiles.json").write_text("{}")
    (folder / "foreign.json").write_text("{}")
    assert "0 compiled graphs, 0 bytes, and 1 tuned kernel, 2 bytes, in " in _run("cache", "--list").stdout
    assert "1 tuned kernel, 2 bytes, removed from " in _run("cache", "--clear").stdout
    assert [path.name for path in folder.iterdir()] == ["foreign.json"]
    assert "tuned kernel" not in _run("cache").stdout


def test_cache_refuses_wrong_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = _run("cache", "--list", "--clear")
    assert (both.exit_code, "exclude each other" in both.stderr) == (2, True)
    assert "0 compiled graphs" in _run("cache").stdout
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    for choice in ("--list", "--clear"):
        result = _run("cache", choice)
        assert (result.exit_code, "mode 777" in result.stderr) == (1, True)
    monkeypatch.setenv("MOEPASS_CACHE_DIR", "")
    off = _run("cache")
    assert (off.exit_code, "MOEPASS_CACHE_DIR is empty" in off.stderr) == (1, True)
