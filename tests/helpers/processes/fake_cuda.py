"""Streams, events and device memory of CUDA without a GPU: issued work runs later, in any order that streams and events
allow.

with FakeCuda(random).installed() as cuda:   torch.cuda's streams and events are emulated
    ...                                      torch operators go to the current stream, their results to its memory
    cuda.issue(function)                     any other work goes to the current stream too
    cuda.finish()                            runs the remaining work

Freed memory is reused at once on the stream that allocated it, even while other streams still use it, and issued work
keeps no memory alive: torch's allocator for CUDA behaves like this. Memory that was allocated outside acts as pinned
host memory: copies read it when they run, not when they are issued.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import random
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only


class Event:
    """An event that happens when its stream reaches the record. Waits for an unrecorded event return at once."""

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
        """Return the number of pieces of work that ran between the two events, as milliseconds."""
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
    """A stream; `speed` is the relative probability that its work is chosen next."""

    def __init__(self, cuda: FakeCuda, speed: float) -> None:
        self._cuda = cuda
        self.speed = speed
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


class DeviceMemory:
    """Blocks of memory. Each belongs to the stream that allocated it first, and returns to that stream when freed."""

    def __init__(self) -> None:
        self._blocks: list[Any] = []
        self._addresses: set[int] = set()
        self._free: dict[tuple[Stream, int], list[int]] = defaultdict(list)

    def take(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """Return flat uint8 memory, which is free again when its last reference is gone."""
        size = 1 << max(6, (max(1, nbytes) - 1).bit_length())
        free = self._free[stream, size]
        if not free:
            block = (ctypes.c_char * size)()
            self._blocks.append(block)
            self._addresses.add(ctypes.addressof(block))
            free.append(ctypes.addressof(block))
        address = free.pop()
        handed_out = (ctypes.c_char * size).from_address(address)
        weakref.finalize(handed_out, free.append, address).atexit = False
        return torch.frombuffer(handed_out, dtype=torch.uint8)[:nbytes]

    def unowned(self, value: torch.Tensor) -> torch.Tensor:
        """Return the same tensor; if it is in this memory, without keeping the memory alive."""
        address = value.untyped_storage().data_ptr()
        if address not in self._addresses:
            return value
        memory = (ctypes.c_char * value.untyped_storage().nbytes()).from_address(address)
        storage = torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype)
        return storage.as_strided(value.shape, value.stride(), value.storage_offset())


class FakeCuda:
    """An emulated GPU. `random` decides which work runs next, and how much of it runs while the host issues more."""

    def __init__(self, random: random.Random) -> None:
        self._random = random
        # Pieces of work that run while the host issues one more; often few, so that streams are far behind.
        self._done_meanwhile = random.choice(((0,), (0, 0, 0, 1), (0, 0, 1, 2, 5)))
        self.moment = 0
        self.memory = DeviceMemory()
        self._streams: list[Stream] = []
        self.compute = self.stream()
        self._current = self.compute

    def stream(self, device: torch.device | None = None, priority: int = 0) -> Stream:
        self._streams.append(Stream(self, self._random.choice((0.02, 1.0, 1.0))))
        return self._streams[-1]

    def issue(self, function: Callable[[], object]) -> None:
        self._current.add(Work(function))

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return flat uint8 memory of the current stream."""
        return self.memory.take(nbytes, self._current)

    @property
    def is_idle(self) -> bool:
        return not any(stream.queue for stream in self._streams)

    def finish(self) -> None:
        while not self.is_idle:
            self.run_one()

    def run_some(self) -> None:
        for _ in range(self._random.choice(self._done_meanwhile)):
            if self._ready():
                self.run_one()

    def run_one(self) -> None:
        ready = self._ready()
        assert ready, "streams wait for each other"
        (stream,) = self._random.choices(ready, [stream.speed for stream in ready])
        work = stream.queue.popleft()
        self.moment += 1
        with _disable_current_modes():
            work.run()

    def _ready(self) -> list[Stream]:
        return [stream for stream in self._streams if stream.queue and stream.queue[0].is_ready]

    @contextlib.contextmanager
    def installed(self, issues_operators: bool = True) -> Iterator[FakeCuda]:
        """Replace torch.cuda's streams and events. Unless `issues_operators`, the caller issues operators."""
        replaced = {
            "Stream": self.stream,
            # A class, because the ring checks with isinstance.
            "Event": type("Event", (Event,), {"__init__": lambda event, **how: Event.__init__(event, self, **how)}),
            "synchronize": lambda device=None: self.finish(),
            "current_stream": lambda device=None: self._current,
            "stream": self.on,
        }
        issuing = _Issuing(self) if issues_operators else contextlib.nullcontext()
        with mock.patch.multiple(torch.cuda, **replaced), issuing:
            yield self

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Issue a torch operator, and return the tensors that will contain its results."""
        if function.is_view:
            return function(*args, **kwargs)
        if function in _FOR_THE_HOST:
            self._current.synchronize()
            return function(*args, **kwargs)
        unowned = tree_map_only(torch.Tensor, self.memory.unowned, (args, kwargs))
        if function._schema.is_mutable:
            self.issue(lambda: function(*unowned[0], **unowned[1]))
            return args[0]
        made = tree_map_only(_Described, self._empty, _describe(function, args, kwargs))
        if function is not torch.ops.aten.empty.memory_format:
            places = tree_map_only(torch.Tensor, self.memory.unowned, made)
            self.issue(lambda: _fill(places, function(*unowned[0], **unowned[1])))
        return made

    def _empty(self, described: _Described) -> torch.Tensor:
        memory = self.empty(max(described.nbytes, described.dtype.itemsize)).view(described.dtype)
        return memory.as_strided(described.shape, described.strides, 0)


@dataclasses.dataclass(frozen=True)
class _Described:
    """The type, shape, strides and size of a tensor, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int

    @staticmethod
    def of(value: torch.Tensor) -> _Described:
        return _Described(value.dtype, tuple(value.shape), value.stride(), value.untyped_storage().nbytes())


_described: dict[str, Any] = {}


def _describe(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the descriptions of an operator's results."""
    key = str((function, tree_map_only(torch.Tensor, _Described.of, (args, kwargs))))
    if key not in _described:
        with FakeTensorMode(allow_non_fake_inputs=True):
            _described[key] = tree_map_only(torch.Tensor, _Described.of, function(*args, **kwargs))
    return _described[key]


# Operators that return a value to the host.
_FOR_THE_HOST = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


def _fill(places: Any, values: Any) -> None:
    if isinstance(places, torch.Tensor):
        places.copy_(values)
        return
    for result, value in zip(places, values, strict=True):
        _fill(result, value)


class _Issuing(TorchDispatchMode):
    """A dispatch mode that issues operators to the current stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._cuda.run(function, args, kwargs or {})
