"""Measure this machine with one process per rank, all at the same time, and make a profile."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import selectors
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec
import psutil
import torch

from moepass.models.errors import InputError, MoepassError, OptionError
from moepass.passes.machine.hardware import (
    COMPUTE_AXES,
    EMPIRICAL_COLLECTIVE_LATENCY,
    Collectives,
    Conditions,
    Efficiency,
    Figure,
    Hardware,
    Overlap,
    TransferLink,
)
from moepass.passes.machine.seconds_table import SecondsTable, table_of
from moepass.passes.machine.times import work_flops
from moepass.runtime.calibrate.calibration_rank import Measured, Message, RankMeasurements, RankTask, Report
from moepass.runtime.calibrate.experiments import CPU_SIZES, CUDA_SIZES, CalibrationSizes, quick

# A single point takes seconds, so a rank that reports nothing for this long hangs.
_SILENCE_SECONDS = 300.0
# Below this share of a core the profile says that other programs ran. The kernel takes a little, too.
_QUIET_CORE_SHARE = 0.95
_REACHED = Figure(1.0, "calibrated", "the rates of this profile were reached")


class CalibrationError(MoepassError, RuntimeError):
    """A rank of a calibration failed or stopped reporting."""


def calibrate(
    device: str = "cpu",
    ranks: int | None = None,
    threads: int | None = None,
    *,
    is_quick: bool = False,
    sizes: CalibrationSizes | None = None,
    versions: Mapping[str, str] | None = None,
    report: Report = lambda done, total, what: None,
) -> Hardware:
    """Measure this machine with `ranks` ranks of `threads` CPU threads each, and return its profile.

    Args:
        device: `cpu` or `cuda`.
        ranks: By default one for each GPU, or two on a CPU with two cores or more.
        threads: By default the cores divided by the ranks.
        is_quick: Whether to measure coarse grids with few samples.
        sizes: Replaces the usual grids.
        versions: Added to the versions of torch and Python in the profile.
        report: Called with the number of points done, the number of all points, and the name of the next experiment.

    Raises:
        InputError: The device does not exist.
        OptionError: `ranks` or `threads` is out of range.
        CalibrationError: A rank failed.
    """
    can_pin = hasattr(os, "sched_getaffinity")  # not there on every platform
    cores = sorted(os.sched_getaffinity(0)) if can_pin else list(range(os.cpu_count() or 1))
    if device not in ("cpu", "cuda"):
        raise InputError.wrong("device", device, "cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        text = "device is 'cuda', but torch sees no GPU; use cpu"
        raise InputError(text, name="device", value=device, expected="cpu")
    devices = torch.cuda.device_count() if device == "cuda" else len(cores)
    ranks = min(2, devices) if ranks is None and device == "cpu" else devices if ranks is None else ranks
    # Two ranks may share a core, so that calibration can be tried on a machine of one core.
    most = devices if device == "cuda" else max(2, devices)
    if not 1 <= ranks <= most:
        what = "GPUs" if device == "cuda" else "cores, each of which can compute for one rank"
        raise OptionError.wrong("ranks", ranks, f"a number from 1 to {most}, the number of {what}")
    threads = max(1, len(cores) // ranks) if threads is None else threads
    if threads < 1:
        raise OptionError.wrong("threads", threads, "a number from 1 on")
    if sizes is None:
        sizes = CPU_SIZES if device == "cpu" else CUDA_SIZES
        sizes = quick(sizes) if is_quick else sizes
    pinned = can_pin and device == "cpu" and 1 < ranks <= len(cores)
    share = len(cores) // ranks
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        tasks = [
            RankTask(
                rank,
                ranks,
                "cpu" if device == "cpu" else f"cuda:{rank}",
                threads,
                str(Path(folder, "store")),
                sizes,
                tuple(cores[rank * share : (rank + 1) * share]) if pinned else (),
            )
            for rank in range(ranks)
        ]
        measurements = _run_ranks(tasks, report)
    remarks = [
        f"{len(cores)} cores, load average {load:.2f} before the start",
        "all ranks measured at the same time" if ranks > 1 else "one rank measured, alone on the machine",
        *(["every rank kept to its share of the cores, its copy thread included"] if pinned else []),
        *(["quick: coarse grids and few samples"] if is_quick else []),
    ]
    if shares := [rank.core_share for rank in measurements if rank.core_share is not None]:
        text = f"computing threads had a core for {min(shares):.0%} of the time"
        if min(shares) < _QUIET_CORE_SHARE:
            text += ": other programs ran, so rates are too low and times too long; measure again on a quiet machine"
        remarks.append(text)
    conditions = Conditions(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=measurements[0].device,
        ranks=ranks,
        threads_per_rank=threads,
        versions={"torch": str(torch.__version__), "python": platform.python_version(), **(versions or {})},
        computes_on_host=device == "cpu",
        remarks=tuple(remarks),
        not_measured=_not_measured(device, ranks, sizes),
    )
    return profile_of(measurements, conditions, device)


def _not_measured(kind: str, ranks: int, sizes: CalibrationSizes) -> tuple[str, ...]:
    missing = ["disk: its speed depends on the disk of the checkpoint and on what the kernel has cached"]
    missing += [f"{dtype}: no rate" for dtype in ("bf16", "fp16", "fp32", "fp8") if dtype not in sizes.dtypes]
    if ranks == 1:
        missing.append("peer and collectives: there was one rank")
    elif kind == "cuda":
        missing.append("peer: copies between devices were timed within one process, not through another's memory")
        missing.append("bank_gather: assumed to take as long as all_gather")
    return tuple(missing)


# ---- The processes ---------------------------------------------------------------------------------------------------


def _run_ranks(tasks: Sequence[RankTask], report: Report) -> list[RankMeasurements]:
    """Run every task in a process and return the measurements; all processes have ended when this returns or raises."""
    with contextlib.ExitStack() as stack:
        logs: list[IO[bytes]] = [stack.enter_context(tempfile.TemporaryFile()) for _ in tasks]
        processes = [stack.enter_context(_running(task, log)) for task, log in zip(tasks, logs, strict=True)]
        outputs = [process.stdout for process in processes if process.stdout is not None]
        waiting = stack.enter_context(selectors.DefaultSelector())
        for rank, output in enumerate(outputs):
            waiting.register(output, selectors.EVENT_READ, rank)
        finished: dict[int, RankMeasurements] = {}
        while len(finished) < len(tasks):
            ready = waiting.select(_SILENCE_SECONDS)
            if not ready:
                silent = [rank for rank in range(len(tasks)) if rank not in finished]
                raise CalibrationError(
                    f"calibration: no rank has reported anything for {_SILENCE_SECONDS:g} s; not done: rank "
                    f"{', '.join(map(str, silent))}",
                    ranks=silent,
                )
            for rank in (key.data for key, _ in ready):
                line = outputs[rank].readline()
                if not line:
                    code = processes[rank].wait()
                    logs[rank].seek(0)
                    log = logs[rank].read().decode(errors="replace").strip().splitlines()
                    text = f"calibration: rank {rank} ended with code {code}: {log[-1] if log else 'its log is empty'}"
                    raise CalibrationError(text, rank=rank, value=code)
                message = msgspec.json.decode(line, type=Message)
                if message.measurements is not None:
                    finished[rank] = message.measurements
                    waiting.unregister(outputs[rank])
                elif rank == 0:
                    report(message.done, message.total, message.what)
        return [finished[rank] for rank in range(len(tasks))]


@contextlib.contextmanager
def _running(task: RankTask, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(task.threads)}
    # Only this process may know the path from which it imported this package.
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    with subprocess.Popen(
        [sys.executable, "-m", "moepass.runtime.calibrate.calibration_rank"],
        bufsize=0,  # a line in a buffer would not wake up the selector
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        cwd=os.path.dirname(task.store),  # the current folder may hold modules with names of ours
    ) as process:
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it died; its log says why
                process.stdin.write(msgspec.json.encode(task))
                process.stdin.close()
            yield process
        finally:
            process.kill()
            process.wait()  # for KeyboardInterrupt, Popen itself waits only briefly


# ---- The profile -----------------------------------------------------------------------------------------------------


def profile_of(measurements: Sequence[RankMeasurements], conditions: Conditions, kind: str) -> Hardware:
    """Return the profile from the ranks' measurements. The slowest rank determines the time of a collective."""
    ranks = len(measurements)
    first = measurements[0]
    tables = {name: _table(name, [rank.tables[name] for rank in measurements]) for name in first.tables}
    groups: dict[str, dict[str, SecondsTable]] = {}
    for name, table in tables.items():
        group, _, kind_or_dtype = name.partition(".")
        groups.setdefault(group, {})[kind_or_dtype] = table
    compute = {work: groups[work] for work in COMPUTE_AXES if work in groups}
    collectives = groups.get("collective", {})
    flops: dict[str, Figure] = {}
    for dtype, table in compute["gemm"].items():
        rate, shape = max(
            (work_flops("gemm", point) / seconds, list(point.values())) for point, seconds in table.points()
        )
        flops[dtype] = Figure(rate, "calibrated", f"the best GEMM, {' x '.join(f'{size:.0f}' for size in shape)}")
    overlap: dict[str, Figure] = {}
    for name in first.overlap:
        timings = [rank.overlap[name] for rank in measurements]
        note = f"middle half of the samples within {max(timing.spread for timing in timings):.0%}"
        overlap[name] = Figure(statistics.median(timing.seconds for timing in timings), "calibrated", note)
    memory = tables["memory"]
    largest = memory.axes[0].points[-1]
    host = _link(tables["host"])
    bytes_of_rank = first.memory_bytes if kind == "cuda" else first.memory_bytes // ranks
    note = "of the device" if kind == "cuda" else "an equal part for each rank"
    return Hardware(
        name=f"{ranks}x {first.device}",
        ranks=ranks,
        flops=flops,
        memory_bytes=Figure(float(bytes_of_rank), "measured", note),
        host_memory_bytes=Figure(float(psutil.virtual_memory().total), "measured", "of the machine"),
        memory_bytes_per_s=Figure(
            largest / memory.at(bytes=largest), "calibrated", f"reads and writes, {largest / 1e6:.0f} MB in all"
        ),
        efficiency=Efficiency(_REACHED, _REACHED, _REACHED),
        overlap=Overlap(**overlap),
        collective_latency_seconds=_latency(collectives["p2p"]) if collectives else EMPIRICAL_COLLECTIVE_LATENCY,
        peer=_link(tables["peer"]) if "peer" in tables else None,
        host=host,
        local=host if first.local_is_host else _link(tables["local"]),
        compute=compute,
        memory=memory,
        decode=tables["decode"],
        collectives=Collectives(ranks, collectives) if collectives else None,
        conditions=conditions,
    )


def _table(name: str, of_ranks: Sequence[Measured]) -> SecondsTable:
    together = max if name.startswith("collective.") else statistics.median
    timings = list(zip(*[measured.timings for measured in of_ranks], strict=True))
    seconds = [float(together(timing.seconds for timing in point)) for point in timings]
    spreads = [round(max(timing.spread for timing in point), 4) for point in timings]
    note = f"middle half of the samples within {statistics.median(spreads):.0%}"
    return table_of(of_ranks[0].axes, [float(f"{value:.5g}") for value in seconds], "calibrated", note, spreads)


def _link(table: SecondsTable) -> TransferLink:
    largest = table.axes[0].points[-1]
    rate = Figure(largest / table.at(bytes=largest), "calibrated", f"a transfer of {largest / 1e6:.0f} MB")
    return TransferLink(rate, _latency(table), table)


def _latency(table: SecondsTable) -> Figure:
    smallest = table.axes[0].points[0]
    return Figure(table.seconds[0], "calibrated", f"the smallest transfer, {smallest / 1e3:.0f} kB")
