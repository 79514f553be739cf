"""The measured device: its clock, its memory, and its description. A CPU works too, to try the benchmark."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import transformers

from moepass.passes.machine.hardware import Hardware

# About 1 ms, in which the host issues a run, so that the device does not wait for it.
_AHEAD_CYCLES = 2_000_000


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one run: the median, the shortest and the longest."""

    seconds: float
    shortest: float
    longest: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        """Return the timing of repeated runs."""
        return Timing(statistics.median(seconds), min(seconds), max(seconds))

    def __str__(self) -> str:
        spread = (self.longest - self.shortest) / self.seconds / 2 if self.seconds else 0.0
        return f"{self.seconds * 1e3:.3f} ±{spread:.0%}"


@dataclasses.dataclass(frozen=True)
class Target:
    """The measured device; `dtype` is the dtype of weights and activations, `most_error` the tolerance of a product."""

    device: torch.device
    dtype: torch.dtype
    most_error: float
    hardware: Hardware | None = None

    @property
    def is_gpu(self) -> bool:
        """Return True if the device is a CUDA GPU."""
        return self.device.type == "cuda"

    @property
    def peak_flops(self) -> float | None:
        """Return the stated peak rate of bf16, or None if the profile describes another kind of device."""
        if self.hardware is None or not self.is_gpu or "bf16" not in self.hardware.flops:
            return None
        return self.hardware.flops["bf16"].value

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of one run, by events on the compute stream of a GPU, or by the clock on a CPU."""
        if not self.is_gpu:
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_AHEAD_CYCLES)
        began.record()
        run()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def interleaved(
        self, runs: Mapping[str, Callable[[], object]], rounds: int, is_stream: bool = False
    ) -> dict[str, Timing]:
        """Time each run `rounds` times in turns, after a run that is not counted.

        If `is_stream`, each timed run follows an untimed one of the same variant. It then finds the slots of a ring as
        the same variant leaves them in the steady state, and not filled while other variants ran.
        """
        for run in runs.values():
            run()
        self.synchronize()
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                if is_stream:
                    run()
                times[name].append(self.seconds(run))
        return {name: Timing.of(seconds) for name, seconds in times.items()}

    def memory_of(self, run: Callable[[], object]) -> int | None:
        """Return the peak bytes that a run adds on the device, or None if the device does not count them."""
        if not self.is_gpu:
            run()
            return None
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def free_memory(self) -> None:
        """Collect garbage, and return cached memory to the device."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()


class Deadline:
    """The time limit of a part; measurements after it are skipped and reported."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end, self.seconds = clock, clock() + seconds, seconds

    @property
    def is_over(self) -> bool:
        """Return True if the time is over."""
        return self._clock() >= self._end


class WrongResultError(AssertionError):
    """A result differs from the reference."""


class Failures:
    """Errors that do not stop further measurements; the first one is raised at the end."""

    def __init__(self) -> None:
        self._found: list[Exception] = []

    def add(self, error: Exception) -> str:
        """Print `error` with its traceback, free the objects in its frames, and return the error as one line."""
        traceback.print_exception(error)
        lines = str(error).strip().splitlines() or [""]
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self._found.append(error)
        return f"{type(error).__name__}: {lines[0]}"

    def raise_first(self) -> None:
        """Raise the first error, if there was one."""
        if self._found:
            raise self._found[0]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if `error` means, or was caused by, a lack of device memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def fits(target: Target, run: Callable[[], object]) -> bool:
    """Return True if the memory is enough for `run`. A failed run leaves no allocation. Other errors are raised."""
    try:
        run()
        target.synchronize()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The frames of the traceback hold the activations.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        is_enough = False
    else:
        is_enough = True
    target.free_memory()
    return is_enough


def conditions(target: Target) -> dict[str, str]:
    """Return the hardware and software versions of a measurement."""
    import triton

    device = f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s): TRIED OUT, NO GPU"
    memory = "not counted"
    if target.is_gpu:
        properties = torch.cuda.get_device_properties(target.device)
        device = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        memory = f"{properties.total_memory / 2**30:.1f} GiB, driver {driver}"
    commit = _output("git", "rev-parse", "--short", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "device": device,
        "memory": memory,
        "profile": "none" if target.hardware is None else target.hardware.name,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "Python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit if changed in ("", _UNKNOWN) else f"{commit}, with changes",
    }


_UNKNOWN = "unknown"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.SubprocessError):
        return _UNKNOWN
    return done.stdout.strip()
