"""Measure the memory of `moepass serve` with a quantised checkpoint of several GB, its experts in host memory.

The checkpoint has the sizes of qwen3-30b-a3b, random weights and the tokenizer of the demo. It is served by the command
itself, which answers requests of different lengths.

    expected    experts as they are stored, dense weights in the model's dtype, and the ring
    peak        VmHWM of the rank, the process that computes: its largest resident set size, mapped files included
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import psutil
import typer

from benchmarks.common import print_table, verdict
from benchmarks.parts.random_checkpoints import FORMATS, SIZES, write_random_checkpoint
from moepass.models.demo import demo_folder
from moepass.models.formulas.stored_weights import bank_sizes, dense_bytes
from moepass.models.sizes.families import from_config
from moepass.models.sizes.presets import preset_config
from moepass.passes.ir.bank_format import ring_bytes
from moepass.runtime.calibrate.measure_compute import TORCH_DTYPES

PRESET, SLOTS, LIMIT = "qwen3-30b-a3b", 2, 1.15
# Words of the requests.
LENGTHS = (3, 40, 120)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_POLL_SECONDS, _ANSWER_SECONDS = 0.5, 600


def main(
    layers: Annotated[int, typer.Option(help="Layers of the model; 14 take more than 4 GB in 4 bits.")] = 14,
    format: Annotated[str, typer.Option(help=f"Format of the experts: {', '.join(FORMATS)}.")] = "int4",
    dtype: Annotated[str, typer.Option(help="bf16, or fp32 on processors without instructions for bf16.")] = "bf16",
    step_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 256,
    folder: Annotated[Path | None, typer.Option(help="Where the checkpoint is written; by default /tmp.")] = None,
) -> None:
    """Print the peak memory of the rank and of the server process beside the expected bytes."""
    config = preset_config(PRESET, layers=layers)
    architecture = from_config(config)
    experts = architecture.layers[-1].experts
    assert experts is not None, "all layers of the preset have experts"
    bank = bank_sizes(experts, architecture.hidden, dtype, SIZES[format])
    ring = ring_bytes(min(SLOTS, layers), bank.slot_bytes, bank.encoded_bytes)
    config.dtype = TORCH_DTYPES[dtype]
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        checkpoint = Path(temporary)
        file_bytes = write_random_checkpoint(config, checkpoint, format)
        for name in _TOKENIZER_FILES:
            shutil.copy(demo_folder() / name, checkpoint / name)
        started = time.perf_counter()
        with _served(checkpoint, step_tokens) as (process, url):
            ready = time.perf_counter() - started
            for length in LENGTHS:
                _ask(url, length)
            children = psutil.Process(process.pid).children(recursive=True)
            peak = max(_peak_bytes(child.pid) for child in children)
            server_peak = _peak_bytes(process.pid)
    # Dense weights are stored in bf16.
    dense = dense_bytes(architecture, dtype) - dense_bytes(architecture, "bf16")
    expected = file_bytes + dense + ring
    print_table(
        f"moepass serve, {PRESET}, {layers} layers, {format}, computed in {dtype}",
        ["", "GB"],
        [
            ["experts as stored, and dense weights", f"{(file_bytes + dense) / 1e9:.2f}"],
            ["ring", f"{ring / 1e9:.2f}"],
            ["expected", f"{expected / 1e9:.2f}"],
            ["peak of the rank", f"{peak / 1e9:.2f}"],
            ["peak of the server process", f"{server_peak / 1e9:.2f}"],
            ["peak of the rank / expected", f"{peak / expected:.2f}"],
            [f"at most {LIMIT}", verdict(peak <= LIMIT * expected)],
            ["seconds until ready, with compilation", f"{ready:.0f}"],
        ],
    )
    if peak > LIMIT * expected:
        raise typer.Exit(1)


@contextlib.contextmanager
def _served(checkpoint: Path, step_tokens: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `moepass serve`, and yield its process and URL when it is ready. Exits with its message if it ends before."""
    options = f"--port 0 --name model --slots {SLOTS} --step-tokens {step_tokens} --timeout {_ANSWER_SECONDS}"
    command = [sys.executable, "-m", "moepass.cli", "serve", str(checkpoint), *options.split()]
    log = checkpoint / "server.log"
    with log.open("w") as output, subprocess.Popen(command, stderr=output, text=True) as process:
        try:
            while not (match := re.search(r"at (http://\S+);", log.read_text())) or not _is_ready(match[1]):
                if process.poll() is not None:
                    typer.echo(log.read_text(), err=True)
                    raise typer.Exit(1)
                time.sleep(_POLL_SECONDS)
            yield process, match[1]
        finally:
            process.terminate()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10) as response:
            return bool(response.status == 200)
    except urllib.error.URLError:
        return False


def _ask(url: str, words: int) -> None:
    question = {"type": "choice", "instructions": "Is it good?", "choices": [{"value": "yes"}, {"value": "no"}]}
    body = {"model": "model", "input": "The film was good. " * (words // 4 + 1), "questions": [question]}
    request = urllib.request.Request(
        f"{url}/v1/decisions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as response:
        assert response.status == 200


def _peak_bytes(process: int) -> int:
    """Return VmHWM of the process."""
    status = Path(f"/proc/{process}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


if __name__ == "__main__":
    typer.run(main)
