"""How long the runs of one graph took, and how long they waited for banks: always on, and cheap.

On a CPU it reads the clock twice per run; on CUDA it records two events on the compute stream, which the host does not
wait for. The ring reports how long a run waited, so other models do not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from moepass.runtime.transfer.copier import Wait
from moepass.runtime.transfer.recording import recorded_event, seconds_between
from moepass.runtime.transfer.ring import Ring

# Number of last runs whose median is taken.
_KEPT_RUNS = 32


@dataclasses.dataclass(frozen=True)
class MeasuredRuns:
    """The last runs with equal sizes of their inputs, the first of them left out: slots are empty there, memory is new.

    `runs` counted. Of the last 32 of these, `run_seconds` is the median of what they took, and `exposed_seconds` the
    mean of what they waited for banks. Both are None before there is a run that counts. `slot_bytes` are those of the
    ring; None before there was a run.
    """

    sizes: Mapping[str, int]
    runs: int
    run_seconds: float | None
    exposed_seconds: float | None
    slot_bytes: int | None


class RunClock:
    """Times the runs of one graph."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start_again({})

    def _start_again(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._runs = 0
        # Seconds and waits of each run.
        self._spans: deque[tuple[Callable[[], float], Sequence[Wait]]] = deque(maxlen=_KEPT_RUNS)
        self._slot_bytes: int | None = None

    @contextlib.contextmanager
    def run(self, device: torch.device, sizes: Mapping[str, int], ring: Ring | None) -> Iterator[None]:
        """Time what runs inside. A run that raises does not count."""
        with self._lock:
            if sizes != self._sizes or not self._runs:
                self._start_again(dict(sizes))
        if device.type == "cuda":
            began = recorded_event(torch.cuda.current_stream(device))
            yield
            ended = recorded_event(torch.cuda.current_stream(device))
            self._add(lambda: seconds_between(began, ended), sizes, ring)
            return
        started = time.perf_counter()
        yield
        took = time.perf_counter() - started
        self._add(lambda: took, sizes, ring)

    def _add(self, seconds: Callable[[], float], sizes: Mapping[str, int], ring: Ring | None) -> None:
        with self._lock:
            if sizes != self._sizes:  # another thread has come with others
                return
            self._runs += 1
            self._slot_bytes = 0 if ring is None else ring.device_bytes
            if self._runs > 1:
                self._spans.append((seconds, () if ring is None else ring.waits))

    def measured(self, device: torch.device) -> MeasuredRuns:
        """Measurements so far, once all these runs are over."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        with self._lock:
            taken = [seconds() for seconds, _ in self._spans]
            waited = [sum(wait() for wait in waits) for _, waits in self._spans]
            return MeasuredRuns(
                self._sizes,
                max(0, self._runs - 1),
                statistics.median(taken) if taken else None,
                statistics.fmean(waited) if waited else None,
                self._slot_bytes,
            )
