"""Copies by a thread, into slots in ordinary memory. Computation on a CPU is over when its call returns."""

from __future__ import annotations

import time

import torch

from moepass.passes.ir.timeline import COMPUTE
from moepass.runtime.transfer.copier import Copier, Decoder, RingStatistics, Wait
from moepass.runtime.transfer.copying import PendingCopy, PendingDecode
from moepass.runtime.transfer.learned_order import Fetch
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.recording import current_recording
from moepass.runtime.transfer.transports import Transport


class ThreadCopier(Copier):
    def __init__(self, transport: Transport, link: Link) -> None:
        self._transport = transport
        self._is_emulated = link.is_emulated
        self._thread = transport.copy_thread(link)
        self._pending: list[PendingCopy] = []

    def submit(self, fetch: Fetch, target: torch.Tensor, after: object) -> PendingCopy:
        return self._start(self._transport.copy(fetch.bank, fetch.sources, target))

    def decode(self, copied: object, decoder: Decoder, link: torch.Tensor, slot: torch.Tensor) -> PendingCopy:
        assert isinstance(copied, PendingCopy)
        self._pending.remove(copied)
        return self._start(PendingDecode(copied, decoder, link, slot))

    def _start(self, copy: PendingCopy) -> PendingCopy:
        self._thread.submit(copy)
        self._pending.append(copy)
        recording = current_recording()
        if recording is not None:
            recording.add_copy(copy, self._is_emulated)
        return copy

    def wait(self, filled: object, statistics: RingStatistics) -> Wait:
        assert isinstance(filled, PendingCopy)
        started = time.perf_counter()
        filled.wait()
        waited = time.perf_counter() - started
        statistics.waited_seconds += waited
        statistics.staged_bytes += filled.staged_bytes
        statistics.unstaged_bytes += filled.unstaged_bytes
        self._pending.remove(filled)
        recording = current_recording()
        if recording is not None:
            # Also those that the run before has started.
            recording.add_copy(filled, self._is_emulated)
            recording.add("wait", filled.label, COMPUTE, started, time.perf_counter())
        return lambda: waited

    def event(self) -> object:
        return "done"

    def abandon(self, filled: object) -> None:
        assert isinstance(filled, PendingCopy)
        filled.abandon()
        self._pending.remove(filled)

    def quiesce(self) -> None:
        for copy in self._pending:
            copy.abandon()
        for copy in self._pending:
            copy.end()
        self._pending.clear()
