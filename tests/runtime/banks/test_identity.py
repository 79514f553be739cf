"""What tells one bank from another: the memory of its tensors, and how they lie there."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from moepass.models.errors import InputError
from moepass.runtime.banks.identity import MemoryTable, memories_of
from moepass.runtime.homes.adopted_banks import adopted_banks
from moepass.runtime.integrations.complete_experts import CompleteExperts
from tests.helpers.processes.ranks import run_ranks


def _views_are_banks_of_their_own() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    everywhere = torch.arange(4 * 3 * 3, dtype=torch.float32).view(4, 3, 3)
    own = torch.nn.Parameter(everywhere[2 * rank : 2 * rank + 2].clone(), requires_grad=False)
    for view in (lambda part: part, lambda part: part.transpose(1, 2), lambda part: part[:, :, :2]):
        layer = CompleteExperts("layer", group, [0, 2, 4], 50)
        for _ in range(2):
            (complete,) = layer.complete([view(own)])
            assert torch.equal(complete, view(everywhere))
    model = torch.nn.Module()
    model.experts = own
    with pytest.raises(InputError, match="begin with one parameter"):
        adopted_banks(group, own.device).banks_of(model)


def test_views_of_one_memory_are_banks_of_their_own() -> None:
    run_ranks(2, _views_are_banks_of_their_own)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_a_table_never_gives_a_value_of_memory_that_was_freed(steps: list[int]) -> None:
    """Tensors come and go, many of them where others were before."""
    table: MemoryTable[int] = MemoryTable()
    living: dict[int, torch.Tensor] = {}
    for number, place in enumerate(steps):
        living.pop(place, None)
        tensor = living[place] = torch.empty(64)
        assert table.find(memories_of([tensor])) is None
        table.add(memories_of([tensor]), [tensor], number)
        assert table.find(memories_of([tensor])) == number
    assert len(table.living()) == len(living)


def test_an_entry_goes_with_the_first_of_its_tensors() -> None:
    table: MemoryTable[str] = MemoryTable()
    parts = [torch.empty(8), torch.empty(8)]
    table.add(memories_of(parts), parts, "bank")
    view = parts[1][2:]
    del parts[0]
    gc.collect()
    assert table.living() == {}
    assert table.find(memories_of([view])) is None
