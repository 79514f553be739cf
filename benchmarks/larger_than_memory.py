"""Run a model that is larger than this machine's memory: its experts stay on the disk, in bf16 or in a 4-bit form.

The benchmark writes its checkpoint, with the sizes of qwen3-30b-a3b and random weights, and deletes it at the end. The
model runs in a process of its own. Before every step, and before the rate of the disk is measured, the kernel drops the
pages of the checkpoint from its cache (posix_fadvise); the host of a virtual machine may have another cache.

    disk alone    the rate at which two threads read the same files in order, past the kernel's cache if the file system
                  allows it: measured before the model is loaded and after the steps
    CPU           seconds of all threads of the process
    VmHWM         peak of the resident set size, mapped files included; RssAnon and RssFile are the peaks of its parts
"""

from __future__ import annotations

import concurrent.futures
import errno
import functools
import mmap
import os
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer

import moepass
from benchmarks.common import median_and_spread, print_table
from benchmarks.parts.disk_reads import bytes_from_disk, drop_pages
from benchmarks.parts.random_checkpoints import FORMATS, write_random_checkpoint
from moepass.models.sizes.presets import preset_config

PRESET = "qwen3-30b-a3b"
SAMPLE_SECONDS = 0.02
# The pause after the last step, in which the ring fills its slots for a next one.
SETTLE_SECONDS = 5.0
_READ_BYTES = 16 << 20
# One read after the other leaves the disk idle in between.
_READERS = 2


def main(
    layers: Annotated[int, typer.Option(help="Layers of the model; 32 take 40 GB in bf16.")] = 32,
    format: Annotated[str, typer.Option(help=f"Format of the experts: {', '.join(FORMATS)}.")] = "bf16",
    tokens: Annotated[str, typer.Option(help="Tokens of a step; several numbers with commas.")] = "512",
    steps: Annotated[int, typer.Option(help="Timed steps of each number of tokens.")] = 3,
    page_cache: Annotated[str, typer.Option(help="The option page_cache of moepass.Disk.")] = "auto",
    lower: Annotated[str, typer.Option(help="The option lower of the backend: inductor or eager.")] = "inductor",
    read_gb: Annotated[float, typer.Option(help="GB to read for the rate of the disk alone.")] = 4.0,
    folder: Annotated[Path | None, typer.Option(help="Where the checkpoint is written; by default /tmp.")] = None,
) -> None:
    """Print the times, the rate of reading and the peak memory of a model that is loaded with home `disk` and run."""
    counts = [int(text) for text in tokens.split(",")]
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        started = time.perf_counter()
        nbytes = write_random_checkpoint(preset_config(PRESET, layers=layers), Path(temporary), format)
        written = time.perf_counter() - started
        context = torch.multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        options = {"steps": steps, "page_cache": page_cache, "lower": lower, "read_bytes": round(read_gb * 1e9)}
        torch.multiprocessing.spawn(_run, (temporary, counts, options, queue), nprocs=1)
        result: dict[str, Any] = queue.get()
    rows = [
        ["written in", f"{written:.0f} s"],
        ["loaded in", f"{result['load']:.1f} s"],
        ["rate of the disk alone", f"{median_and_spread(result['alone'])} GB/s"],
    ]
    for count, measured in result["steps"].items():
        # The mean rate, because the disk also reads between two steps.
        rate = sum(measured["read"]) / sum(measured["seconds"])
        rows += [
            [f"{count} tokens: first run, with compilation", f"{measured['first']:.1f} s"],
            ["    step", f"{median_and_spread(measured['seconds'])} s"],
            ["    of that, the computation waited for experts", f"{median_and_spread(measured['waited'])} s"],
            ["    CPU in user mode", f"{median_and_spread(measured['user'])} s"],
            ["    CPU in the kernel", f"{median_and_spread(measured['system'])} s"],
            ["    read from the disk", f"{median_and_spread(measured['read'])} GB"],
            ["    rate of reading", f"{rate:.3f} GB/s"],
            ["    rate of reading / rate of the disk alone", f"{rate / statistics.mean(result['alone']):.2f}"],
        ]
    rows += [[f"peak memory, {name}", f"{value / 1e9:.2f} GB"] for name, value in result["peaks"].items()]
    print_table(
        f"{PRESET}, {layers} layers, {format}, {nbytes / 1e9:.1f} GB in files, page_cache {page_cache!r}, "
        f"lower {lower!r}; {psutil.cpu_count()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB of memory",
        ["", "median (smallest to largest)"],
        rows,
    )


def _run(process: int, folder: str, counts: list[int], options: dict[str, Any], queue: Any) -> None:
    """Load and run the checkpoint, and put the measurements into `queue`."""
    checkpoint = Path(folder)
    with PeakMemory() as memory, torch.no_grad():
        alone = [disk_rate(checkpoint, options["read_bytes"])]
        drop_pages(checkpoint)
        started = time.perf_counter()
        model = moepass.load_pretrained(
            checkpoint, home=moepass.Disk(page_cache=options["page_cache"]), progress=lambda done, total: None
        )
        load = time.perf_counter() - started
        compiled = torch.compile(model, backend="asyncep", options={"lower": options["lower"]})
        results = {}
        for count in counts:
            results[count] = _steps(model, compiled, count, options["steps"], checkpoint)
            time.sleep(SETTLE_SECONDS)
            alone.append(disk_rate(checkpoint, options["read_bytes"]))
    queue.put({"load": load, "alone": alone, "steps": results, "peaks": memory.peaks})


def _steps(model: Any, compiled: Any, tokens: int, steps: int, checkpoint: Path) -> dict[str, Any]:
    """Return the seconds of the first run, and what each of the `steps` that directly follow it took."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator)
    started = time.perf_counter()
    compiled(ids, logits_to_keep=1)
    first = time.perf_counter() - started
    ring = moepass.offload_report(model).store.current_ring
    assert ring is not None, "the first run has made it"
    measured = []
    for _ in range(steps):
        drop_pages(checkpoint)
        before = (time.perf_counter(), ring.statistics.waited_seconds, *_cpu_seconds(), bytes_from_disk() / 1e9)
        logits = compiled(ids, logits_to_keep=1).logits
        after = (time.perf_counter(), ring.statistics.waited_seconds, *_cpu_seconds(), bytes_from_disk() / 1e9)
        measured.append([end - start for start, end in zip(before, after, strict=True)])
        assert logits.isfinite().all()
    names = ("seconds", "waited", "user", "system", "read")
    return {"first": first, **dict(zip(names, zip(*measured, strict=True), strict=True))}


class PeakMemory:
    """Peaks of this process's memory in the `with` block, by their names in /proc/self/status."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            for line in Path("/proc/self/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in ("VmHWM", "RssAnon", "RssFile", "RssShmem"):
                    self.peaks[name] = max(self.peaks.get(name, 0), int(value.split()[0]) * 1024)


def disk_rate(checkpoint: Path, most_bytes: int) -> float:
    """Return the GB/s at which threads read the checkpoint's files in order, up to about `most_bytes`."""
    drop_pages(checkpoint)
    started, read = time.perf_counter(), 0
    for file in sorted(checkpoint.glob("*.safetensors"), key=lambda file: file.stat().st_size, reverse=True):
        descriptor = _opened_past_the_cache(file)
        offsets = range(0, min(file.stat().st_size, most_bytes - read), _READ_BYTES)
        shares = [offsets[number::_READERS] for number in range(_READERS)]
        with concurrent.futures.ThreadPoolExecutor(_READERS) as threads:
            read += sum(threads.map(functools.partial(_read_blocks, descriptor), shares))
        os.close(descriptor)
        if read >= most_bytes:
            break
    return read / (time.perf_counter() - started) / 1e9


def _read_blocks(descriptor: int, offsets: range) -> int:
    buffer = mmap.mmap(-1, _READ_BYTES)
    return sum(os.preadv(descriptor, [buffer], offset) for offset in offsets)


def _opened_past_the_cache(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(file, os.O_RDONLY)  # this file system always uses the cache


def _cpu_seconds() -> tuple[float, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


if __name__ == "__main__":
    typer.run(main)
