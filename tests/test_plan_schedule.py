"""Planning and scheduling: which slot, waiting for which release, in which order."""

from __future__ import annotations

import pytest
import torch
from backend_helper import (
    BLOCKS,
    BatchedBlock,
    Stack,
    capture,
    count,
    find,
    fingerprint,
    slot_order,
    streamed,
    tokens,
    up_to,
)
from torch import nn

from moepass.passes.ir import acquire, gather, prefetch, release
from moepass.passes.pipeline import PASSES
from moepass.passes.protocol import PassContext, PassError, PlanError

schedule = next(function for function in PASSES if function.__name__ == "schedule")


@pytest.mark.parametrize("form", BLOCKS)
def test_two_slots_take_turns(form: str) -> None:
    result = up_to("schedule", streamed(Stack(form, depth=4), tokens()).module)
    assert slot_order(result.module) == [
        "prefetch 0>0", "prefetch 1>1",
        "acquire 0>0", "release 0>0", "prefetch 2>0",
        "acquire 1>1", "release 1>1", "prefetch 3>1",
        "acquire 2>0", "release 2>0",
        "acquire 3>1", "release 3>1",
    ]  # fmt: skip
    assert count(result.module, gather) == 0


def test_one_slot_is_refilled_after_each_block() -> None:
    result = up_to("schedule", streamed(Stack(depth=2), tokens()).module, slots=1)
    assert slot_order(result.module) == [
        "prefetch 0>0", "acquire 0>0", "release 0>0", "prefetch 1>0", "acquire 1>0", "release 1>0",
    ]  # fmt: skip
    assert "1 slot" in result.plan.reason


def test_no_more_slots_than_banks_are_used() -> None:
    result = up_to("schedule", streamed(Stack(depth=2), tokens()).module, slots=5)
    assert result.plan.slots == 2
    assert [stay.after for stay in result.plan.residencies] == [None, None]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_plan_says_what_the_graph_does(slots: int) -> None:
    result = up_to("schedule", streamed(Stack(depth=4), tokens()).module, slots=slots)
    plan, releases = result.plan, find(result.module, release)
    fillings = {node.kwargs["bank"]: node for node in find(result.module, prefetch)}
    assert plan.strategy == "asyncep"
    assert plan.slots == slots
    assert plan.slot_bytes == max(bank.nbytes for bank in plan.banks)
    assert plan.device_bank_bytes == slots * plan.slot_bytes
    assert plan.streamed_bytes == sum(bank.nbytes for bank in plan.banks)
    for position, stay in enumerate(plan.residencies):
        filled = fillings[stay.bank]
        assert filled.kwargs["slot"] == stay.slot
        assert filled.kwargs["after"] is (None if stay.after is None else releases[stay.after])
        assert (stay.after is None) == (position < slots)
        assert stay.shards == tuple(node.name for node in filled.args[0])  # type: ignore[union-attr]


def test_a_refill_stands_right_behind_the_release_that_it_waits_for() -> None:
    graph = up_to("schedule", streamed(Stack(depth=4), tokens()).module).module.graph
    for node in graph.nodes:
        if node.target is prefetch and node.kwargs["after"] is not None:
            assert node.prev is node.kwargs["after"]


def test_reads_lie_between_acquire_and_release() -> None:
    module = up_to("schedule", streamed(Stack("grouped_mm", depth=3, bias=True), tokens()).module).module
    place = {node: index for index, node in enumerate(module.graph.nodes)}
    for tensors, done in zip(find(module, acquire), find(module, release), strict=True):
        users = [user for user in tensors.users if user is not done]
        assert len(users) == 4
        assert all(place[tensors] < place[user] < place[done] for user in users)


def test_inputs_stay_untouched() -> None:
    captured = streamed(Stack(depth=3), tokens())
    stages = [captured.module, *(up_to(name, captured.module).module for name in ("rewrite", "schedule"))]
    before = [fingerprint(module) for module in stages]
    canonical = up_to("plan", captured.module)
    schedule(canonical.module, canonical.plan, PassContext(slots=2))
    assert [fingerprint(module) for module in stages] == before
    assert count(canonical.module, gather) == 3


def test_a_resident_model_and_a_model_without_blocks_say_why_nothing_moves() -> None:
    resident = up_to("plan", capture(Stack(), tokens()).module).plan
    assert (resident.strategy, resident.reason) == ("resident", "every expert bank lies on the compute device already")
    dense = up_to("plan", capture(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4)).module).plan
    assert (dense.strategy, dense.reason) == ("resident", "the graph has no MoE block, so there is nothing to move")


class TwoAtOnce(nn.Module):
    """The first bank is read again while the second block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = BatchedBlock(seed=0), BatchedBlock(seed=1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        kept = self.a.up
        y = self.b(self.a(x, ids), ids)
        return y + kept.sum()


class CarriedBias(nn.Module):
    """The bias of the first block is added after the second: both banks are alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = BatchedBlock(seed=0, bias=True), BatchedBlock(seed=1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        late = self.a.up_bias
        return self.b(self.a(x, ids), ids) + late.sum()


@pytest.mark.parametrize("model", [TwoAtOnce, CarriedBias])
def test_too_few_slots_name_the_number_that_would_do(model: type[nn.Module]) -> None:
    inputs = tokens(), torch.tensor([[0, 1]] * 6)
    captured = streamed(model(), *inputs)
    with pytest.raises(
        PlanError, match=r"slots=1 is too few: block .*b needs its bank while 1 banks .* slots=2 or more"
    ):
        up_to("plan", captured.module, slots=1)
    assert up_to("verify", captured.module, slots=2).plan.slots == 2


def test_a_plan_of_another_graph_is_an_error() -> None:
    three = up_to("plan", streamed(Stack(depth=3), tokens()).module)
    two = up_to("plan", streamed(Stack(depth=2), tokens()).module)
    with pytest.raises(PassError, match=r"the plan schedules banks \[0, 1, 2\], the graph gathers \[0, 1\]"):
        schedule(two.module, three.plan, PassContext())
