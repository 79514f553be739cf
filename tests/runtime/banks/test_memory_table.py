"""The identity of banks: the memory of their tensors, and the layout of these tensors."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from moepass.models.errors import InputError
from moepass.runtime.homes.adopted_banks import adopted_banks
from moepass.runtime.integrations.complete_experts import CompleteExperts
from moepass.runtime.system.tensor_memory import MemoryTable, memories_of
from tests.helpers.processes.ranks import run_ranks


def _views_are_banks_of_their_own() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    complete_tensor = torch.arange(4 * 3 * 3, dtype=torch.float32).view(4, 3, 3)
    shard = torch.nn.Parameter(complete_tensor[2 * rank : 2 * rank + 2].clone(), requires_grad=False)
    for view in (lambda part: part, lambda part: part.transpose(1, 2), lambda part: part[:, :, :2]):
        layer = CompleteExperts("layer", group, [0, 2, 4])
        for _ in range(2):
            (complete,) = layer.complete([view(shard)])
            assert torch.equal(complete, view(complete_tensor))
    model = torch.nn.Module()
    model.experts = shard
    with pytest.raises(InputError, match="have the same first parameter"):
        adopted_banks(group, shard.device).banks_of(model)


def test_different_views_of_one_memory_are_different_banks() -> None:
    run_ranks(2, _views_are_banks_of_their_own)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_a_table_never_gives_a_value_of_memory_that_was_freed(steps: list[int]) -> None:
    """Create and free tensors in an order in which many get an address that was used before."""
    table: MemoryTable[int] = MemoryTable()
    living: dict[int, torch.Tensor] = {}
    for number, position in enumerate(steps):
        living.pop(position, None)
        tensor = living[position] = torch.empty(64)
        assert table.find(memories_of([tensor])) is None
        table.add(memories_of([tensor]), [tensor], number)
        assert table.find(memories_of([tensor])) == number
    assert len(table.living()) == len(living)


def test_an_entry_expires_with_the_first_of_its_tensors() -> None:
    table: MemoryTable[str] = MemoryTable()
    parts = [torch.empty(8), torch.empty(8)]
    table.add(memories_of(parts), parts, "bank")
    view = parts[1][2:]
    del parts[0]
    gc.collect()
    assert table.living() == {}
    assert table.find(memories_of([view])) is None
