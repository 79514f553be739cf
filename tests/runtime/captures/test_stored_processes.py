"""`moepass score` in separate processes: a later process runs the graphs that an earlier one compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.graphs.tiny_checkpoint import save_tiny_checkpoint

TEXT = json.dumps({"text": "the cat sat on the mat"}) + "\n"
MODULE = [sys.executable, "-m", "moepass.cli"]
SCRIPT = [os.path.join(sysconfig.get_path("scripts"), "moepass")]
TEXT_OF_COMMAND = [sys.executable, "-c", "from moepass.cli.main import main; main()"]
STORED = "runs as an earlier process compiled it"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


def _score(command: list[str], checkpoint: Path, caches: Path, lower: str = "eager", path: str = "") -> tuple[str, str]:
    """Return the output of the command, and its log."""
    options = ["--lower", lower, "--labels", "yes,no,maybe good", "--threads", "1"]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(caches), "TORCH_LOGS": "moepass"}
    del environment["MOEPASS_CACHE_DIR"]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environment.get("PYTHONPATH")]))
    result = subprocess.run(
        [*command, "score", str(checkpoint), *options],
        input=TEXT,
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def _files(caches: Path) -> set[Path]:
    return {path for path in caches.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_later_process_runs_what_was_stored_unless_it_has_code_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    own_folder = tmp_path / "own"
    own_folder.mkdir()
    (own_folder / "sitecustomize.py").write_text("")
    caches = tmp_path / "caches"
    expected, log = _score(TEXT_OF_COMMAND, checkpoint, caches)
    assert "the program of this process is of no file" in log
    assert not (caches / "moepass").exists()
    output, log = _score(MODULE, checkpoint, caches)
    assert output == expected
    assert STORED not in log
    assert "not stored" not in log
    (file,) = _files(caches / "moepass")
    output, log = _score(SCRIPT, checkpoint, caches)
    assert output == expected
    assert STORED in log
    output, log = _score(MODULE, checkpoint, caches, path=str(own_folder))
    assert output == expected
    assert STORED not in log
    assert log.count(f"the module sitecustomize ({own_folder}/sitecustomize.py)") == 1
    assert _files(caches / "moepass") == {file}


@pytest.mark.slow
def test_a_second_process_compiles_nothing_with_inductor(checkpoint: Path, tmp_path: Path) -> None:
    first, _ = _score(SCRIPT, checkpoint, tmp_path, "inductor")
    assert len(list((tmp_path / "moepass").iterdir())) == 1
    files = _files(tmp_path)
    assert len(files) > 1
    second, log = _score(SCRIPT, checkpoint, tmp_path, "inductor")
    assert STORED in log
    assert second == first
    assert _files(tmp_path) == files
