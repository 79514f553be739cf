"""One call of a segment as a CUDA graph, in memory that all recorded calls share.

A recorded graph reads and writes the addresses that it was recorded with. So each input of the call is

    fixed    at the same address in every run: parameters, slots, outputs of calls that were recorded before it.
             A replay checks the address
    staged   any other tensor: its bytes are copied to a staging buffer right before the replay

and each output

    a view of an input    a replay returns a view of its input, which the caller keeps alive
    memory of the pool    valid until later recorded calls use that memory again: see `SegmentGraphs`
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from moepass.runtime.system.garbage import no_garbage_collection
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

    def begin_run(self) -> None:
        """Make the current stream wait for the end of the last run, which may have used another stream."""
        if self._last_run is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last_run)

    def end_run(self) -> None:
        """Record the end of the run on the current stream."""
        self._last_run = torch.cuda.Event()
        self._last_run.record(torch.cuda.current_stream(self._device))

    def record(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """Return a CUDA graph of what `work` issues, without executing it, and the result. Raises errors of CUDA."""
        graph = torch.cuda.CUDAGraph()
        with no_garbage_collection(), torch.cuda.stream(self._stream):
            # The ring may copy and other threads may compute at the same time: only this thread must not synchronise.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # CUDA reports the failed recording, whose error is raised
                    graph.capture_end()
                raise
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


@dataclasses.dataclass(frozen=True)
class ExpectedTensor:
    """The properties that an input must have for a replay; a staged input has no `address`."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    strides: tuple[int, ...]
    address: int | None

    @staticmethod
    def of(value: torch.Tensor, is_fixed: bool) -> ExpectedTensor:
        """Return the properties of `value`."""
        address = value.data_ptr() if is_fixed else None
        return ExpectedTensor(value.dtype, value.device, value.shape, value.stride(), address)

    def is_like(self, value: object) -> bool:
        """Return whether `value` is a tensor with these properties."""
        return (
            isinstance(value, torch.Tensor)
            and (self.address is None or value.data_ptr() == self.address)
            and value.shape == self.shape
            and value.stride() == self.strides
            and value.dtype == self.dtype
            and value.device == self.device
        )


@dataclasses.dataclass(frozen=True)
class ViewOfInput:
    """An output that shares the memory of input `index`, from `offset_bytes` behind its first element."""

    index: int
    dtype: torch.dtype
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the view of `value`, the new input."""
        start = offset_bytes(value) + self.offset_bytes
        return tensor_in_storage(value.untyped_storage(), self.dtype, start, self.shape, self.strides)


class RecordedCall:
    """A CUDA graph of a call, with the properties that its inputs must have."""

    def __init__(
        self,
        graph: Any,
        expected: Sequence[ExpectedTensor | object],
        staged: dict[int, torch.Tensor],
        outputs: Sequence[object],
    ) -> None:
        self._graph = graph
        self._expected = tuple(expected)
        self._staged = [(index, as_extent(buffer)) for index, buffer in staged.items()]
        self._outputs = tuple(outputs)

    def replay(self, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return the outputs for `inputs`; None, without doing anything, if the call was recorded for other inputs."""
        leaves = list(_leaves(inputs))
        if len(leaves) != len(self._expected) or not all(map(_is_like, self._expected, leaves)):
            return None
        for index, buffer in self._staged:
            buffer.copy_(as_extent(leaves[index]))
        self._graph.replay()
        return _actual(self._outputs, self._outputs, leaves)


def _is_like(expected: object, value: object) -> bool:
    if isinstance(expected, ExpectedTensor):
        return expected.is_like(value)
    return type(expected) is type(value) and expected == value


class NotRecordableError(Exception):
    """CUDA cannot record a call that runs without recording. The cause is the error of CUDA."""


def record_call(
    memory: GraphMemory,
    segment: Callable[..., Any],
    inputs: Sequence[Any],
    is_fixed: Callable[[torch.Tensor], bool],
) -> tuple[RecordedCall, tuple[Any, ...]]:
    """Record `segment(*inputs)` and run it; the outputs are in the memory of the pool.

    `is_fixed` returns whether a tensor has the same address whenever the call is replayed. Raises NotRecordableError if
    CUDA cannot record the call, and any error of the segment.
    """
    leaves = list(_leaves(inputs))
    staged: dict[int, torch.Tensor] = {}
    expected: list[object] = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            expected.append(leaf)
            continue
        expected.append(ExpectedTensor.of(leaf, is_fixed(leaf)))
        if not is_fixed(leaf):
            staged[index] = memory.staging(len(staged), leaf)
    recorded_leaves = [staged.get(index, leaf) for index, leaf in enumerate(leaves)]
    arguments = _like(inputs, iter(recorded_leaves))
    for index, buffer in staged.items():
        as_extent(buffer).copy_(as_extent(leaves[index]))
    # The first call with these addresses compiles and loads kernels, which is impossible during a recording.
    segment(*arguments)
    try:
        graph, outputs = memory.record(lambda: segment(*arguments))
    except Exception as error:
        raise NotRecordableError(f"{type(error).__name__}: {error}") from error
    graph.replay()
    descriptions = [_described(output, recorded_leaves) for output in outputs]
    call = RecordedCall(graph, expected, staged, descriptions)
    return call, _actual(descriptions, outputs, leaves)


def _actual(descriptions: Sequence[object], outputs: Sequence[Any], leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return `outputs`; those that `descriptions` describe as views become views of the actual inputs `leaves`."""
    return tuple(
        description.of(leaves[description.index]) if isinstance(description, ViewOfInput) else output
        for description, output in zip(descriptions, outputs, strict=True)
    )


def _described(output: object, arguments: Sequence[object]) -> object:
    """Return the output that a replay returns in place of `output`, which was computed from `arguments`."""
    if not isinstance(output, torch.Tensor):
        return output
    address = output.untyped_storage().data_ptr()
    for index, value in enumerate(arguments):
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == address:
            offset = offset_bytes(output) - offset_bytes(value)
            return ViewOfInput(index, output.dtype, offset, tuple(output.shape), output.stride())
    return without_ownership(output)


def _leaves(inputs: Sequence[Any]) -> Iterator[Any]:
    """Return the inputs, and the elements of inputs that are tuples."""
    return itertools.chain.from_iterable(value if isinstance(value, tuple) else (value,) for value in inputs)


def _like(inputs: Sequence[Any], leaves: Iterator[Any]) -> tuple[Any, ...]:
    """Return `leaves` in the nesting of `inputs`."""
    return tuple(tuple(next(leaves) for _ in value) if isinstance(value, tuple) else next(leaves) for value in inputs)
