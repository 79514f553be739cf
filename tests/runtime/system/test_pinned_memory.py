"""Host memory is pinned with its exact size, and unpinned when it is freed, by a stand-in for the CUDA runtime."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from moepass.runtime.homes.options.home_options import Host
from moepass.runtime.homes.options.packers import make_packer
from moepass.runtime.system.pinned_memory import pin_shard, pinned_memory
from moepass.runtime.system.shared_memory import SharedMemoryError
from tests.helpers.graphs.error_fields import refused

GPU = torch.device("cuda", 3)


class Runtime:
    """A stand-in for the CUDA runtime."""

    def __init__(self) -> None:
        self.result = 0
        self.registered: dict[int, tuple[int, int]] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if self.result == 0:
            self.registered[address] = (nbytes, flags)
        return self.result

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.registered[address]


class Owner:
    pass


@pytest.fixture
def synchronize() -> Iterator[mock.Mock]:
    with mock.patch.object(torch.cuda, "synchronize") as mocked:
        yield mocked


@pytest.fixture
def runtime(synchronize: mock.Mock) -> Iterator[Runtime]:
    runtime = Runtime()
    with mock.patch.object(torch.cuda, "cudart", return_value=runtime):
        yield runtime


def test_shards_are_pinned_as_long_as_their_owner_lives(runtime: Runtime, synchronize: mock.Mock) -> None:
    owner, shard = Owner(), torch.zeros(8, dtype=torch.uint8)
    pin_shard(owner, shard, GPU, is_own=True)
    pin_shard(owner, shard[4:], GPU, is_own=False)
    pin_shard(owner, shard[:0], GPU, is_own=False)
    assert runtime.registered == {shard.data_ptr(): (8, 1), shard.data_ptr() + 4: (4, 9)}
    del owner
    assert runtime.registered == {}
    assert synchronize.call_args_list == [mock.call(GPU)] * 2


def test_memory_is_pinned_as_long_as_a_tensor_reads_it(runtime: Runtime, synchronize: mock.Mock) -> None:
    with torch.inference_mode():
        memory = pinned_memory(5000, GPU)
    assert not memory.is_inference()
    assert not memory._is_view()
    assert runtime.registered == {memory.data_ptr(): (5000, 1)}
    part = memory[100:200].fill_(7)
    del memory
    assert len(runtime.registered) == 1
    assert part.eq(7).all()
    del part
    assert runtime.registered == {}
    synchronize.assert_called_once_with(GPU)
    assert pinned_memory(0, GPU).numel() == 0
    assert runtime.registered == {}


def test_home_host_pins_the_bytes_of_its_banks(runtime: Runtime) -> None:
    tensors = {"up": torch.randn(3, 4, 5), "down": torch.randn(3, 5, 4)}
    bank = make_packer(Host(), GPU).pack(0, "layers.0", tensors)
    assert runtime.registered == {bank.shard.data_ptr(): (bank.spec.format.home_bytes, 1)}
    assert torch.equal(bank.shard[:240].view(torch.float32).view(3, 4, 5), tensors["up"])
    del bank
    assert runtime.registered == {}


def test_memory_that_cannot_be_pinned_is_an_error(runtime: Runtime) -> None:
    runtime.result = 2
    for pin in (lambda: pinned_memory(8, GPU), lambda: pin_shard(Owner(), torch.zeros(8), GPU, is_own=True)):
        with refused(SharedMemoryError, name="cudaHostRegister", value=2):
            pin()
