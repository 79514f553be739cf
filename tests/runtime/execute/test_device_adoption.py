"""Expert parallelism removed from graphs whose shards are in device memory, which is emulated here."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import moepass
from moepass.runtime.homes import adopted_banks
from moepass.runtime.homes.adopted_banks import AdoptedHome
from moepass.runtime.homes.device_home import DevicePacker
from moepass.runtime.homes.peer_home import PeerPacker
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.ranks.rendezvous import PeerError
from moepass.runtime.system.shared_memory import PAGE_BYTES
from moepass.runtime.transfer.home_protocol import Transport
from tests.helpers.models.moe_stack import build_stack
from tests.helpers.processes.adopted_stacks import SMALL, compile_whole, hidden_rows, ring_of, shard_bytes, stays_exact
from tests.helpers.processes.rank_memory import Seen, Segments
from tests.helpers.processes.ranks import run_ranks


@contextmanager
def _in_device_memory(on_allocation: Callable[[int], object] = lambda nbytes: None) -> Iterator[list[Seen]]:
    """Make meetings put shards into emulated device memory. Returns the memory of each bank."""
    made: list[Seen] = []

    class Memory(Segments):
        def allocate(self, nbytes: int) -> torch.Tensor:
            made.append(self.seen)
            on_allocation(nbytes)
            return super().allocate(nbytes)

    def packer(
        device: torch.device, process_group: Any, group: PeerGroup, transport: Transport, bank_by_bank: bool
    ) -> PeerPacker:
        return DevicePacker(group, transport, Memory, bank_by_bank)

    with mock.patch.object(adopted_banks, "packer_on", packer):
        yield made


def _home() -> AdoptedHome:
    (group,) = dist.distributed_c10d._world.pg_map
    return adopted_banks.adopted_banks(group, torch.device("cpu")).home


def _forms_stay_exact(form: str) -> None:
    with _in_device_memory() as made:
        stays_exact(form, SMALL, [[16, 16], [7, 20], [0, 5]] if form != "all_reduce" else [[16, 16], [5, 5]])
        assert len(made) == SMALL.layers


@pytest.mark.slow
@pytest.mark.parametrize("form", ["all_to_all", "all_gather", "all_reduce"])
def test_ranks_stay_exact(form: str) -> None:
    run_ranks(2, _forms_stay_exact, form)


def _moves_and_goes() -> None:
    model: Any = build_stack(SMALL, "all_to_all")
    before = [parameter.clone() for parameter in model.moe.parameters()]
    with _in_device_memory() as made, torch.no_grad():
        compiled: Any = compile_whole(model)
        for step in range(2):
            hidden = hidden_rows(SMALL, 16, step)
            assert torch.equal(compiled(hidden), build_stack(SMALL)(hidden))
        assert len(made) == SMALL.layers
        assert all(memory.handle is not None and memory.handle() is not None for memory in made)
        experts = [parameter for layer in model.moe for parameter in layer.experts.parameters()]
        for parameter in experts:
            assert any(memory.begin <= parameter.data_ptr() < memory.end for memory in made)
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert all(map(torch.equal, model.moe.parameters(), before))
        assert sum(bank.held_twice_bytes for bank in _home().banks.values()) == 0
        assert shard_bytes(_home()) == sum(parameter.nbytes for parameter in experts)
        ring = weakref.ref(ring_of(_home()))
        del model, compiled, parameter, experts
        gc.collect()
        assert all(memory.handle is not None and memory.handle() is None for memory in made)
        assert shard_bytes(_home()) == 0
        assert ring() is None


@pytest.mark.slow
def test_parameters_lie_in_the_shard_and_go_with_the_model() -> None:
    run_ranks(2, _moves_and_goes)


def _holds_one_bank_twice() -> None:
    config = dataclasses.replace(SMALL, layers=4, width=128)
    model = build_stack(config, "all_to_all")
    experts = [list(layer.experts.parameters()) for layer in model.moe]
    largest = max(sum(parameter.nbytes for parameter in bank) for bank in experts)
    held = [(StorageWeakRef(tensor.untyped_storage()), tensor.nbytes) for bank in experts for tensor in bank]
    bank_bytes = sum(nbytes for _, nbytes in held)
    taken, peaks = 0, []

    def count(nbytes: int) -> None:
        nonlocal taken
        taken += nbytes
        peaks.append(taken + sum(nbytes for storage, nbytes in held if not storage.expired()))

    with _in_device_memory(count), torch.no_grad():
        hidden = hidden_rows(config, 16, 0)
        assert torch.equal(compile_whole(model)(hidden), build_stack(config)(hidden))
    assert taken >= bank_bytes
    assert max(peaks) <= bank_bytes + largest + config.layers * PAGE_BYTES


@pytest.mark.slow
def test_adopting_holds_one_bank_more_than_the_experts_at_most() -> None:
    run_ranks(2, _holds_one_bank_twice)


class _Operators(TorchDispatchMode):
    """Records operators that launch work on a device or wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(str(function))
        return function(*args, **(kwargs or {}))


def _costs_nothing() -> None:
    model, hidden = build_stack(SMALL, "all_to_all"), hidden_rows(SMALL, 16, 0)
    seen: list[_Operators] = []

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with _Operators() as operators:
                seen.append(operators)
                return method(*arguments)

        return call

    with _in_device_memory(), torch.no_grad():
        compiled = compile_whole(model, debug=False)
        expected = compiled(hidden)
        with (
            mock.patch.object(AdoptedHome, "check", watched(AdoptedHome.check)),
            mock.patch.object(AdoptedHome, "sources", watched(AdoptedHome.sources)),
        ):
            assert torch.equal(compiled(hidden), expected)
    assert len(seen) == 1 + SMALL.layers
    assert [operators.called for operators in seen] == [[]] * len(seen)


@pytest.mark.slow
def test_a_run_begins_without_a_kernel_for_each_parameter_and_without_a_host_sync() -> None:
    run_ranks(2, _costs_nothing)


def _is_written_to() -> None:
    model, hidden = build_stack(SMALL, "all_to_all"), hidden_rows(SMALL, 16, 0)
    with _in_device_memory(), torch.no_grad():
        compiled = compile_whole(model)
        expected = compiled(hidden)
        assert torch.equal(compiled(hidden), expected)
        model.moe[1].experts.down_proj.mul_(2)
        for _ in range(2):
            with pytest.raises(moepass.InputError, match="were changed after their first run"):
                compiled(hidden)
        # As the error advises.
        model.load_state_dict(build_stack(SMALL, "all_to_all").state_dict(), assign=True)
        assert torch.equal(compiled(hidden), expected)


@pytest.mark.slow
def test_what_is_written_into_the_parameters_later_is_an_error() -> None:
    run_ranks(2, _is_written_to)


def _is_written_past_the_count() -> None:
    """One rank writes weights as a weight sync does. It raises an error, even if other ranks read old weights."""
    model, hidden = build_stack(SMALL, "all_to_all"), hidden_rows(SMALL, 16, 0)
    with _in_device_memory(), torch.no_grad():
        compiled = compile_whole(model)
        expected = compiled(hidden)
        assert torch.equal(compiled(hidden), expected)
        if dist.get_rank() == 1:
            down = model.moe[1].experts.down_proj
            down.data.copy_(down * 2)
            for _ in range(2):
                with pytest.raises(moepass.InputError, match=r"moe\.1\.experts were changed after their first run"):
                    compiled(hidden)


@pytest.mark.slow
def test_what_is_written_past_torchs_count_is_an_error() -> None:
    run_ranks(2, _is_written_past_the_count)


def _other_rank_fails() -> None:
    """The meeting fails after the parameters have moved: they keep their new memory."""
    model: Any = build_stack(SMALL, "all_to_all")
    before = [parameter.clone() for parameter in model.moe.parameters()]

    def share(group: PeerGroup) -> None:
        raise PeerError("a rank is gone")

    with _in_device_memory() as made, torch.no_grad():
        compiled: Any = compile_whole(model)
        with mock.patch.object(PeerGroup, "share", share), pytest.raises(PeerError, match="a rank is gone"):
            compiled(hidden_rows(SMALL, 16, 0))
        del compiled
        torch._dynamo.reset()
        gc.collect()
        assert made[0].handle is not None
        assert made[0].handle() is None
        assert all(map(torch.equal, model.moe.parameters(), before))


@pytest.mark.slow
def test_a_meeting_that_fails_leaves_the_parameters_whole() -> None:
    run_ranks(2, _other_rank_fails)


def _is_replaced_in_part() -> None:
    model: Any = build_stack(SMALL, "all_to_all")
    downs = [layer.experts.down_proj for layer in model.moe]
    before = [down.clone() for down in downs]
    with _in_device_memory() as made, torch.no_grad():
        compiled, hidden = compile_whole(model), hidden_rows(SMALL, 16, 0)
        expected = compiled(hidden)
        for layer in model.moe:
            layer.experts.gate_up_proj = torch.nn.Parameter(layer.experts.gate_up_proj.clone(), requires_grad=False)
        gc.collect()
        for _ in range(2):
            assert torch.equal(compiled(hidden), expected)
        assert len(made) == 2 * SMALL.layers
        assert all(map(torch.equal, downs, before))


@pytest.mark.slow
def test_replacing_some_of_the_experts_leaves_the_others_whole() -> None:
    run_ranks(2, _is_replaced_in_part)


def _is_kept_elsewhere() -> None:
    """A parameter whose memory something else refers to cannot move: it is copied, and changes of it are noticed."""
    model, hidden = build_stack(SMALL, "all_to_all"), hidden_rows(SMALL, 16, 0)
    view = model.moe[0].experts.down_proj.detach()
    with _in_device_memory(), torch.no_grad():
        compiled = compile_whole(model)
        expected = compiled(hidden)
        assert sum(bank.held_twice_bytes for bank in _home().banks.values()) == view.nbytes
        assert torch.equal(compiled(hidden), expected)
        view.numpy()[:] *= 2  # past the version counter
        with pytest.raises(moepass.InputError, match="were changed after their first run"):
            compiled(hidden)


@pytest.mark.slow
def test_what_cannot_move_is_watched_by_its_numbers() -> None:
    run_ranks(2, _is_kept_elsewhere)
