"""Planning and scheduling: the slot of each bank, the release that it waits for, and the order of operations."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import moepass
from moepass.passes.ir.protocol import PassContext, PassError, PlanError
from moepass.passes.ir.slot_operations import acquire, decode, gather, prefetch, release
from moepass.passes.pipeline import PASSES
from tests.helpers.graphs.backend_helper import (
    BLOCKS,
    EXPERTS,
    BatchedBlock,
    DenseBlock,
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
from tests.helpers.mutants.schedule_mutants import case

schedule = next(function for function in PASSES if function.__name__ == "schedule")


@pytest.mark.slow
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


def test_an_encoded_bank_is_copied_once_a_buffer_is_free_and_decoded_once_its_slot_is_free() -> None:
    base = case("all encoded", 2)
    scheduled = GraphModule(base.canonical, base.graph)
    assert slot_order(scheduled) == [
        "prefetch 0>0", "decode 0>0", "prefetch 1>1", "decode 1>1", "prefetch 2>0", "prefetch 3>1",
        "acquire 0>0", "release 0>0", "decode 2>0",
        "acquire 1>1", "release 1>1", "decode 3>1",
        "acquire 2>0", "release 2>0",
        "acquire 3>1", "release 3>1",
    ]  # fmt: skip
    assert [node.kwargs["after"] for node in find(scheduled, prefetch)] == [None] * 4
    assert [node.kwargs["after"] for node in find(scheduled, decode)] == [None, None, *find(scheduled, release)[:2]]


def test_banks_are_copied_in_the_order_of_need_whether_encoded_or_not() -> None:
    """Bank 2 is not encoded, so that its copy waits for the slot, and bank 3 is copied after it."""
    base = case("encoded", 2)
    assert slot_order(GraphModule(base.canonical, base.graph)) == [
        "prefetch 0>0", "decode 0>0", "prefetch 1>1", "decode 1>1",
        "acquire 0>0", "release 0>0", "prefetch 2>0", "prefetch 3>1",
        "acquire 1>1", "release 1>1", "decode 3>1",
        "acquire 2>0", "release 2>0",
        "acquire 3>1", "release 3>1",
    ]  # fmt: skip


def test_no_more_slots_than_banks_are_used() -> None:
    result = up_to("schedule", streamed(Stack(depth=2), tokens()).module, slots=5)
    assert result.plan.slots == 2
    assert [stay.after for stay in result.plan.slot_stays] == [None, None]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_plan_matches_the_graph(slots: int) -> None:
    result = up_to("schedule", streamed(Stack(depth=4), tokens()).module, slots=slots)
    plan, releases = result.plan, find(result.module, release)
    fillings = {node.kwargs["bank"]: node for node in find(result.module, prefetch)}
    assert plan.strategy == "asyncep"
    assert plan.slots == slots
    assert plan.slot_bytes == max(bank.format.slot_bytes for bank in plan.banks)
    assert plan.device_bank_bytes == slots * plan.slot_bytes
    assert sorted(stay.bank for stay in plan.slot_stays) == [bank.index for bank in plan.banks]
    for position, stay in enumerate(plan.slot_stays):
        filled = fillings[stay.bank]
        assert filled.kwargs["slot"] == stay.slot
        assert filled.kwargs["after"] is (None if stay.after is None else releases[stay.after])
        assert (stay.after is None) == (position < slots)
        assert stay.shards == tuple(node.name for node in filled.args[0])  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_refill_directly_follows_its_release() -> None:
    graph = up_to("schedule", streamed(Stack(depth=4), tokens()).module).module.graph
    for node in graph.nodes:
        if node.target is prefetch and node.kwargs["after"] is not None:
            assert node.prev is node.kwargs["after"]


def test_reads_lie_between_acquire_and_release() -> None:
    module = up_to("schedule", streamed(Stack("grouped_mm", depth=3, bias=True), tokens()).module).module
    position = {node: index for index, node in enumerate(module.graph.nodes)}
    for tensors, done in zip(find(module, acquire), find(module, release), strict=True):
        users = [user for user in tensors.users if user is not done]
        assert len(users) == 4
        assert all(position[tensors] < position[user] < position[done] for user in users)


@pytest.mark.slow
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
    assert (resident.strategy, resident.reason) == ("resident", "every expert bank is already on the compute device")
    dense = up_to("plan", capture(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4)).module).plan
    assert (dense.strategy, dense.reason) == ("resident", "the graph has no MoE block, so there is nothing to move")


class TwoAtOnce(nn.Module):
    """The first bank is read again while the second block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = BatchedBlock(seed=0), BatchedBlock(seed=1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        parameter = self.a.up
        y = self.b(self.a(x, ids), ids)
        return y + parameter.sum()


class CarriedBias(nn.Module):
    """The bias of the first block is added after the second: both banks are alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = BatchedBlock(seed=0, bias=True), BatchedBlock(seed=1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        late = self.a.up_bias
        return self.b(self.a(x, ids), ids) + late.sum()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("model", [TwoAtOnce, CarriedBias])
def test_too_few_slots_name_the_number_that_would_do(model: type[nn.Module]) -> None:
    inputs = tokens(), torch.tensor([[0, 1]] * 6)
    captured = streamed(model(), *inputs)
    with pytest.raises(
        PlanError, match=r"slots=1 is too few: block .*b needs its bank while 1 banks .* slots=2 or more"
    ):
        up_to("plan", captured.module, slots=1)
    assert up_to("verify", captured.module, slots=2).plan.slots == 2


@pytest.mark.slow
def test_a_plan_of_another_graph_is_an_error() -> None:
    three = up_to("plan", streamed(Stack(depth=3), tokens()).module)
    two = up_to("plan", streamed(Stack(depth=2), tokens()).module)
    with pytest.raises(PassError, match=r"the plan schedules banks \[0, 1, 2\], but the graph gathers \[0, 1\]"):
        schedule(two.module, three.plan, PassContext())


class UpFront(nn.Module):
    """A model that takes all weights as views before it uses the first; `order` is the order of first uses."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DenseBlock(gated=False, seed=layer) for layer in range(3))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [(block.up.transpose(-2, -1), torch.unsafe_chunk(block.down, 1)[0]) for block in self.blocks]
        for up, down in (weights[layer] for layer in self.order):
            x = torch.bmm(torch.bmm(x.expand(EXPERTS, -1, -1), up).relu(), down.transpose(-2, -1)).sum(0).tanh()
        return x


@pytest.mark.sampled(every=6)
@pytest.mark.covering(1)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_weights_taken_up_front_are_acquired_where_they_are_first_read(order: tuple[int, ...], slots: int) -> None:
    model = UpFront(order)
    with torch.no_grad():
        expected = model(tokens())
        report = moepass.offload_experts(model, slots=slots)
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
        with moepass.record_compilations() as compilations:
            for _ in range(2):
                assert torch.equal(compiled(tokens()), expected)
    plan = compilations[0].plan
    assert plan.slots == min(slots, 3)
    assert [stay.bank for stay in plan.slot_stays] == list(order)
    assert report.store.slots == slots


def test_an_update_with_weights_is_a_read_and_is_not_moved() -> None:
    """`copy_` returns a view of its first argument, but it reads the weights."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = DenseBlock(seed=0), DenseBlock(seed=1)
            self.register_buffer("kept", torch.zeros_like(self.a.up))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.b(self.a(x, x), x)
            self.kept.copy_(self.a.up)
            return y

    model = Keeps()
    weight = model.a.up.clone()
    moepass.offload_experts(model, slots=2)
    with torch.no_grad():
        torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})(tokens())
    assert torch.equal(model.kept, weight)


@pytest.mark.slow
def test_results_of_an_operator_with_several_stay_with_it() -> None:
    """The last read of a bank may return several tensors: the release follows their getitems."""

    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = DenseBlock(seed=0), DenseBlock(seed=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.a.up
            values, places = weight.sum(1).max(-1)
            y = self.b(self.a(x, x), x)
            values, places = weight.max(-1)
            return y + values.sum() + places.sum()

    model = Largest()
    with torch.no_grad():
        expected = model(tokens())
        moepass.offload_experts(model, slots=2)
        compiled = torch.compile(model, backend="asyncep", options={"debug": True})
        torch.testing.assert_close(compiled(tokens()), expected)
