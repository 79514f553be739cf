"""One call of a segment as a CUDA graph.

A recorded graph reads and writes the addresses that it was recorded with. So each input of the call is

    fixed    at the same address in every run: parameters, slots, outputs of calls that were recorded before it.
             A replay asks for that address
    staged   anything else: its bytes are copied to a staging buffer right before the replay

and each output

    a view of an input    made anew of the input that came, whose memory the caller keeps
    memory of the pool    valid until later recorded calls use that memory again: see `SegmentGraphs`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from moepass.runtime.cuda_graphs.graph_memory import GraphMemory, without_ownership
from moepass.runtime.system.tensor_memory import as_extent, offset_bytes, tensor_in_storage


@dataclasses.dataclass(frozen=True)
class ExpectedTensor:
    """What an input must be. `address` is None where it is staged."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    strides: tuple[int, ...]
    address: int | None

    @staticmethod
    def of(value: torch.Tensor, is_fixed: bool) -> ExpectedTensor:
        address = value.data_ptr() if is_fixed else None
        return ExpectedTensor(value.dtype, value.device, value.shape, value.stride(), address)

    def is_like(self, value: object) -> bool:
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
    """An output in the memory of input `place`, from `offset_bytes` behind that input's first element."""

    place: int
    dtype: torch.dtype
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, value: torch.Tensor) -> torch.Tensor:
        start = offset_bytes(value) + self.offset_bytes
        return tensor_in_storage(value.untyped_storage(), self.dtype, start, self.shape, self.strides)


class RecordedCall:
    """A CUDA graph of a call, and what its inputs must be."""

    def __init__(
        self,
        graph: Any,
        expected: Sequence[ExpectedTensor | object],
        staged: dict[int, torch.Tensor],
        outputs: Sequence[object],
    ) -> None:
        self._graph = graph
        self._expected = tuple(expected)
        self._staged = [(place, as_extent(buffer)) for place, buffer in staged.items()]
        self._outputs = tuple(outputs)

    def replay(self, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
        """The outputs for `inputs`; None where it was not recorded for these, and nothing has happened."""
        leaves = list(_leaves(inputs))
        if len(leaves) != len(self._expected) or not all(map(_is_like, self._expected, leaves)):
            return None
        for place, buffer in self._staged:
            buffer.copy_(as_extent(leaves[place]))
        self._graph.replay()
        return tuple(made.of(leaves[made.place]) if isinstance(made, ViewOfInput) else made for made in self._outputs)


def _is_like(expected: object, value: object) -> bool:
    if isinstance(expected, ExpectedTensor):
        return expected.is_like(value)
    return type(expected) is type(value) and expected == value


class NotRecordableError(Exception):
    """CUDA did not record a call that runs. The cause says why."""


def record_call(
    memory: GraphMemory,
    segment: Callable[..., Any],
    inputs: Sequence[Any],
    is_fixed: Callable[[torch.Tensor], bool],
) -> tuple[RecordedCall, tuple[Any, ...]]:
    """Record `segment(*inputs)` and run it; the outputs keep their memory in the pool.

    `is_fixed` says of a tensor that it comes at the same address whenever the call is replayed. Raises what the segment
    raises, and NotRecordableError.
    """
    leaves = list(_leaves(inputs))
    staged: dict[int, torch.Tensor] = {}
    expected: list[object] = []
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            expected.append(leaf)
            continue
        expected.append(ExpectedTensor.of(leaf, is_fixed(leaf)))
        if not is_fixed(leaf):
            staged[place] = memory.staging(len(staged), leaf)
    given = [staged.get(place, leaf) for place, leaf in enumerate(leaves)]
    arguments = _like(inputs, iter(given))
    for place, buffer in staged.items():
        as_extent(buffer).copy_(as_extent(leaves[place]))
    # Kernels are compiled and loaded at their first call with such addresses, which cannot be while recording.
    segment(*arguments)
    try:
        graph, outputs = memory.record(lambda: segment(*arguments))
    except Exception as error:
        raise NotRecordableError(f"{type(error).__name__}: {error}") from error
    graph.replay()
    made = [_described(output, given) for output in outputs]
    call = RecordedCall(graph, expected, staged, made)
    results = zip(made, outputs, strict=True)
    return call, tuple(one.of(leaves[one.place]) if isinstance(one, ViewOfInput) else out for one, out in results)


def _described(output: object, given: Sequence[object]) -> object:
    """What a replay returns for `output`, made of `given`."""
    if not isinstance(output, torch.Tensor):
        return output
    address = output.untyped_storage().data_ptr()
    for place, value in enumerate(given):
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == address:
            offset = offset_bytes(output) - offset_bytes(value)
            return ViewOfInput(place, output.dtype, offset, tuple(output.shape), output.stride())
    return without_ownership(output)


def _leaves(inputs: Sequence[Any]) -> Iterator[Any]:
    """The inputs; of what comes in parts, the parts."""
    for value in inputs:
        if isinstance(value, tuple):
            yield from value
        else:
            yield value


def _like(inputs: Sequence[Any], leaves: Iterator[Any]) -> tuple[Any, ...]:
    """`leaves` as `inputs` come."""
    return tuple(tuple(next(leaves) for _ in value) if isinstance(value, tuple) else next(leaves) for value in inputs)
