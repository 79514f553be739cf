"""`moepass score` a second time, and `moepass cache`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import save_tiny_checkpoint
from torch._dynamo.utils import counters
from typer.testing import CliRunner

from moepass.cli.main import app

TEXT = json.dumps({"text": "the cat sat on the mat"}) + "\n"
# The command in a process of its own; at the end, what it compiled.
PROCESS = """
import atexit, json, sys
from moepass.cli.main import main

def tell():
    from torch._dynamo.utils import counters
    compiled = {"graphs": counters["stats"]["unique_graphs"], **counters["inductor"]}
    print(json.dumps(compiled), file=sys.stderr)

atexit.register(tell)
sys.argv[0] = "moepass"
main()
"""


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
    assert counters["stats"]["unique_graphs"] == 0  # what was compiled instead took its place

    cleared = _run("cache", "--clear")
    assert "Removed 1 compiled graph," in cleared.stdout
    assert list(folder.iterdir()) == []


def test_cache_refuses_what_it_cannot_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def _process(checkpoint: Path, caches: Path) -> tuple[str, dict[str, int]]:
    words = [sys.executable, "-c", PROCESS, "score", str(checkpoint), "--labels", "yes,no,maybe good", "--threads", "1"]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(caches)}
    del environment["MOEPASS_CACHE_DIR"]
    result = subprocess.run(words, input=TEXT, capture_output=True, text=True, timeout=280, env=environment)
    assert result.returncode == 0, result.stderr
    *notes, compiled = result.stderr.splitlines()
    assert notes == []
    return result.stdout, json.loads(compiled)


@pytest.mark.slow
def test_a_second_process_compiles_nothing_with_inductor(checkpoint: Path, tmp_path: Path) -> None:
    first, compiled = _process(checkpoint, tmp_path)
    assert compiled["graphs"] == 1
    assert compiled["fxgraph_cache_miss"] > 0
    assert len(list((tmp_path / "moepass").iterdir())) == 1
    second, compiled = _process(checkpoint, tmp_path)
    assert compiled == {"graphs": 0}
    assert second == first
