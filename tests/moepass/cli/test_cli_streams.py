"""Outputs of the command line that fail: full disks, closed streams, odd names, signals. Each error is one line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moepass.cli import streams
from tests.helpers.graphs.tiny_checkpoint import save_tiny_checkpoint

TEXTS = '{"text": "the cat sat"}\n{"text": "a dog"}\n'
COMMAND = [sys.executable, "-c", "from moepass.cli.main import main; main()"]
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
PROC = pytest.mark.skipif(not os.path.exists("/proc/self"), reason="needs /proc")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


def _score(checkpoint: Path, *more: str) -> list[str]:
    return [*COMMAND, "score", str(checkpoint), "--eager", "--labels", "yes,no", *more]


def _shell(command: list[str], redirection: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `command` in a shell, with a redirection that subprocess cannot express."""
    words = ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, **{"input": TEXTS, **options})


def _assert_one_line(finished: subprocess.CompletedProcess[str], message: str) -> None:
    assert finished.returncode == 1, finished.stderr
    assert finished.stderr.startswith("moepass: error: ")
    assert finished.stderr.count("\n") == 1, finished.stderr
    assert message in finished.stderr


@pytest.mark.sampled(every=4)
@FULL
@pytest.mark.parametrize("command", ["score", "explain", "--version", "--help"])
def test_standard_output_on_a_full_disk(command: str, checkpoint: Path) -> None:
    words = {"score": _score(checkpoint), "explain": [*COMMAND, "explain", str(checkpoint)]}
    finished = _shell(words.get(command, [*COMMAND, command]), "> /dev/full")
    _assert_one_line(finished, "standard output cannot be written: No space left on device")


@pytest.mark.slow
@FULL
def test_an_output_on_a_full_disk(checkpoint: Path) -> None:
    finished = _shell(_score(checkpoint, "--output", "/dev/full"), "")
    _assert_one_line(finished, "output '/dev/full' cannot be written: No space left on device")


@pytest.mark.parametrize("command", ["score", "explain", "demo"])
def test_closed_standard_output_is_an_error_before_any_work(command: str, tmp_path: Path) -> None:
    # The model is missing too, which would be the next error.
    finished = _shell([*COMMAND, command, *([] if command == "demo" else [str(tmp_path / "none")])], ">&-")
    _assert_one_line(finished, "standard output cannot be written: Bad file descriptor")


@pytest.mark.slow
def test_unused_streams_may_be_closed(checkpoint: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(TEXTS)
    finished = _shell(_score(checkpoint, "--input", str(source), "--output", str(target)), "<&- >&- 2>&-")
    assert finished.returncode == 0
    assert len(target.read_text().splitlines()) == 2


def test_closed_standard_input_is_an_error(tmp_path: Path) -> None:
    finished = _shell(_score(tmp_path / "none"), "<&-")
    _assert_one_line(finished, "input '-' cannot be read: Bad file descriptor")


@pytest.mark.slow
def test_an_output_may_have_the_longest_name(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / ("x" * 255)
    assert _shell(_score(checkpoint, "--output", str(target)), "").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


BAD_OUTPUTS = {
    "too long": ("x" * 256, "File name too long"),
    "a folder too long": ("x" * 256 + "/y", "File name too long"),
    "no place for files": ("/proc/x", "No such file or directory"),
    "in a file": ("file/y", "does not exist"),
    "a null byte": ("a\0b", "null"),
}


@PROC
@pytest.mark.parametrize("case", BAD_OUTPUTS)
def test_impossible_outputs_are_errors_before_any_work(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from moepass.cli.main import app

    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    name, message = BAD_OUTPUTS[case]
    result = CliRunner().invoke(app, ["score", "none", "--labels", "yes,no", "--output", name], input=TEXTS)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"moepass: error: output {name!r}"), result.stderr
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["score", pytest.param("explain", marks=pytest.mark.slow)])
def test_a_closed_pipe_ends_the_command_quietly(command: str, checkpoint: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = _score(checkpoint) if command == "score" else [*COMMAND, "explain", str(checkpoint)]
    finished = subprocess.run(words, input=TEXTS, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (finished.returncode, finished.stderr) == (128 + signal.SIGPIPE, "")


def _half_written(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # the first temporary file only checks the folder
        return any(path.stat().st_size for path in folder.glob(".*.part"))
    return False


@pytest.mark.slow
def test_sigterm_removes_temporary_files(checkpoint: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(TEXTS * 10_000)  # far more than is scored before the signal
    target.write_text("old")
    command = _score(checkpoint, "--input", str(source), "--output", str(target))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 100
        while not _half_written(tmp_path) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _half_written(tmp_path)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert target.read_text() == "old"


@pytest.mark.parametrize("configured", [None, "relative/cache"])
def test_the_folder_of_compiled_code_is_that_of_torch(
    configured: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", configured or "")
    if configured is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    ours = streams.compiler_cache()
    assert ours == cache_dir()  # cache_dir sets the variable, and monkeypatch restores it
