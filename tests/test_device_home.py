"""Home `peer` with shards in device memory, where everything but that memory is real: here it is shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from backend_helper import Stack, tokens
from ranks import run_ranks

import moepass
from moepass.runtime import offload
from moepass.runtime.device_home import DevicePacker
from moepass.runtime.peers import PeerGroup
from moepass.runtime.rendezvous import PeerError
from moepass.runtime.shared_memory import SharedMemoryError, SharedSegment, create_segment, open_segment
from moepass.runtime.transports import PULL, Transport


class _Segments:
    """`RankMemory` that every process of this machine can have."""

    def __init__(self) -> None:
        self.opened: list[SharedSegment] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.own = create_segment(nbytes, "test")
        return self.own.map(0, nbytes)

    def exchange(self) -> list[torch.Tensor]:
        addresses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(addresses, self.own.address())
        self.opened = [open_segment(address) for address in addresses]
        assert len({segment.nbytes for segment in self.opened}) == 1, "symmetric memory has one size on all ranks"
        return [segment.map(0, segment.nbytes) for segment in self.opened]


class _Unreadable(_Segments):
    def exchange(self) -> list[torch.Tensor]:
        raise SharedMemoryError("no peer access")


def _offload(model: torch.nn.Module, memory: _Segments, timeout_s: float = 50) -> moepass.OffloadReport:
    def packer(*args: Any) -> DevicePacker:
        return DevicePacker(PeerGroup.of(None, timeout_s), Transport(PULL), memory)

    with mock.patch.object(offload, "_packer", packer):
        return moepass.offload_experts(model, home="peer", timeout_s=timeout_s)


def _stack(depth: int = 3) -> Stack:
    torch.manual_seed(0)
    return Stack("dense_bmm", depth=depth, bias=True)


def _stays_exact() -> int:
    model = _stack()
    with torch.no_grad():
        expected = model(tokens())
        report = _offload(model, _Segments())
        assert torch.equal(model(tokens()), expected)
        compiled: Callable[..., Any] = torch.compile(
            model, backend="asyncep", options={"lower": "eager", "debug": True}
        )
        for _ in range(3):
            assert torch.equal(compiled(tokens()), expected)
    statistics = report.store.ring().statistics
    assert 0 < statistics.link_bytes < statistics.copied_bytes or dist.get_world_size() == 1
    return report.home_bytes


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_model_stays_exact(ranks: int) -> None:
    """Four experts on three ranks: parts of different sizes, in memory of one size."""
    assert len(set(run_ranks(ranks, _stays_exact))) == (2 if ranks == 3 else 1)


def _one_cannot_read() -> str:
    memory = _Unreadable() if dist.get_rank() == 1 else _Segments()
    # The others do not come to an exchange in which one is missing, as they would not with a GPU's.
    memory.exchange = memory.exchange if dist.get_rank() == 1 else lambda: [memory.own.map(0, memory.own.nbytes)] * 2
    with pytest.raises((PeerError, SharedMemoryError)) as caught:
        _offload(_stack(), memory)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_gpu_that_cannot_be_read_is_an_error_on_all_ranks() -> None:
    other, own = run_ranks(2, _one_cannot_read)
    assert own == "SharedMemoryError: no peer access"
    assert other.startswith("PeerError: ")
    assert "no peer access" in other
