"""The fault injection of `benchmarks/serving/faults.py`, for half a minute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.slow
def test_nothing_is_lost_while_ranks_are_killed_and_clients_leave(tmp_path: Path) -> None:
    folders = [str(ROOT), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "benchmarks.serving.faults", "--seconds", "30", "--kill-every", "8"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "yes" in done.stdout
