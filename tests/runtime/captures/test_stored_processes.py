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
def test_a_second_process_runs_what_the_first_one_stored(checkpoint: Path, tmp_path: Path) -> None:
    first, log = _score(MODULE, checkpoint, tmp_path)
    assert STORED not in log
    assert "not stored" not in log
    (file,) = (tmp_path / "moepass").iterdir()
    second, log = _score(SCRIPT, checkpoint, tmp_path)
    assert STORED in log
    assert second == first
    assert list((tmp_path / "moepass").iterdir()) == [file]


@pytest.mark.slow
def test_processes_with_code_of_their_own_neither_store_nor_use(checkpoint: Path, tmp_path: Path) -> None:
    own_folder = tmp_path / "own"
    own_folder.mkdir()
    (own_folder / "sitecustomize.py").write_text("")
    caches = tmp_path / "caches"
    refused = [(TEXT_OF_COMMAND, "", "the program of this process is of no file")]
    refused.append((MODULE, str(own_folder), f"the module sitecustomize ({own_folder}/sitecustomize.py)"))
    expected, log = _score(*refused[0][:1], checkpoint, caches)
    assert refused[0][2] in log
    assert not (caches / "moepass").exists()
    assert _score(MODULE, checkpoint, caches)[0] == expected
    files = _files(caches / "moepass")
    assert len(files) == 1
    for command, path, reason in refused:
        output, log = _score(command, checkpoint, caches, path=path)
        assert output == expected
        assert STORED not in log
        assert log.count(reason) == 1
    assert _files(caches / "moepass") == files


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
