"""Run a model that is larger than this machine's memory from its checkpoint on the disk, in bf16 and in MXFP4.

The benchmark writes the checkpoint, with the sizes of qwen3-30b-a3b and random weights, and deletes it at the end. Each
format runs in a process of its own. Before each timed step, and before the disk's own rate is measured, the kernel
drops the pages of the checkpoint from its cache (posix_fadvise); the host of a virtual machine may have another cache.

    peak    most memory that the kernel cannot reclaim: anonymous and shared, plus the dense weights, which are views of
            mapped files
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer

import moepass
from benchmarks.common import median_and_spread, print_table
from benchmarks.disk_home import bytes_from_disk, drop_pages
from benchmarks.load_memory import PeakAnonymous, status_bytes
from benchmarks.parts.random_checkpoints import write_checkpoint
from moepass.models.sizes.presets import preset_config

PRESET = "qwen3-30b-a3b"
_READ_BYTES = 16 << 20


def main(
    layers: Annotated[int, typer.Option(help="Layers of the model; 32 have 39 GB in bf16.")] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 512,
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 3,
    home: Annotated[str, typer.Option(help="disk or host.")] = "disk",
    formats: Annotated[str, typer.Option(help="Formats, with commas.")] = "bf16,mxfp4",
    folder: Annotated[Path | None, typer.Option(help="Where the checkpoint is written; by default /tmp.")] = None,
) -> None:
    """Print the times and the peak memory of loading the model and of its steps."""
    rows = []
    for name in formats.split(","):
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            nbytes = write_checkpoint(preset_config(PRESET, layers=layers), Path(temporary), name)
            os.sync()  # only clean pages can be dropped
            context = torch.multiprocessing.get_context("spawn")
            queue = context.SimpleQueue()
            torch.multiprocessing.spawn(_run, (temporary, home, tokens, steps, queue), nprocs=1)
            rows.append([name, f"{nbytes / 1e9:.1f}", *queue.get()])
    print_table(
        f"{PRESET} with {layers} layers from home {home}, {tokens} tokens per step, a machine with "
        f"{psutil.virtual_memory().total / 1e9:.0f} GB of memory",
        ["format", "files GB", "load s", "first step s", "step s", "read GB/s", "disk alone GB/s", "ratio", "peak GB"],
        rows,
        "read: bytes that came from the disk during a step, by its seconds; disk alone: the same files in order",
    )


def _run(_: int, folder: str, home: str, tokens: int, steps: int, queue: Any) -> None:
    """Load the checkpoint, run it, and put the cells of its row into `queue`."""
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # the copy thread gets a core
    checkpoint = Path(folder)
    with PeakAnonymous() as memory, torch.no_grad():
        drop_pages(checkpoint)
        started = time.perf_counter()
        model = moepass.load_pretrained(checkpoint, home=home, progress=lambda done, total: None)
        loaded = time.perf_counter() - started
        compiled = torch.compile(model, backend="asyncep")
        vocabulary = model.config.vocab_size
        ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
        started = time.perf_counter()
        compiled(ids, logits_to_keep=1)
        first = time.perf_counter() - started
        alone, seconds, rates = [_sequential_rate(checkpoint)], [], []
        for _step in range(steps):
            drop_pages(checkpoint)
            before, started = bytes_from_disk(), time.perf_counter()
            logits = compiled(ids, logits_to_keep=1).logits
            seconds.append(time.perf_counter() - started)
            rates.append((bytes_from_disk() - before) / seconds[-1] / 1e9)
            alone.append(_sequential_rate(checkpoint))
            assert logits.isfinite().all()
    dense = {value.data_ptr(): value.nbytes for value in model.parameters() if value.numel()}
    peak = memory.peak_bytes + status_bytes("RssShmem") + sum(dense.values())
    queue.put(
        [
            *(f"{loaded:.1f}", f"{first:.1f}", median_and_spread(seconds), median_and_spread(rates)),
            *(median_and_spread(alone), f"{statistics.median(rates) / statistics.median(alone):.2f}"),
            f"{peak / 1e9:.1f}",
        ]
    )


def _sequential_rate(checkpoint: Path) -> float:
    """Return the GB/s at which the disk reads the files in order."""
    drop_pages(checkpoint)
    buffer = bytearray(_READ_BYTES)
    before, started = bytes_from_disk(), time.perf_counter()
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return (bytes_from_disk() - before) / (time.perf_counter() - started) / 1e9


if __name__ == "__main__":
    typer.run(main)
