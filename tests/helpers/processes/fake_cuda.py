"""Streams and events of CUDA without a GPU: what is issued runs later, in any order that these allow.

with FakeCuda(random).installed() as cuda:   torch.cuda's streams and events are ours
    ...                                      Tensor.copy_ and fill_ go to the current stream
    cuda.issue(function)                     so does any other work
    cuda.finish()                            runs what is left
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class Event:
    """Happens when its stream comes to where it was recorded. One that never was is no reason to wait, as in CUDA."""

    is_recorded = False
    has_happened = False

    def __init__(self, cuda: FakeCuda, enable_timing: bool = False) -> None:
        self._cuda = cuda
        self._is_timed = enable_timing
        self._moment = 0

    def record(self, stream: Stream) -> None:
        assert not self.is_recorded
        self.is_recorded = True
        stream.add(Work(self._happen))

    def _happen(self) -> None:
        self.has_happened = True
        self._moment = self._cuda.moment

    def query(self) -> bool:
        return self.has_happened

    def synchronize(self) -> None:
        while not self.has_happened:
            self._cuda.run_one()

    def elapsed_time(self, later: Event) -> float:
        """In milliseconds: as many as pieces of work were done between the two."""
        assert self._is_timed
        assert later._is_timed
        assert self.has_happened
        assert later.has_happened
        return float(later._moment - self._moment)


@dataclasses.dataclass
class Work:
    run: Callable[[], object]
    after: Event | None = None

    @property
    def is_ready(self) -> bool:
        return self.after is None or self.after.has_happened


class Stream:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.queue: deque[Work] = deque()

    def add(self, work: Work) -> None:
        self.queue.append(work)
        self._cuda.run_some()

    def wait_event(self, event: Event) -> None:
        self.add(Work(lambda: None, event if event.is_recorded else None))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._cuda)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        while self.queue:
            self._cuda.run_one()


class FakeCuda:
    """`random` decides what runs next, and how much of it while the host issues more."""

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self.moment = 0
        self.compute = Stream(self)
        self._current = self.compute
        self._streams = [self.compute]

    def stream(self, device: torch.device) -> Stream:
        self._streams.append(Stream(self))
        return self._streams[-1]

    def issue(self, function: Callable[[], object]) -> None:
        self._current.add(Work(function))

    @property
    def is_idle(self) -> bool:
        return not any(stream.queue for stream in self._streams)

    def finish(self) -> None:
        while not self.is_idle:
            self.run_one()

    def run_some(self) -> None:
        for _ in range(self._random.choice((0, 0, 1, 2, 5))):
            if self._ready():
                self.run_one()

    def run_one(self) -> None:
        ready = self._ready()
        assert ready, "streams wait for each other"
        work = self._random.choice(ready).queue.popleft()
        self.moment += 1
        with torch._C.DisableTorchFunction():
            work.run()

    def _ready(self) -> list[Stream]:
        return [stream for stream in self._streams if stream.queue and stream.queue[0].is_ready]

    @contextlib.contextmanager
    def installed(self) -> Iterator[FakeCuda]:
        replaced = {
            "Stream": self.stream,
            # A class, because the ring asks what is an event.
            "Event": type("Event", (Event,), {"__init__": lambda event, **how: Event.__init__(event, self, **how)}),
            "synchronize": lambda device=None: self.finish(),
            "current_stream": lambda device=None: self._current,
            "stream": self._on,
        }
        with mock.patch.multiple(torch.cuda, **replaced), _Issuing(self):
            yield self

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


class _Issuing(TorchFunctionMode):
    """Lets writes in place go to the current stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (torch.Tensor.copy_, torch.Tensor.fill_):
            return function(*args, **(kwargs or {}))
        self._cuda.issue(lambda: function(*args, **(kwargs or {})))
        return args[0]
