"""Copies that a thread issues to a CUDA stream: from files, and wherever ranks have to meet or to look first."""

from __future__ import annotations

import torch

from moepass.runtime.transfer.copier import Decoder, RingStatistics, Wait
from moepass.runtime.transfer.copy_lane import CopyLane, IssuedCopy, IssuedDecode
from moepass.runtime.transfer.learned_order import Fetch
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.recording import current_recording
from moepass.runtime.transfer.stream_copier import StreamCopier
from moepass.runtime.transfer.transports import Transport


class IssuingCopier(StreamCopier):
    """The host waits until the thread has issued a copy, and no longer: the compute stream waits for the rest."""

    def __init__(self, device: torch.device, transport: Transport, link: Link) -> None:
        super().__init__(device)
        self._transport = transport
        self._thread = transport.copy_thread(link)
        self._lane = CopyLane(self._stream)
        self._pending: list[IssuedCopy] = []

    def submit(self, fetch: Fetch, target: torch.Tensor, after: object) -> IssuedCopy:
        return self._start(self._transport.issued_copy(fetch.bank, fetch.sources, target, self._lane, after))

    def decode(self, copied: object, decoder: Decoder, link: torch.Tensor, slot: torch.Tensor) -> IssuedCopy:
        assert isinstance(copied, IssuedCopy)
        self._pending.remove(copied)
        return self._start(IssuedDecode(copied, decoder, link, slot))

    def _start(self, copy: IssuedCopy) -> IssuedCopy:
        self._thread.submit(copy)
        self._pending.append(copy)
        recording = current_recording()
        if recording is not None:
            recording.add_copy(copy, is_emulated=False)
        return copy

    def wait(self, filled: object, statistics: RingStatistics) -> Wait:
        assert isinstance(filled, IssuedCopy)
        wait = super().wait(filled, statistics)
        statistics.staged_bytes += filled.staged_bytes
        statistics.unstaged_bytes += filled.unstaged_bytes
        self._pending.remove(filled)
        return wait

    def abandon(self, filled: object) -> None:
        assert isinstance(filled, IssuedCopy)
        filled.abandon()
        self._pending.remove(filled)

    def quiesce(self) -> None:
        for copy in self._pending:
            copy.abandon()
        for copy in self._pending:
            copy.finished.wait()
        self._pending.clear()
        super().quiesce()

    def close(self) -> None:
        # This may be the copy thread, which must not wait for itself. What it still issues keeps the memory it uses.
        for copy in self._pending:
            copy.abandon()
        super().quiesce()
