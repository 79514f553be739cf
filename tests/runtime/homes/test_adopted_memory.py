"""Experts of adopted models are in memory once, in shared memory that is freed with the model."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

import moepass
from moepass.runtime.homes.adopted_banks import AdoptedHome, adopted_banks
from moepass.runtime.homes.peer_home import PeerPacker, is_movable
from tests.helpers.models.moe_stack import MoEStack, build_stack
from tests.helpers.processes.adopted_stacks import SMALL, compile_whole, hidden_rows, ring_of, shard_bytes
from tests.helpers.processes.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")


def _shared_ranges() -> list[tuple[int, int]]:
    """Return the address ranges of this process that map a rank's shards."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    ranges = re.findall(r"^(\w+)-(\w+) .*memfd:moepass", maps, re.MULTILINE)
    return [(int(start, 16), int(stop, 16)) for start, stop in ranges]


def _shared_segments() -> set[str]:
    """Return device and inode of each segment of shards that this process has mapped."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return set(re.findall(r"^\S+ \S+ \S+ (\S+ \d+) .*memfd:moepass", maps, re.MULTILINE))


def _home() -> AdoptedHome:
    (group,) = dist.distributed_c10d._world.pg_map
    return adopted_banks(group, torch.device("cpu")).home


def _experts(model: MoEStack) -> list[torch.nn.Parameter]:
    return [parameter for layer in model.moe for parameter in layer.experts.parameters()]


def _moves() -> None:
    model, full = build_stack(SMALL, "all_to_all"), build_stack(SMALL)
    before = [parameter.clone() for parameter in _experts(model)]
    identities = [(id(parameter), parameter.shape, parameter.stride()) for parameter in _experts(model)]
    compiled = compile_whole(model)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        for step in range(3):
            hidden = hidden_rows(SMALL, 16, step)
            assert torch.equal(compiled(hidden), full(hidden))
    assert len(compilations) == 1  # no guard saw that the parameters moved
    assert [(id(parameter), parameter.shape, parameter.stride()) for parameter in _experts(model)] == identities
    for parameter, value in zip(_experts(model), before, strict=True):
        assert torch.equal(parameter, value)
        assert any(start <= parameter.data_ptr() < stop for start, stop in _shared_ranges())
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert sum(bank.held_twice_bytes for bank in _home().banks.values()) == 0
    assert shard_bytes(_home()) == sum(parameter.nbytes for parameter in _experts(model))


@pytest.mark.slow
def test_experts_move_into_the_shards_and_no_guard_notices() -> None:
    run_ranks(2, _moves)


def _holds_one_bank_twice() -> None:
    config = dataclasses.replace(SMALL, layers=4, width=128)
    model = build_stack(config, "all_to_all")
    held = [(StorageWeakRef(parameter.untyped_storage()), parameter.nbytes) for parameter in _experts(model)]
    bank_bytes = sum(nbytes for _, nbytes in held)
    taken: dict[int, int] = {}
    peaks: list[int] = []
    memory = PeerPacker._memory

    def counted(packer: PeerPacker, index: int) -> torch.Tensor:
        shard = memory(packer, index)
        taken[index] = shard.numel()
        peaks.append(sum(taken.values()) + sum(nbytes for storage, nbytes in held if not storage.expired()))
        return shard

    hidden = hidden_rows(config, 16, 0)
    with torch.no_grad(), mock.patch.object(PeerPacker, "_memory", counted):
        assert torch.equal(compile_whole(model)(hidden), build_stack(config)(hidden))
    assert sum(taken.values()) >= bank_bytes
    assert max(peaks) <= bank_bytes + max(taken.values())


@pytest.mark.slow
def test_adopting_holds_one_bank_more_than_the_experts_at_most() -> None:
    run_ranks(2, _holds_one_bank_twice)


def _writes_too_late() -> None:
    """Check that other ranks never read what a rank writes into its parameters later."""
    model, full = build_stack(SMALL, "all_to_all"), build_stack(SMALL)
    compiled, hidden = compile_whole(model), hidden_rows(SMALL, 16, 0)
    with torch.no_grad():
        expected = full(hidden)
        assert torch.equal(compiled(hidden), expected)
        if dist.get_rank() == 1:
            for parameter in _experts(model):
                parameter.fill_(torch.nan)
            with pytest.raises(moepass.InputError, match="were changed after their first run"):
                compiled(hidden)
        dist.barrier()
        if dist.get_rank() == 0:
            assert torch.equal(compiled(hidden), expected)


@pytest.mark.slow
def test_other_ranks_never_see_what_is_written_into_the_parameters_later() -> None:
    run_ranks(2, _writes_too_late)


def _with_view(parameter: torch.nn.Parameter) -> object:
    return parameter.detach()


def _with_numpy(parameter: torch.nn.Parameter) -> object:
    return parameter.numpy()


def _with_storage(parameter: torch.nn.Parameter) -> object:
    return parameter.untyped_storage()


def _with_dlpack(parameter: torch.nn.Parameter) -> object:
    return torch.utils.dlpack.to_dlpack(parameter)


def _shared_with_processes(parameter: torch.nn.Parameter) -> object:
    return parameter.data.share_memory_()


def _transposed(parameter: torch.nn.Parameter) -> object:
    parameter.data = parameter.data.transpose(1, 2).contiguous().transpose(1, 2)
    return None


KEPT: list[Callable[[torch.nn.Parameter], object]] = [
    _with_view, _with_numpy, _with_storage, _with_dlpack, _shared_with_processes, _transposed,
]  # fmt: skip


def test_a_parameter_moves_only_where_nothing_else_reaches_its_memory() -> None:
    def parameter() -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(2, 3, 4), requires_grad=False)

    assert is_movable(parameter())
    for keep in KEPT:
        weight = parameter()
        holder = keep(weight)
        assert not is_movable(weight), keep.__name__
        if keep in (_with_view, _with_storage, _with_dlpack):
            del holder
            assert is_movable(weight), keep.__name__
    with torch.inference_mode():
        assert not is_movable(torch.randn(2, 3, 4))
    assert not is_movable(torch.nn.Parameter(torch.empty(2, 3, 4, device="meta")))
    assert not is_movable(torch.randn(4, 3, 4)[1:])


def _stays(number: int) -> None:
    model, full = build_stack(SMALL, "all_to_all"), build_stack(SMALL)
    weight = model.moe[1].experts.down_proj
    holder = KEPT[number](weight)
    address = weight.data_ptr()
    compiled, hidden = compile_whole(model), hidden_rows(SMALL, 16, 0)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(hidden), full(hidden))
        assert weight.data_ptr() == address
        assert sum(bank.held_twice_bytes for bank in _home().banks.values()) == weight.nbytes
        if isinstance(holder, torch.Tensor):
            holder.mul_(2.0)
            with pytest.raises(moepass.InputError, match="were changed after their first run"):
                compiled(hidden)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 5])
def test_parameters_that_cannot_move_are_copied_and_counted(number: int) -> None:
    run_ranks(2, _stays, number)


def _models_come_and_go(models: int) -> None:
    hidden = hidden_rows(SMALL, 8, 0)
    descriptors = None
    for seed in range(models):
        config = dataclasses.replace(SMALL, seed=seed)
        model: Any = build_stack(config, "all_to_all")
        compiled: Any = compile_whole(model)
        with torch.no_grad():
            assert torch.equal(compiled(hidden), build_stack(config)(hidden)), f"seed {seed}"
        assert _shared_ranges()
        ring = weakref.ref(ring_of(_home()))
        del model, compiled
        gc.collect()
        assert _shared_ranges() == []
        assert ring() is None
        count = len(os.listdir("/proc/self/fd"))
        assert descriptors in (None, count)
        descriptors = count
        dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("models", [2, 8])
def test_models_that_are_gone_give_their_shared_memory_back(models: int) -> None:
    run_ranks(2, _models_come_and_go, models, timeout=30.0 + 10.0 * models)


def _one_stays() -> None:
    """Run models that come and go next to one that stays and shares their ring.

    The next run of that model frees their shards; if parameters could not move, the next meeting does.
    """
    hidden = hidden_rows(SMALL, 8, 0)
    stays = build_stack(SMALL, "all_to_all")
    compiled = compile_whole(stays)
    with torch.no_grad():
        expected = build_stack(SMALL)(hidden)
        assert torch.equal(compiled(hidden), expected)
        segments = _shared_segments()
        assert segments
        for seed in range(1, 4):
            config = dataclasses.replace(SMALL, seed=seed)
            model: Any = build_stack(config, "all_to_all")
            arrays = [parameter.numpy() for parameter in _experts(model)] if seed == 2 else None
            for _ in range(2):
                assert torch.equal(compile_whole(model)(hidden), build_stack(config)(hidden))
                assert torch.equal(compiled(hidden), expected)
            assert _shared_segments() > segments
            del model, arrays
            gc.collect()
            for _ in range(2):
                assert torch.equal(compiled(hidden), expected)
            if seed != 2:
                assert _shared_segments() == segments


@pytest.mark.slow
def test_shards_of_one_model_go_while_another_one_runs() -> None:
    run_ranks(2, _one_stays)


def _other_options() -> None:
    hidden = hidden_rows(SMALL, 8, 0)
    model: Any = build_stack(SMALL, "all_to_all")
    second_config = dataclasses.replace(SMALL, seed=1)
    with torch.no_grad():
        compile_whole(model)(hidden)
        with pytest.raises(moepass.InputError, match="share one ring; compile every model of that group with the same"):
            compile_whole(build_stack(second_config, "all_to_all"), slots=3)(hidden)
        del model
        gc.collect()
        model = build_stack(second_config, "all_to_all")
        assert torch.equal(compile_whole(model, slots=3)(hidden), build_stack(second_config)(hidden))


@pytest.mark.slow
def test_other_options_are_refused_while_a_model_lives_and_taken_afterwards() -> None:
    run_ranks(2, _other_options)
