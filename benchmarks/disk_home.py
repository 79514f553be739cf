"""Measure the cost of experts on the disk: one checkpoint, resident, from host memory and from files.

Nothing is emulated. For "cold" rows, the kernel drops all pages of the checkpoint from its cache right before the
forward (posix_fadvise), and /proc/self/io counts the bytes that came from the disk. The device, or the host of a
virtual machine, may have further caches. Every timed forward follows an untimed one of the same variant, so a ring
begins with the first banks in its slots, as in the steady state.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer

import moepass
from benchmarks.common import median_and_spread, print_table, reference_model, verdict
from benchmarks.parts.disk_reads import bytes_from_disk, drop_pages
from moepass.runtime.homes.disk.disk_home import DiskHome

# The pause between two forwards, in which the ring fills its slots for the next one.
SETTLE_SECONDS = 0.3


def main(
    layers: int = 12,
    tokens: str = "64,512",
    repeats: int = 7,
    slots: int = 2,
    lower: str = "inductor",
    compiled: bool = True,
    folder: Path | None = None,
) -> None:
    """Time forwards of TOKENS tokens; the checkpoint is written below FOLDER (by default that for temporary files)."""
    torch.set_num_threads(1)  # the copy thread gets the other core
    with tempfile.TemporaryDirectory(dir=folder) as temporary, torch.no_grad():
        # The model is not loaded again: dense weights would map all files, and mapped pages cannot be dropped.
        resident = reference_model(layers)
        resident.save_pretrained(temporary, max_shard_size="200MB")
        os.sync()  # only clean pages can be dropped
        variants = _variants(resident, Path(temporary), slots, lower if compiled else None)
        stored = sum(file.stat().st_size for file in Path(temporary).glob("*.safetensors"))
        rows = []
        equal = True
        for count in [int(text) for text in tokens.split(",")]:
            ids = torch.randint(0, 1024, (4, count // 4), generator=torch.Generator().manual_seed(1))
            expected = variants["resident"](ids)
            equal = equal and all(torch.equal(run(ids), expected) for run in variants.values())
            rows += _measure(variants, Path(temporary), ids, repeats)
    print_table(
        f"Experts on the disk, {layers} layers of 50 MB, {stored / 1e6:.0f} MB in files, fp32, "
        + (f"{slots} slot(s)" if compiled else "uncompiled, one bank at a time"),
        ["variant", "tokens", "seconds", "of resident", "from disk MB", "disk MB/s"],
        rows,
        f"ratio: median over pairs. Nothing is emulated. Logits equal the resident model's: {verdict(equal)}",
    )
    if not equal:
        raise typer.Exit(1)


def _variants(
    resident: torch.nn.Module, checkpoint: Path, slots: int, lower: str | None
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the function to time for each row of the table, by its name. `lower` None means uncompiled."""

    def compiled(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        module: Any = torch.compile(model, backend="asyncep", options={"lower": lower}) if lower else model
        return lambda ids: module(ids).logits

    disk = moepass.load_pretrained(checkpoint, home="disk", slots=slots)
    home = moepass.offload_report(disk).store.home
    assert isinstance(home, DiskHome)
    streamed = compiled(disk)

    def announcing(wanted: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(ids: torch.Tensor) -> torch.Tensor:
            home.announces = wanted
            return streamed(ids)

        return run

    return {
        "resident": compiled(resident),
        "host": compiled(moepass.load_pretrained(checkpoint, home="host", slots=slots)),
        "disk, warm": announcing(True),
        "disk, cold, announced": announcing(True),
        "disk, cold, not announced": announcing(False),
    }


def _measure(
    variants: dict[str, Callable[[torch.Tensor], torch.Tensor]], checkpoint: Path, ids: torch.Tensor, repeats: int
) -> list[list[object]]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    from_disk: dict[str, list[int]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            run(ids)
            time.sleep(SETTLE_SECONDS)
            if "cold" in name:
                drop_pages(checkpoint)
            before, started = bytes_from_disk(), time.perf_counter()
            run(ids)
            seconds[name].append(time.perf_counter() - started)
            from_disk[name].append(bytes_from_disk() - before)
    rows: list[list[object]] = []
    for name, times in seconds.items():
        ratio = statistics.median(mine / resident for mine, resident in zip(times, seconds["resident"], strict=True))
        read = statistics.median(from_disk[name])
        rows.append(
            [
                name,
                ids.numel(),
                median_and_spread(times),
                f"{ratio:.3f}",
                f"{read / 1e6:.0f}",
                f"{read / statistics.median(times) / 1e6:.0f}" if read else "",
            ]
        )
    return rows


if __name__ == "__main__":
    typer.run(main)
