"""Measure the memory of a process that scores texts with a 4-bit checkpoint from home `host`.

The checkpoint has the expert sizes of qwen3-30b-a3b, few layers and random weights. `moepass score` runs in a process
of its own, and its memory is sampled from /proc. Expected is what the process cannot do without:

    experts    the bytes of the experts in the checkpoint's files, as which they rest
    dense      all other weights, as which transformers computes with them
    ring       two slots of decoded experts, and the buffer for the experts of one layer as they are stored

`moepass score demo` is measured too, because its memory is nearly all that of the interpreter and the libraries.

    VmHWM      peak of the resident set size. RssAnon, RssFile and RssShmem are the peaks of its parts: private memory,
               mapped files and shared memory. Pages of mapped files are the kernel's cache, which it can drop.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import print_table, verdict
from benchmarks.parts.random_checkpoints import write_random_checkpoint
from moepass.models.checkpoint.checkpoint_files import CheckpointFiles
from moepass.models.sizes.presets import preset, preset_config
from tests.helpers.serving.byte_checkpoint import save_byte_tokenizer

PRESET = "qwen3-30b-a3b"
SLOTS = 2
MOST_RATIO = 1.15
SAMPLE_SECONDS = 0.01
_PEAKS = ("VmHWM", "RssAnon", "RssFile", "RssShmem")


def main(
    layers: Annotated[int, typer.Option(help="Layers of the model; 8 take 4.3 GB.")] = 8,
    format: Annotated[str, typer.Option(help="Format of the experts: int4 or nvfp4.")] = "int4",
    home: Annotated[str, typer.Option(help="Home of the experts.")] = "host",
    texts: Annotated[int, typer.Option(help="Texts that are scored.")] = 8,
    folder: Annotated[Path | None, typer.Option(help="Where the checkpoint is written; by default /tmp.")] = None,
) -> None:
    """Print what memory the experts, the other weights and the ring take, and the peak of the process."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        checkpoint = Path(temporary) / "checkpoint"
        checkpoint.mkdir()
        write_random_checkpoint(preset_config(PRESET, layers=layers), checkpoint, format)
        save_byte_tokenizer(checkpoint)
        stored = list(CheckpointFiles(sorted(checkpoint.glob("*.safetensors"))))
        experts = sum(tensor.nbytes for tensor in stored if ".experts." in tensor.key)
        dense = sum(tensor.nbytes for tensor in stored) - experts
        lines = Path(temporary) / "texts.jsonl"
        lines.write_text("".join(json.dumps({"text": f"The cat sat on mat {n}."}) + "\n" for n in range(texts)))
        libraries, _ = _score("demo", lines, [])
        peaks, seconds = _score(str(checkpoint), lines, ["--home", home, "--slots", str(SLOTS), "--lower", "eager"])
    bank = preset(PRESET).typical_moe_layer.experts
    assert bank is not None, "the preset is a model with experts"
    ring = SLOTS * 3 * 2 * bank.count * bank.width * preset(PRESET).hidden + experts // layers
    expected = experts + dense + ring
    ratio = peaks["VmHWM"] / expected
    rows = [
        ["experts as stored", _gb(experts)],
        ["other weights", _gb(dense)],
        ["ring", _gb(ring)],
        ["expected: these three", _gb(expected)],
        ["peak of the process, VmHWM", _gb(peaks["VmHWM"])],
        ["    RssAnon", _gb(peaks["RssAnon"])],
        ["    RssFile", _gb(peaks["RssFile"])],
        ["    RssShmem", _gb(peaks["RssShmem"])],
        ["VmHWM of `moepass score demo`", _gb(libraries["VmHWM"])],
        ["peak / expected", f"{ratio:.3f}"],
        [f"at most {MOST_RATIO}", verdict(ratio <= MOST_RATIO)],
    ]
    print_table(
        f"moepass score, {texts} texts, home {home}: {PRESET} with {layers} layers, {format}, in {seconds:.0f} s",
        ["", "GB"],
        rows,
    )
    if ratio > MOST_RATIO:
        raise typer.Exit(1)


def _score(model: str, lines: Path, options: Sequence[str]) -> tuple[dict[str, int], float]:
    """Return the peaks of the memory of `moepass score MODEL`, by their names in /proc, and its seconds."""
    command = [sys.executable, "-m", "moepass.cli", "score", model, "--labels", "yes,no", "--template", "plain"]
    started = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--input", str(lines), "--output", str(lines.with_suffix(".out")), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    peaks = dict.fromkeys(_PEAKS, 0)
    try:
        while process.poll() is None:
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in peaks:
                    peaks[name] = max(peaks[name], int(value.split()[0]) * 1024)
            time.sleep(SAMPLE_SECONDS)
    finally:
        process.kill()
        output, _ = process.communicate()
    if process.returncode:
        typer.echo(output, err=True)
        raise typer.Exit(1)
    return peaks, time.perf_counter() - started


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f}"


if __name__ == "__main__":
    typer.run(main)
