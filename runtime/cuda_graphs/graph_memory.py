"""The memory that recorded calls share, and how work on it is ordered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moepass.runtime.system.tensor_memory import as_extent, offset_bytes, tensor_in_storage
from moepass.runtime.torch_private import storage_at


class GraphMemory:
    """One memory pool for all recorded calls of a graph, and staging buffers for inputs that come in other memory.

    Whoever replays must hold the only run that does so: see `SegmentGraphs`. Then all work on this memory is in the
    order of one stream, or of events between two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        # By the place of the input among the staged ones of its call, and its bytes.
        self._staging: dict[tuple[int, int], torch.Tensor] = {}
        self._last_run: Any = None

    @property
    def staged_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._staging)

    def begin_run(self) -> None:
        """What follows on the current stream comes after the run before, whatever stream that was on."""
        if self._last_run is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last_run)

    def end_run(self) -> None:
        self._last_run = torch.cuda.Event()
        self._last_run.record(torch.cuda.current_stream(self._device))

    def record(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """A CUDA graph of what `work` does on the device, which has not been done yet; and what `work` returned.

        Raises what CUDA raises where work cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # The ring may copy meanwhile, and other threads may compute: errors of this thread alone count.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        return graph, result

    def staging(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """Memory of the layout of `value` for the staged input `number` of a call. All calls share it."""
        extent = as_extent(value)
        key = (number, extent.nbytes)
        with torch.inference_mode(False):  # inference tensors could not be written outside that mode
            if key not in self._staging:
                self._staging[key] = torch.empty(extent.nbytes, dtype=torch.uint8, device=value.device)
            flat = self._staging[key].view(value.dtype)
            return flat.as_strided(value.shape, value.stride())


def without_ownership(value: torch.Tensor) -> torch.Tensor:
    """`value` as a tensor that does not keep its memory."""
    storage = value.untyped_storage()
    with torch.inference_mode(False):
        borrowed = storage_at(storage.data_ptr(), storage.nbytes(), value.device)
        return tensor_in_storage(borrowed, value.dtype, offset_bytes(value), value.shape, value.stride())
