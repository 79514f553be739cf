"""Rewriting creates one gather per block in place of its bank tensors, and changes nothing else."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

import moepass
from moepass.passes.ir.protocol import PlanError
from moepass.passes.ir.slot_operations import BANK_TENSOR, gather
from tests.helpers.graphs.backend_helper import (
    BLOCKS,
    EXPERTS,
    BatchedBlock,
    Stack,
    capture,
    count,
    find,
    fingerprint,
    operators,
    streamed,
    tokens,
    up_to,
)
from tests.helpers.graphs.error_fields import refused


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", BLOCKS)
def test_one_gather_per_block_keeps_the_operators(form: str, bias: bool) -> None:
    captured = streamed(Stack(form, depth=3, bias=bias), tokens())
    before = fingerprint(captured.module)
    old = operators(captured.module)
    module = up_to("rewrite", captured.module).module
    new = operators(module)
    assert fingerprint(captured.module) == before
    assert old[str(BANK_TENSOR)] == 3 * (4 if bias else 2)
    assert new[str(BANK_TENSOR)] == 0
    assert new[str(gather)] == 3
    ignored = {str(BANK_TENSOR), str(gather), str(operator.getitem)}
    assert {name: n for name, n in new.items() if name not in ignored} == {
        name: n for name, n in old.items() if name not in ignored
    }


def test_gathers_precede_their_blocks_in_host_order() -> None:
    result = up_to("rewrite", streamed(Stack("batched_mm", depth=3), tokens()).module)
    order = [node.name for node in result.module.graph.nodes]
    gathers = find(result.module, gather)
    assert [node.kwargs["bank"] for node in gathers] == [0, 1, 2]
    for node, block in zip(gathers, result.plan.blocks, strict=True):
        assert node.meta["moepass_block"] == block.name
        assert order.index(node.name) < order.index(block.gemms[0])
        assert [tuple(value.shape) for value in node.meta["val"]] == [
            tensor.shape for tensor in result.plan.bank(block.bank or 0).tensors
        ]


def test_a_resident_model_is_unchanged() -> None:
    captured = capture(Stack("batched_mm"), tokens())
    result = up_to("rewrite", captured.module)
    assert operators(result.module) == operators(captured.module)
    assert result.matches == tuple(f"detect: {block.name}" for block in result.plan.blocks)


def test_a_layer_applied_twice_is_gathered_twice() -> None:
    model = Stack("batched_mm", depth=3)
    model.blocks[2] = model.blocks[0]
    module = up_to("rewrite", streamed(model, tokens()).module).module
    assert [node.kwargs["bank"] for node in find(module, gather)] == [0, 1, 0]
    assert count(module, BANK_TENSOR) == 0


class ReturnsWeights(nn.Module):
    def __init__(self, view: bool) -> None:
        super().__init__()
        self.block, self.view = BatchedBlock(), view

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        up = self.block.up
        return self.block(x, ids), (up.transpose(1, 2) if self.view else up)


@pytest.mark.parametrize("view", [False, True])
def test_weights_that_the_graph_returns_are_refused_and_stay_right(view: bool) -> None:
    model = ReturnsWeights(view)
    inputs = tokens(), torch.tensor([[0, 1]] * 6)
    with torch.no_grad():
        expected = [
            value.clone() for value in model(*inputs)
        ]  # offloading empties tensors that share memory with parameters
    captured = streamed(model, *inputs)
    result = up_to("partition", captured.module)
    assert [refusal.reason for refusal in result.plan.refusals] == [
        "the graph returns the weights themselves, so no slot can be reused"
    ]
    assert count(result.module, gather) == 0
    assert result.plan.strategy == "synchronous"
    for got, want in zip(captured.run(result.module), expected, strict=True):
        assert torch.equal(got, want)


def test_a_bank_tensor_read_outside_any_block_stays_synchronous() -> None:
    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = BatchedBlock(seed=0), BatchedBlock(seed=1)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return self.a(x, ids) + self.b.up.sum()

    captured = streamed(Peeks(), tokens(), torch.tensor([[0, 1]] * 6))
    result = up_to("schedule", captured.module)
    assert count(result.module, BANK_TENSOR) == 1
    (refusal,) = result.plan.refusals
    assert refusal.where == "b"
    assert "`up` is read outside a recognised MoE block" in refusal.reason
    assert [stay.bank for stay in result.plan.slot_stays] == [0]


def test_banks_of_two_offloads_in_one_graph_are_an_error() -> None:
    model = nn.Sequential(Stack("dense_bmm", depth=1), Stack("dense_bmm", depth=1))
    moepass.offload_experts(model[0])
    moepass.offload_experts(model[1])
    captured = capture(model, tokens())
    with refused(PlanError, name="offload_experts", value=2, expected=1):
        up_to("rewrite", captured.module)


def test_experts_are_counted_as_in_the_model() -> None:
    result = up_to("rewrite", streamed(Stack("dense_bmm", depth=1), tokens()).module)
    assert {tensor.shape[0] for tensor in result.plan.banks[0].tensors} == {EXPERTS}
