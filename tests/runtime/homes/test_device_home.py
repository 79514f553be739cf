"""Home `peer` with shards in device memory, emulated with host memory because there is no GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed import distributed_c10d as c10d

import moepass
from moepass.models.homes import PULL
from moepass.runtime.homes.device_home import DevicePacker, SymmetricMemory
from moepass.runtime.homes.options.packers import make_packer
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.offload import offload
from moepass.runtime.offload.offload import expert_parameters, find_expert_modules
from moepass.runtime.ranks.rendezvous import PeerError
from moepass.runtime.system.shared_memory import SharedMemoryError
from moepass.runtime.transfer.home_protocol import Transport
from moepass.runtime.transfer.sources import read_range
from tests.helpers.graphs.backend_helper import Stack, tokens
from tests.helpers.graphs.error_fields import refused
from tests.helpers.processes.rank_memory import Segments
from tests.helpers.processes.ranks import run_ranks


class _Unreadable(Segments):
    def exchange(self) -> tuple[list[torch.Tensor], object]:
        raise SharedMemoryError("no peer access")


class _OnGpu(Segments):
    device_type = "cuda"


def _offload(model: torch.nn.Module, memory: Segments) -> moepass.OffloadReport:
    def packer(*args: Any) -> DevicePacker:
        return DevicePacker(PeerGroup.of(None, timeout_s=50), Transport(PULL), lambda: memory)

    with mock.patch.object(offload, "make_packer", packer):
        return moepass.offload_experts(model, home="peer")


def _stack() -> Stack:
    torch.manual_seed(0)
    return Stack("dense_bmm", depth=3, bias=True)


def _stays_exact() -> int:
    model = _stack()
    with torch.no_grad():
        expected = model(tokens())
        report = _offload(model, Segments())
        assert torch.equal(model(tokens()), expected)
        compiled: Callable[..., Any] = torch.compile(
            model, backend="asyncep", options={"lower": "eager", "debug": True}
        )
        for _ in range(3):
            assert torch.equal(compiled(tokens()), expected)
    statistics = report.store.ring().statistics
    assert 0 < statistics.link_bytes < statistics.copied_bytes or dist.get_world_size() == 1
    return report.home_bytes


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_model_stays_exact(ranks: int) -> None:
    """Four experts on three ranks give shards of different sizes, in memory of one size."""
    assert len(set(run_ranks(ranks, _stays_exact))) == (2 if ranks == 3 else 1)


def _cannot_read() -> None:
    model = _stack()
    with torch.no_grad():
        expected = model(tokens())
        # A rank that still waits for the other one's record gets the other one's failure.
        with pytest.raises((SharedMemoryError, PeerError), match="no peer access"):
            _offload(model, _Unreadable())
        assert torch.equal(model(tokens()), expected)
        assert moepass.offload_experts(model).home == "host"


def test_memory_that_cannot_be_read_leaves_the_model_as_it_was() -> None:
    run_ranks(2, _cannot_read)


def _sources_are_all_that_is_kept() -> None:
    model = _stack()
    (first, *_) = find_expert_modules(model).values()
    expected = [parameter.detach().clone() for parameter in expert_parameters(first).values()]
    report = _offload(model, Segments())
    bank = report.store.banks[0].spec
    sources = report.store.home.sources(bank, ())
    del model, report
    gc.collect()
    complete = read_range(sources, 0, bank.format.slot_bytes, torch.device("cpu"))
    for tensor, value in zip(bank.tensors, expected, strict=True):
        assert torch.equal(tensor.view(complete), value)


def test_later_reads_keep_the_memory_of_other_ranks() -> None:
    run_ranks(2, _sources_are_all_that_is_kept)


def _one_is_on_a_gpu() -> str:
    with pytest.raises(PeerError) as caught:
        _offload(_stack(), _OnGpu() if dist.get_rank() == 1 else Segments())
    return str(caught.value)


def test_ranks_on_different_devices_are_one_error() -> None:
    (text,) = set(run_ranks(2, _one_is_on_a_gpu))
    assert text.startswith("ranks disagree on the kind of device: cpu on rank 0, cuda on rank 1")


def _exchange(
    memory: SymmetricMemory, rendezvous: Callable[..., Any], backend: str = "CUDA"
) -> tuple[torch.Tensor, list[torch.Tensor], object]:
    """Return the allocated memory and the result of its exchange, in which torch calls `rendezvous`."""
    allocator = mock.Mock()
    allocator.get_backend.return_value = backend
    allocator.empty_strided_p2p.return_value = torch.full((4,), 7, dtype=torch.uint8)
    with (
        mock.patch("torch._C._distributed_c10d._SymmetricMemory", allocator),
        mock.patch.object(symmetric_memory, "rendezvous", rendezvous),
    ):
        allocated = memory.allocate(4)
        return allocated, *memory.exchange()


def _memory(timeout_s: float) -> SymmetricMemory:
    return SymmetricMemory(c10d._get_default_group(), torch.device("cuda", 0), timeout_s)


class _Handle:
    """A stand-in for torch's handle: its tensors of other ranks do not keep their memory mapped."""

    def get_remote_tensor(self, rank: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, rank, dtype=dtype)


def _keeps_others() -> None:
    memory = _memory(timeout_s=50)
    allocated, tensors, keeps = _exchange(memory, lambda memory, group: _Handle())
    rank = dist.get_rank()
    assert tensors[rank] is allocated
    assert tensors[1 - rank].tolist() == [1 - rank] * 4
    assert isinstance(keeps, _Handle)
    # The memory has no reference to the group, which can be freed.
    assert c10d._get_default_group() not in vars(memory).values()


def test_memory_of_other_ranks_comes_with_an_object_that_keeps_it() -> None:
    run_ranks(2, _keeps_others)


def _exchanges() -> None:
    store = c10d._get_process_group_store(c10d._get_default_group())
    before = store.timeout
    seen: list[str | None] = []

    def wait_in_vain(memory: torch.Tensor, group: object) -> None:
        seen.append(os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST"))
        store.get("what no rank says")

    def refuse(memory: torch.Tensor, group: object) -> None:
        raise RuntimeError("detected allocations from overlapping devices from different ranks")

    with pytest.raises(PeerError, match="a rank did not respond when GPUs shared their memory"):
        _exchange(_memory(timeout_s=0.5), wait_in_vain)
    assert seen == ["1"]
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" not in os.environ
    with pytest.raises(SharedMemoryError, match=r"overlapping devices .*each rank needs its own GPU"):
        _exchange(_memory(timeout_s=0.5), refuse)
    assert store.timeout == before
    with refused(SharedMemoryError, name="TORCH_SYMMMEM", value="NVSHMEM", expected="CUDA"):
        _exchange(_memory(timeout_s=0.5), refuse, backend="NVSHMEM")


def test_the_exchange_of_gpu_memory_ends_with_an_error_that_says_why() -> None:
    run_ranks(1, _exchanges)


def _chooses() -> str:
    packer = make_packer(moepass.Peer(timeout_s=50), torch.device("cuda", 0))
    assert packer.home.transport.name == PULL
    return type(packer).__name__


def test_shards_lie_on_the_gpu_where_a_gpu_computes() -> None:
    assert run_ranks(1, _chooses) == ["DevicePacker"]
