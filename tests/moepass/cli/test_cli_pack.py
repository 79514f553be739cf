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
    models = (["demo"], [str(packed)], ["demo", "--expert-format", "lossless"])
    answers = [_run("score", *model, "--eager", "--input", str(texts)).stdout for model in models]
    assert answers[0]
    assert answers == [answers[0]] * 3
    refused = _run("score", "demo", "--expert-format", "lossless", "--home", "disk", "--input", str(texts))
    assert refused.exit_code == 2
    assert "write a packed copy with `moepass pack`, and load that" in refused.stderr
    again = _run("pack", str(packed), "-o", str(tmp_path / "again"))
    assert again.exit_code == 1
    assert again.stderr == (
        f"moepass: error: {packed} is quantised or packed already; lossless packing needs experts in bf16, fp16, fp32\n"
    )
