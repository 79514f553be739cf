"""Duration of a graph's runs and their waits for banks: always measured, at little cost.

On a CPU the clock is read twice per run. On CUDA two events are recorded on the compute stream, and the host does not
wait for them. The ring reports how long a run waited, so the runs of other models do not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from moepass.runtime.transfer.copier import Wait
from moepass.runtime.transfer.recording import recorded_event, seconds_between
from moepass.runtime.transfer.ring import Ring

# Medians and means are taken over the last runs, at most this number.
_COUNTED_RUNS = 32


@dataclasses.dataclass(frozen=True)
class MeasuredRuns:
    """Measurements of the last runs with equal input sizes, without the first: its slots are empty, its memory is new.

    Attributes:
        sizes: the input sizes of these runs by name; empty before the first run.
        runs: the number of these runs.
        run_seconds: median duration of the last 32 of them; None without runs.
        exposed_seconds: mean time that the last 32 of them waited for banks; None without runs.
        slot_bytes: bytes of the ring; None before the first run.
        weight_bytes: bytes of the graph's inputs on its device, without banks at rest; None before the first run.
        peak_bytes: peak of the memory that torch allocated on the device; None if torch does not track it.
    """

    sizes: Mapping[str, int]
    runs: int
    run_seconds: float | None
    exposed_seconds: float | None
    slot_bytes: int | None
    weight_bytes: int | None
    peak_bytes: int | None


class RunClock:
    """Times the runs of one graph, all on one device.

    Args:
        inputs_at_rest: positions of the graph's inputs that are banks whose home is not the device.
    """

    def __init__(self, inputs_at_rest: Collection[int] = ()) -> None:
        self._inputs_at_rest = inputs_at_rest
        self._device: torch.device | None = None
        self._weight_bytes: int | None = None
        self._lock = threading.Lock()
        self._restart({})

    def _restart(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._runs = 0
        # Seconds and waits of each run.
        self._spans: deque[tuple[Callable[[], float], Sequence[Wait]]] = deque(maxlen=_COUNTED_RUNS)
        self._slot_bytes: int | None = None

    @contextlib.contextmanager
    def run(
        self, device: torch.device, sizes: Mapping[str, int], ring: Ring | None, arguments: Sequence[Any] = ()
    ) -> Iterator[None]:
        """Time the code inside. A run that raises does not count.

        Args:
            device: the device of all runs.
            sizes: the input sizes of this run by name.
            ring: the ring that reports waits; None if nothing is streamed.
            arguments: the graph's inputs.
        """
        with self._lock:
            if self._device is None:
                self._device, self._weight_bytes = device, self._count_weight_bytes(device, arguments)
            if sizes != self._sizes or not self._runs:
                self._restart(dict(sizes))
        if device.type == "cuda":
            began = recorded_event(torch.cuda.current_stream(device))
            yield
            ended = recorded_event(torch.cuda.current_stream(device))
            self._add(lambda: seconds_between(began, ended), sizes, ring)
            return
        started = time.perf_counter()
        yield
        elapsed = time.perf_counter() - started
        self._add(lambda: elapsed, sizes, ring)

    def _add(self, seconds: Callable[[], float], sizes: Mapping[str, int], ring: Ring | None) -> None:
        with self._lock:
            if sizes != self._sizes:  # another thread has begun a run with other sizes
                return
            self._runs += 1
            self._slot_bytes = 0 if ring is None else ring.device_bytes
            if self._runs > 1:
                self._spans.append((seconds, () if ring is None else ring.waits))

    def _count_weight_bytes(self, device: torch.device, arguments: Sequence[Any]) -> int:
        storages = {
            value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
            for position, value in enumerate(arguments)
            if isinstance(value, torch.Tensor) and value.device == device and position not in self._inputs_at_rest
        }
        return sum(storages.values())

    def measured(self) -> MeasuredRuns:
        """Return the measurements so far. On CUDA this waits until these runs have finished."""
        peak_bytes = None
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak_bytes = torch.cuda.max_memory_allocated(self._device)
        with self._lock:
            run_seconds = [seconds() for seconds, _ in self._spans]
            waited_seconds = [sum(wait() for wait in waits) for _, waits in self._spans]
            return MeasuredRuns(
                self._sizes,
                max(0, self._runs - 1),
                statistics.median(run_seconds) if run_seconds else None,
                statistics.fmean(waited_seconds) if waited_seconds else None,
                self._slot_bytes,
                self._weight_bytes,
                peak_bytes,
            )
