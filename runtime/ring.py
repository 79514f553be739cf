"""The ring: a fixed set of slots on the compute device, and the operations that a schedule uses on them.

`prefetch`, `acquire` and `release` mean what `moepass.passes.ir` says. A ring serves one run at a time: whoever runs a
graph holds `lock`, so threads that call compiled graphs of one model take turns.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence

import torch

from moepass.models.errors import InputError, OptionError
from moepass.passes.ir import BankSpec
from moepass.runtime.copying import CopyThread, PendingCopy
from moepass.runtime.link import Link

# All bits set is a NaN in every floating type that experts come in: fp32, bf16, fp16, fp8 e4m3fn and e5m2.
POISON_BYTE = 0xFF


@dataclasses.dataclass
class RingStatistics:
    """What a ring did since it was made. `waited_seconds` is host time spent in acquire: on a CPU, the exposed time."""

    prefetches: int = 0
    copied_bytes: int = 0
    waited_seconds: float = 0.0


class Ring:
    """`slots` buffers of `slot_bytes` on `device`; banks are copied into them by a copy thread or a copy stream."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device, link: Link, debug: bool = False) -> None:
        self.device = device
        self.link = link
        self.debug = debug
        self.lock = threading.RLock()
        self.statistics = RingStatistics()
        with torch.inference_mode(False):  # inference tensors could not be written outside that mode
            self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._views: dict[tuple[int, BankSpec], tuple[torch.Tensor, ...]] = {}

    @property
    def slots(self) -> int:
        return len(self._slots)

    @property
    def device_bytes(self) -> int:
        """Bytes that the ring occupies on the compute device."""
        return sum(slot.numel() for slot in self._slots)

    def prefetch(self, shards: Sequence[torch.Tensor], bank: BankSpec, slot: int, after: object) -> object:
        """Start to fill `slot` once `after`, an event that `release` gave or None, has happened."""
        raise NotImplementedError

    def acquire(self, filled: object, bank: BankSpec, slot: int) -> tuple[torch.Tensor, ...]:
        """The bank's tensors, as views of the slot, once it is full. Raises CopyError where the copy failed."""
        raise NotImplementedError

    def release(self, slot: int) -> object:
        """The event "everything issued so far has read the slot"."""
        raise NotImplementedError

    def reset(self) -> None:
        """Abandon what is under way after an exception, so that the next run finds a quiet ring."""
        raise NotImplementedError

    def _count(self, shards: Sequence[torch.Tensor]) -> None:
        self.statistics.prefetches += 1
        self.statistics.copied_bytes += sum(shard.numel() for shard in shards)

    def _tensors(self, bank: BankSpec, slot: int) -> tuple[torch.Tensor, ...]:
        key = (slot, bank)
        if key not in self._views:
            memory = self._slots[slot]
            self._views[key] = tuple(tensor.view(memory) for tensor in bank.tensors)
        return self._views[key]

    def _poison(self, slot: int) -> None:
        if self.debug:
            self._slots[slot].fill_(POISON_BYTE)


class CpuRing(Ring):
    """Slots in ordinary memory, filled by a copy thread. Computation on a CPU is over when its call returns."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device, link: Link, debug: bool = False) -> None:
        super().__init__(slots, slot_bytes, device, link, debug)
        self._copies = CopyThread(link)
        self._pending: list[PendingCopy] = []

    def prefetch(self, shards: Sequence[torch.Tensor], bank: BankSpec, slot: int, after: object) -> PendingCopy:
        (shard,) = shards
        self._count(shards)
        copy = self._copies.submit(PendingCopy(shard, self._slots[slot], bank.name))
        self._pending.append(copy)
        return copy

    def acquire(self, filled: object, bank: BankSpec, slot: int) -> tuple[torch.Tensor, ...]:
        assert isinstance(filled, PendingCopy)
        started = time.perf_counter()
        filled.wait()
        self.statistics.waited_seconds += time.perf_counter() - started
        self._pending.remove(filled)
        return self._tensors(bank, slot)

    def release(self, slot: int) -> object:
        self._poison(slot)
        return "released"

    def reset(self) -> None:
        for copy in self._pending:
            copy.abandoned = True
        for copy in self._pending:
            copy.finished.wait()
        self._pending.clear()


class CudaRing(Ring):
    """Slots in device memory, filled on a copy stream of their own; events order it against the compute stream."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device, link: Link, debug: bool = False) -> None:
        if link.is_emulated:
            raise OptionError(f"link is {link}, which exists for device cpu only; the device is {device}")
        super().__init__(slots, slot_bytes, device, link, debug)
        self._stream = torch.cuda.Stream(device)
        # Before the first copy: the allocator may hand out memory that the current stream has not finished with.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def prefetch(self, shards: Sequence[torch.Tensor], bank: BankSpec, slot: int, after: object) -> torch.cuda.Event:
        (shard,) = shards
        self._count(shards)
        with torch.cuda.stream(self._stream):
            if isinstance(after, torch.cuda.Event):
                self._stream.wait_event(after)
            else:
                # A fresh slot of this run may still be read by the previous one.
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
            self._slots[slot].narrow(0, 0, shard.numel()).copy_(shard, non_blocking=True)
            filled = torch.cuda.Event()
            filled.record(self._stream)
        return filled

    def acquire(self, filled: object, bank: BankSpec, slot: int) -> tuple[torch.Tensor, ...]:
        assert isinstance(filled, torch.cuda.Event)
        torch.cuda.current_stream(self.device).wait_event(filled)
        return self._tensors(bank, slot)

    def release(self, slot: int) -> torch.cuda.Event:
        self._poison(slot)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        return done

    def reset(self) -> None:
        self._stream.synchronize()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def __del__(self) -> None:
        # The allocator must not hand the slots out again while a copy writes into them.
        stream = getattr(self, "_stream", None)
        if stream is not None:
            stream.synchronize()


def make_ring(slots: int, slot_bytes: int, device: torch.device, link: Link, debug: bool = False) -> Ring:
    """The ring for `device`. Raises InputError where the device is not there or no ring exists for its kind."""
    kinds: dict[str, type[Ring]] = {"cpu": CpuRing, "cuda": CudaRing}
    if device.type not in kinds:
        raise InputError(f"device is {device}; experts stream to {' or '.join(kinds)}")
    return kinds[device.type](slots, slot_bytes, device, link, debug)
