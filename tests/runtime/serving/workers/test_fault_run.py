"""The fault run of `benchmarks/serving/faults.py`, for half a minute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[4] / "benchmarks" / "serving" / "faults.py"


@pytest.mark.slow
def test_nothing_is_lost_while_ranks_are_killed_and_clients_leave(tmp_path: Path) -> None:
    folders = [str(FAULTS.parent), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, str(FAULTS), "--seconds", "30", "--kill-every", "8"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "yes" in done.stdout
