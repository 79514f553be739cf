"""The copier of a ring: starts copies into slots while the computation runs, and waits for them."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable

import torch

from moepass.passes.ir.timeline import COMPUTE
from moepass.runtime.transfer.copying import CopyThread, DecodeAction, Decoder, SlotCopy
from moepass.runtime.transfer.home_protocol import Transport
from moepass.runtime.transfer.lanes import Lane
from moepass.runtime.transfer.learned_order import Fetch
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.recording import Moment, current_recording, seconds_between

_HOST, _REAL_LINK = Transport("host"), Link()

# Returns the seconds that the computation waited for one bank; on CUDA only once the wait is over.
Wait = Callable[[], float]


@dataclasses.dataclass
class RingStatistics:
    """Counts and times of a ring since it was made.

    Attributes:
        copies: Copies started, into slots or into encoded buffers.
        copied_bytes: Bytes of these copies.
        link_bytes: Bytes among `copied_bytes` that came over the link; the rest came from this rank's own shards.
        decodes: Banks decoded.
        waited_seconds: The exposed time: how long the computation waited for banks, by the host's clock on a CPU and
            by events of the compute stream on CUDA.
        ahead_used: Copies started at the end of a run that the next run then asked for.
        ahead_wasted: Copies started at the end of a run that the next run did not ask for.
        staged_bytes: Bytes that runs used from staging buffers, with home `hybrid`.
        unstaged_bytes: Bytes that runs used directly from host memory, with home `hybrid`.
    """

    copies: int = 0
    copied_bytes: int = 0
    link_bytes: int = 0
    decodes: int = 0
    waited_seconds: float = 0.0
    ahead_used: int = 0
    ahead_wasted: int = 0
    staged_bytes: int = 0
    unstaged_bytes: int = 0


class Copier:
    """Copies on `lane` in the order of `submit`, and decodes on another lane in the order of `decode`.

    Copies that need the host (files, gathers, staging buffers) and all copies on a CPU run on `thread`, and decodes
    then run on another thread. Without a thread, `submit` and `decode` themselves issue the work to the stream of its
    lane; an emulated link needs a thread.
    """

    def __init__(
        self,
        lane: Lane,
        transport: Transport = _HOST,
        thread: CopyThread | None = None,
        link: Link = _REAL_LINK,
    ) -> None:
        self._lane, self._transport, self._thread, self._link = lane, transport, thread, link
        # Both are made by the first decode.
        self._decode_lane: Lane | None = None
        self._decode_thread: CopyThread | None = None
        # Copies and decodes that no run has waited for yet.
        self._pending: list[SlotCopy] = []
        # Copies and decodes that no run will wait for, and that may not have ended.
        self._abandoned: list[SlotCopy] = []
        # The moment at which the last run began.
        self._began: object = None
        # The moments at which the computation began to wait, and at which it went on.
        self._waits: deque[tuple[Moment, Moment]] = deque()

    def begin_run(self) -> None:
        """Delay all copies from now on until the computation issued so far is done: it may have written the sources."""
        self._began = self.event()

    def submit(self, fetch: Fetch, target: torch.Tensor, after: object, follows: SlotCopy | None = None) -> SlotCopy:
        """Start to copy `fetch` into `target`, flat uint8, once the moment `after` of `event` has passed.

        The target is an encoded buffer, which `decode` reads, or a slot. `follows` is the last decode from this buffer,
        or abandoned work into this slot.
        """
        action = self._transport.action(fetch.bank, fetch.sources)
        copy = SlotCopy(fetch.sources, target, fetch.bank.name, action, self._lane, after, follows, self._began)
        return self._start(copy, self._thread)

    def decode(
        self, copied: SlotCopy, decoder: Decoder, encoded: torch.Tensor, slot: torch.Tensor, after: object
    ) -> SlotCopy:
        """Start to fill `slot`, which is free after `after`, by `decoder` from `encoded`, which `copied` fills.

        The returned copy replaces `copied`: waiting for it includes waiting for `copied`.
        """
        if self._decode_lane is None:
            self._decode_lane = self._lane.another()
            self._decode_thread = None if self._thread is None else self._thread.another()
        self._pending.remove(copied)
        action = DecodeAction(copied, decoder, encoded)
        decode = SlotCopy((), slot, copied.label, action, self._decode_lane, after, copied)
        decode.abandoned = copied.abandoned
        return self._start(decode, self._decode_thread)

    def _start(self, copy: SlotCopy, thread: CopyThread | None) -> SlotCopy:
        if thread is None:
            copy.perform(self._link)
            copy.finished.set()
        else:
            thread.submit(copy)
        self._pending.append(copy)
        recording = current_recording()
        if recording is not None:
            recording.add_copy(copy, self._link.is_emulated)
        return copy

    def wait(self, copy: SlotCopy, statistics: RingStatistics) -> Wait:
        """Delay computation issued from now on until `copy` has filled its slot.

        Raises CopyError, or PeerError for a gather, if the copy failed.
        """
        started = self._lane.mark_computation()
        copy.wait()
        self._lane.delay_computation(copy.filled)
        ended = self._lane.mark_computation()
        self._waits.append((started, ended))
        self.settle(statistics)
        statistics.staged_bytes += sum(stage.staged_bytes for stage in copy.stages)
        statistics.unstaged_bytes += sum(stage.unstaged_bytes for stage in copy.stages)
        self._pending.remove(copy)
        recording = current_recording()
        if recording is not None:
            # The copy may have been started before the recording.
            for stage in copy.stages:
                recording.add_copy(stage, self._link.is_emulated)
            recording.add("wait", copy.label, COMPUTE, started, ended)
        return functools.partial(seconds_between, started, ended)

    def event(self) -> object:
        """Return a moment that passes when all computation issued so far is done."""
        return self._lane.mark_computation()

    def abandon(self, copy: SlotCopy) -> None:
        """Drop a copy that no run will wait for."""
        copy.abandoned.set()
        self._pending.remove(copy)
        self._abandoned = [work for work in (*self._abandoned, copy) if not work.finished.is_set()]

    def quiesce(self) -> None:
        """Abandon all copies, and block until they have ended and no issued computation reads a slot, on any stream."""
        for copy in self._pending:
            copy.abandoned.set()
        for copy in (*self._pending, *self._abandoned):
            copy.finished.wait()
        self._pending.clear()
        self._abandoned.clear()
        self._synchronize()

    def close(self) -> None:
        """Block until all users of the ring's memory that hold no reference to it are done. Any thread may call it."""
        if self._lane.is_synchronous:
            return
        # This may be one of the threads, which cannot wait for its own work. They hold the memory that they use.
        for copy in self._pending:
            copy.abandoned.set()
        self._synchronize()

    def _synchronize(self) -> None:
        self._lane.synchronize()
        if self._decode_lane is not None:
            self._decode_lane.synchronize()

    def settle(self, statistics: RingStatistics) -> None:
        """Add the waits that have ended since the last call to `statistics`, without waiting for the others."""
        while self._waits and self._lane.has_passed(self._waits[0][1]):
            statistics.waited_seconds += seconds_between(*self._waits.popleft())
