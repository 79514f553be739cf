"""CUDA graphs without a GPU, on the emulated streams of `fake_cuda`: work is recorded, and repeated on the same memory.

with FakeCuda(random).installed(issues_operators=False) as cuda, FakeGraphs(cuda).installed() as graphs:
    every torch operator goes to the current stream, and its results are poison until it has run
    torch.cuda.CUDAGraph records operators on one pool of memory; graphs.recorded counts them

As on a GPU, a graph knows addresses: those of its inputs, and those of its results in the pool. The pool reuses memory
once it contains no tensor, and fills it with poison when it is freed, during replays too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from moepass.passes.ir.slot_operations import SLOT_OPS
from moepass.runtime.cuda_graphs.recorded_call import without_ownership
from moepass.runtime.torch_private import storage_at
from tests.helpers.processes.fake_cuda import FakeCuda

aten = torch.ops.aten
POISON = 0xFF
_CPU = torch.device("cpu")
# Operators on tensors that do not depend on their values.
_IMMEDIATE = {aten.set_.source_Storage_storage_offset, aten.set_.source_Storage}
_ALLOCATIONS = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
_ALLOCATIONS |= {aten.new_empty_strided.default}


@dataclasses.dataclass
class Block:
    """Memory of the pool; `user` is the storage in it."""

    memory: torch.Tensor
    user: StorageWeakRef | None = None


class Pool:
    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def take(self, nbytes: int) -> torch.UntypedStorage:
        reused = next((block for block in self.blocks if block.user is None and len(block.memory) == nbytes), None)
        if reused is None:
            reused = Block(torch.full((nbytes,), POISON, dtype=torch.uint8))
            self.blocks.append(reused)
        storage = storage_at(reused.memory.data_ptr(), nbytes, _CPU)
        reused.user = StorageWeakRef(storage)
        return storage

    def free(self) -> list[torch.Tensor]:
        """Return the memory that contains no tensor any more, and mark it as free."""
        gone = [block for block in self.blocks if block.user is not None and block.user.expired()]
        for block in gone:
            block.user = None
        return [block.memory for block in gone]


class CaptureError(RuntimeError):
    """The error of CUDA for work that cannot be recorded."""


class FakeGraphs:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.pools: dict[object, Pool] = {}
        self.recorded = self.replayed = 0
        self.capturing: FakeGraph | None = None
        self._is_working = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[FakeGraphs]:
        graphs, issue, run_one = self, self.cuda.issue, self.cuda.run_one

        class Graph(FakeGraph):
            def __init__(self) -> None:
                super().__init__(graphs)

        def issue_or_record(function: Callable[[], object]) -> None:
            if self.capturing is None:
                issue(function)
            else:
                self.capturing.work.append(function)

        def run_one_by_itself() -> None:
            before, self._is_working = self._is_working, True
            try:
                run_one()
            finally:
                self._is_working = before

        ours = {
            "CUDAGraph": Graph,
            "graph_pool_handle": object,
            "is_current_stream_capturing": lambda: self.capturing is not None,
        }
        changed = {"issue": issue_or_record, "run_one": run_one_by_itself}
        with mock.patch.multiple(torch.cuda, **ours), mock.patch.multiple(self.cuda, **changed), _OnStream(self):
            yield self

    @property
    def is_working(self) -> bool:
        """Return True while a stream runs its work, so that operators run immediately."""
        return self._is_working

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Issue an operator to the current stream."""
        if function in _IMMEDIATE or function in SLOT_OPS or _is_view(function):
            return function(*args, **kwargs)
        if _needs_values(function, args):
            if self.capturing is not None:
                raise CaptureError(f"{function}: operation not permitted when stream is capturing")
            torch.cuda.current_stream().synchronize()
            return function(*args, **kwargs)
        if function._schema.is_mutable:
            self._issue(function, args, kwargs, None)
            return args[0]
        on_meta = tree_map_only(torch.Tensor, lambda value: value.to("meta"), (args, kwargs))
        described = function(*on_meta[0], **{**on_meta[1], **({"device": "meta"} if "device" in kwargs else {})})
        result = tree_map_only(torch.Tensor, self._allocate, described)
        if function not in _ALLOCATIONS:
            self._issue(function, args, kwargs, result)
        return result

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        extent = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
        nbytes = 0 if like.numel() == 0 else extent * like.itemsize
        if self.capturing is not None:
            storage = self.capturing.take(nbytes)
        else:
            storage = torch.full((nbytes,), POISON, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())

    def _issue(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self.capturing is not None:  # a graph keeps no memory
            args, kwargs, result = tree_map_only(torch.Tensor, without_ownership, (args, kwargs, result))

        def work() -> None:
            results = function(*args, **kwargs)
            targets = result if isinstance(result, (tuple, list)) else (result,)
            for target, value in zip(
                targets, results if isinstance(results, (tuple, list)) else (results,), strict=True
            ):
                if target is not None:
                    target.copy_(value)

        self.cuda.issue(work)


class FakeGraph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, graphs: FakeGraphs) -> None:
        self._graphs = graphs
        self.work: list[Callable[[], object]] = []
        self._pool: Pool | None = None

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert self._graphs.capturing is None
        self._pool = self._graphs.pools.setdefault(pool, Pool())
        self._graphs.capturing = self
        self._poison_what_is_free()

    def capture_end(self) -> None:
        self._poison_what_is_free()
        self._graphs.capturing = None
        self._graphs.recorded += 1

    def take(self, nbytes: int) -> torch.UntypedStorage:
        assert self._pool is not None
        self._poison_what_is_free()
        return self._pool.take(nbytes)

    def _poison_what_is_free(self) -> None:
        assert self._pool is not None
        for memory in self._pool.free():
            self.work.append(lambda memory=memory: memory.fill_(POISON))

    def replay(self) -> None:
        self._graphs.replayed += 1
        for work in self.work:
            self._graphs.cuda.issue(work)


def _is_view(function: Any) -> bool:
    returns = function._schema.returns
    return not function._schema.is_mutable and any(value.alias_info is not None for value in returns)


def _needs_values(function: Any, args: Any) -> bool:
    if function is aten.index.Tensor:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return torch.Tag.data_dependent_output in function.tags or torch.Tag.dynamic_output_shape in function.tags


class _OnStream(TorchDispatchMode):
    def __init__(self, graphs: FakeGraphs) -> None:
        super().__init__()
        self._graphs = graphs

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._graphs.is_working:
            return function(*args, **(kwargs or {}))
        return self._graphs.run(function, args, kwargs or {})
