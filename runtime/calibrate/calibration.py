"""Measures this machine, in one process per rank that all measure at the same time, and makes a profile of it."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec
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
from moepass.runtime.calibrate.calibration_rank import (
    Measured,
    Message,
    RankMeasurements,
    RankTask,
    Report,
    machine_memory_bytes,
)
from moepass.runtime.calibrate.experiments import CPU_SIZES, CUDA_SIZES, CalibrationSizes, quick
from moepass.runtime.calibrate.stopwatch import Timing

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
    kind = _check_device(device)
    devices = torch.cuda.device_count() if kind == "cuda" else len(cores)
    ranks = min(2, devices) if ranks is None and kind == "cpu" else devices if ranks is None else ranks
    # Two ranks may share a core, so that calibration can be tried on a machine of one core.
    most = devices if kind == "cuda" else max(2, devices)
    if not 1 <= ranks <= most:
        what = "GPUs" if kind == "cuda" else "cores, each of which can compute for one rank"
        raise OptionError.wrong("ranks", ranks, f"a number from 1 to {most}, the number of {what}")
    threads = max(1, len(cores) // ranks) if threads is None else threads
    if threads < 1:
        raise OptionError.wrong("threads", threads, "a number from 1 on")
    if sizes is None:
        sizes = CPU_SIZES if kind == "cpu" else CUDA_SIZES
        sizes = quick(sizes) if is_quick else sizes
    pinned = can_pin and kind == "cpu" and 1 < ranks <= len(cores)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        tasks = [
            RankTask(
                rank,
                ranks,
                "cpu" if kind == "cpu" else f"cuda:{rank}",
                threads,
                str(Path(folder, "store")),
                sizes,
                _share(cores, rank, ranks) if pinned else (),
            )
            for rank in range(ranks)
        ]
        measurements = _run_ranks(tasks, report)
    remarks = [
        f"{len(cores)} cores, load average {load:.2f} before the start",
        "all ranks measured at the same time" if ranks > 1 else "one rank measured, alone on the machine",
        *(["every rank kept to its share of the cores, its copy thread included"] if pinned else []),
        *(["quick: coarse grids and few samples"] if is_quick else []),
        *_remarks_on_cores(measurements),
    ]
    conditions = Conditions(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=measurements[0].device,
        ranks=ranks,
        threads_per_rank=threads,
        versions={"torch": str(torch.__version__), "python": platform.python_version(), **(versions or {})},
        computes_on_host=kind == "cpu",
        remarks=tuple(remarks),
        not_measured=_not_measured(kind, ranks, sizes),
    )
    return profile_of(measurements, conditions, kind)


def _check_device(device: str) -> str:
    if device not in ("cpu", "cuda"):
        raise InputError.wrong("device", device, "cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device is 'cuda', but torch sees no GPU; use cpu", name="device", value=device, expected="cpu"
        )
    return device


def _share(cores: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    each = len(cores) // ranks
    return tuple(cores[rank * each : (rank + 1) * each])


def _remarks_on_cores(measurements: Sequence[RankMeasurements]) -> list[str]:
    shares = [rank.core_share for rank in measurements if rank.core_share is not None]
    if not shares:
        return []
    text = f"computing threads had a core for {min(shares):.0%} of the time"
    if min(shares) < _QUIET_CORE_SHARE:
        text += ": other programs ran, so rates are too low and times too long; measure again on a quiet machine"
    return [text]


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
    lines: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        logs: list[IO[bytes]] = [stack.enter_context(tempfile.TemporaryFile()) for _ in tasks]
        processes = [stack.enter_context(_running(task, log, lines)) for task, log in zip(tasks, logs, strict=True)]
        finished: dict[int, RankMeasurements] = {}
        while len(finished) < len(tasks):
            try:
                rank, line = lines.get(timeout=_SILENCE_SECONDS)
            except queue.Empty:
                silent = [rank for rank in range(len(tasks)) if rank not in finished]
                raise CalibrationError(
                    f"calibration: no rank has reported anything for {_SILENCE_SECONDS:g} s; not done: rank "
                    f"{', '.join(map(str, silent))}",
                    ranks=silent,
                ) from None
            if not line:
                if rank not in finished:
                    code = processes[rank].wait()
                    text = f"calibration: rank {rank} ended with code {code}: {_last_line(logs[rank])}"
                    raise CalibrationError(text, rank=rank, value=code)
                continue
            message = msgspec.json.decode(line, type=Message)
            if message.measurements is not None:
                finished[rank] = message.measurements
            elif rank == 0:
                report(message.done, message.total, message.what)
        return [finished[rank] for rank in range(len(tasks))]


@contextlib.contextmanager
def _running(
    task: RankTask, log: IO[bytes], lines: queue.SimpleQueue[tuple[int, bytes]]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a rank's process in a block. Puts (rank, line) into `lines` for its output, and (rank, b"") when it ends."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(task.threads)}
    # Only this process may know the path from which it imported this package.
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-m", "moepass.runtime.calibrate.calibration_rank"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        cwd=os.path.dirname(task.store),  # the current folder may hold modules with names of ours
    )
    assert process.stdin is not None
    assert process.stdout is not None
    output = process.stdout

    def read() -> None:
        for line in output:
            lines.put((task.rank, line))
        lines.put((task.rank, b""))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        with contextlib.suppress(BrokenPipeError):  # it died; its log says why
            process.stdin.write(msgspec.json.encode(task))
            process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()
        reader.join()
        output.close()


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "its log is empty"


# ---- The profile -----------------------------------------------------------------------------------------------------


def profile_of(measurements: Sequence[RankMeasurements], conditions: Conditions, kind: str) -> Hardware:
    """Return the profile of what the ranks measured. A collective takes as long as it takes on the slowest rank."""
    ranks = len(measurements)
    first = measurements[0]
    tables = {name: _table(name, [rank.tables[name] for rank in measurements]) for name in first.tables}
    compute: dict[str, dict[str, SecondsTable]] = {}
    for work in COMPUTE_AXES:
        of_work = {name.partition(".")[2]: table for name, table in tables.items() if name.startswith(f"{work}.")}
        if of_work:
            compute[work] = of_work
    collectives = {
        name.removeprefix("collective."): table for name, table in tables.items() if name.startswith("collective.")
    }
    memory = tables["memory"]
    largest = memory.axes[0].points[-1]
    host = _link(tables["host"])
    bytes_of_rank = first.memory_bytes if kind == "cuda" else first.memory_bytes // ranks
    note = "of the device" if kind == "cuda" else "an equal part for each rank"
    return Hardware(
        name=f"{ranks}x {first.device}",
        ranks=ranks,
        flops={dtype: _best_rate(table) for dtype, table in compute["gemm"].items()},
        memory_bytes=Figure(float(bytes_of_rank), "measured", note),
        host_memory_bytes=Figure(float(machine_memory_bytes()), "measured", "of the machine"),
        memory_bytes_per_s=Figure(
            largest / memory.at(bytes=largest), "calibrated", f"reads and writes, {largest / 1e6:.0f} MB in all"
        ),
        efficiency=Efficiency(_REACHED, _REACHED, _REACHED),
        overlap=Overlap(**{name: _ratio([rank.overlap[name] for rank in measurements]) for name in first.overlap}),
        collective_latency_seconds=_latency(collectives["p2p"]) if collectives else EMPIRICAL_COLLECTIVE_LATENCY,
        peer=_link(tables["peer"]) if "peer" in tables else None,
        host=host,
        local=host if first.local_is_host else _link(tables["local"]),
        compute=compute,
        memory=memory,
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


def _best_rate(table: SecondsTable) -> Figure:
    rates = [(work_flops("gemm", point) / seconds, point) for point, seconds in table.points()]
    rate, shape = max(rates, key=lambda pair: pair[0])
    sizes = " x ".join(f"{size:.0f}" for size in shape.values())
    return Figure(rate, "calibrated", f"the best GEMM, {sizes}")


def _link(table: SecondsTable) -> TransferLink:
    largest = table.axes[0].points[-1]
    rate = Figure(largest / table.at(bytes=largest), "calibrated", f"a transfer of {largest / 1e6:.0f} MB")
    return TransferLink(rate, _latency(table), table)


def _latency(table: SecondsTable) -> Figure:
    smallest = table.axes[0].points[0]
    return Figure(table.seconds[0], "calibrated", f"the smallest transfer, {smallest / 1e3:.0f} kB")


def _ratio(timings: Sequence[Timing]) -> Figure:
    value = statistics.median(timing.seconds for timing in timings)
    spread = max(timing.spread for timing in timings)
    return Figure(value, "calibrated", f"middle half of the samples within {spread:.0%}")
