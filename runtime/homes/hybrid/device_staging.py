"""Staging buffers in the memory of GPUs: the host writes and reads words on boards, streams copy the bytes.

A process cannot wait for an event of another process. So a word contains only what the host of its rank has seen
completed: it changes before a copy into the buffer is issued, and again once the event behind that copy has happened.
A reader reads the word before it issues a copy from the buffer, and again once the event behind that copy has happened.
If the word is the same both times, no byte was overwritten in between.

Two ranks on one H100 have run it; its speed is unmeasured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moepass.runtime.homes.hybrid.stager import StagingBuffers
from moepass.runtime.homes.hybrid.staging_board import StagingBoard
from moepass.runtime.transfer import slicing
from moepass.runtime.transfer.recording import recorded_event
from moepass.runtime.transfer.sources import MemorySource, Source

# The link is idle while the thread waits for the end of a slice, so slices are large.
_SLICES_AT_ONCE = 4


class DeviceStagingBuffers(StagingBuffers):
    """Staging buffers in device memory.

    Args:
        board: the board that describes them.
        memories: the buffers, flat uint8.
        stream: the stream on which this rank fills its buffers; None for the buffers of another rank.
        keeps: an object that must live as long as the buffers are read.
    """

    def __init__(
        self, board: StagingBoard, memories: Sequence[torch.Tensor], stream: torch.cuda.Stream | None, keeps: object
    ) -> None:
        super().__init__(board, memories, _SLICES_AT_ONCE * slicing.SLICE_BYTES, keeps)
        self._stream = stream

    def write(self, buffer: int, shard: Source, offset_bytes: int, nbytes: int) -> None:
        """Copy bytes of `shard` into a buffer of this rank, and wait for the copy."""
        assert self._stream is not None, "each rank fills its own buffers"
        assert isinstance(shard, MemorySource), "shards rest in host memory"
        with torch.cuda.stream(self._stream):
            target = self.memories[buffer].narrow(0, offset_bytes, nbytes)
            target.copy_(shard.memory.narrow(0, offset_bytes, nbytes), non_blocking=True)
            done = recorded_event(self._stream)
        done.synchronize()
