"""The memory that recorded calls share, and the order of work on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moepass.runtime.system.tensor_memory import as_extent, offset_bytes, tensor_in_storage
from moepass.runtime.torch_private import storage_at


class GraphMemory:
    """A memory pool for all recorded calls of one graph, and staging buffers for inputs whose address changes.

    Only one run at a time may record or replay: see `SegmentGraphs`. Then all work on this memory is ordered by one
    stream, or by events between two streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        # By the index of the input among the staged inputs of its call, and its size in bytes.
        self._staging: dict[tuple[int, int], torch.Tensor] = {}
        self._last_run: Any = None

    @property
    def staged_bytes(self) -> int:
        """The size of all staging buffers in bytes."""
        return sum(nbytes for _, nbytes in self._staging)

    def begin_run(self) -> None:
        """Make the current stream wait for the end of the last run, which may have used another stream."""
        if self._last_run is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last_run)

    def end_run(self) -> None:
        """Record the end of the run on the current stream."""
        self._last_run = torch.cuda.Event()
        self._last_run.record(torch.cuda.current_stream(self._device))

    def record(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """Return a CUDA graph of the device work that `work` issues, without executing it, and its result.

        Raises any error of CUDA if the work cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # The ring may copy and other threads may compute at the same time: only this thread must not synchronise.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        return graph, result

    def staging(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return a buffer with the layout of `value` for staged input `index` of a call. All calls share it."""
        extent = as_extent(value)
        key = (index, extent.nbytes)
        with torch.inference_mode(False):  # inference tensors could not be written outside that mode
            if key not in self._staging:
                self._staging[key] = torch.empty(extent.nbytes, dtype=torch.uint8, device=value.device)
            flat = self._staging[key].view(value.dtype)
            return flat.as_strided(value.shape, value.stride())


def without_ownership(value: torch.Tensor) -> torch.Tensor:
    """Return `value` as a tensor that does not keep its memory alive."""
    storage = value.untyped_storage()
    with torch.inference_mode(False):
        borrowed = storage_at(storage.data_ptr(), storage.nbytes(), value.device)
        return tensor_in_storage(borrowed, value.dtype, offset_bytes(value), value.shape, value.stride())
