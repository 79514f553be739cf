"""`moepass pack` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from moepass.cli.main import app


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_the_packed_demo_scores_the_same(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    done = _run("pack", "demo", "-o", str(packed))
    assert done.stderr == ""
    assert done.stdout == f"{packed}: experts of 4.7 MB packed to 4.1 MB (87%); 1.3 MB of other weights copied\n"
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("Guten Morgen", "Good morning")))
    answers = [_run("score", model, "--eager", "--input", str(texts)).stdout for model in ("demo", str(packed))]
    assert answers[0]
    assert answers[0] == answers[1]
    again = _run("pack", str(packed), "-o", str(tmp_path / "again"))
    assert again.exit_code == 1
    assert again.stderr == (
        f"moepass: error: {packed} is quantised or packed already; lossless packing needs experts in bf16, fp16, fp32\n"
    )
