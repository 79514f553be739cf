"""Complete experts requested by an operator become gathers if a block reads them, and refusals otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from moepass.passes.blocks.lower_complete_experts import COMPLETE_EXPERTS
from moepass.passes.ir.slot_operations import gather
from moepass.runtime.integrations import complete_experts
from tests.helpers.graphs.backend_helper import BLOCKS, EXPERTS, TOP_K, capture, count, tokens, up_to

pytestmark = pytest.mark.usefixtures("no_grad")


class OneRank:
    """A substitute for the layers of a group of one rank, whose experts are complete."""

    def complete(self, parts: Sequence[torch.Tensor], stay: bool) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in parts]


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete_experts, "_layers", {number: OneRank() for number in range(9)})


class Layer(nn.Module):
    """A block that reads the results of the operator."""

    def __init__(
        self, number: int, form: str = "grouped_mm", *, group: str = "ranks", stay: bool = True, computed: bool = False
    ) -> None:
        super().__init__()
        self.block = BLOCKS[form](seed=number, bias=True)
        self.complete = copy.copy(self.block)
        self.complete._parameters = dict.fromkeys(self.block._parameters)
        self.handle = torch.tensor([number])
        self.group, self.stay, self.computed = group, stay, computed

    def tensors(self) -> list[torch.Tensor]:
        parts = [value * 2 if self.computed else value for value in self.block._parameters.values()]
        complete: list[torch.Tensor] = COMPLETE_EXPERTS(self.handle, parts, [0, EXPERTS], self.group, self.stay)
        return complete

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, tensor in zip(self.block._parameters, self.tensors(), strict=True):
            self.complete._parameters[name] = tensor  # type: ignore[assignment]
        result: torch.Tensor = x + self.complete(x, x[:, :EXPERTS].topk(TOP_K, dim=-1).indices)
        for name in self.block._parameters:
            self.complete._parameters[name] = None
        return result


class Unread(Layer):
    """A layer that only sums up the weights, and is no block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.tensors()[0].sum()


class Returned(Layer):
    def tensors(self) -> list[torch.Tensor]:
        self.given = super().tensors()
        return self.given

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.given[1]


def _planned(*layers: Layer) -> Any:
    def model(x: torch.Tensor) -> Any:
        for layer in layers[:-1]:
            x = layer(x)
        return layers[-1](x)

    return up_to("partition", capture(model, tokens()).module)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("form", BLOCKS)
def test_blocks_read_gathers_of_banks_in_shards(form: str) -> None:
    layers = [Layer(number, form) for number in range(3)]
    module = capture(nn.Sequential(*layers), tokens()).module
    result = up_to("lower_complete_experts", module)
    assert count(module, COMPLETE_EXPERTS) == 3
    assert count(result.module, COMPLETE_EXPERTS) == 0
    assert count(result.module, gather) == 3
    assert [bank.index for bank in result.plan.banks] == [0, 1, 2]
    for layer, bank in zip(layers, result.plan.banks, strict=True):
        parts = list(layer.block._parameters.values())
        assert (bank.home, bank.group, bank.expert_bounds) == ("peer", "ranks", (0, EXPERTS))
        assert [tensor.shape for tensor in bank.tensors] == [tuple(tensor_part.shape) for tensor_part in parts]  # type: ignore[union-attr]
        assert [tensor.torch_dtype for tensor in bank.tensors] == [tensor_part.dtype for tensor_part in parts]  # type: ignore[union-attr]
    plan = up_to("partition", module).plan
    assert plan.strategy == "asyncep"
    assert plan.refusals == ()
    assert [(block.form, block.parallel) for block in plan.blocks] == [(form, "asyncep")] * 3
    assert [block.name for block in plan.blocks] == [bank.name for bank in plan.banks]
    assert [len(stay.shards) for stay in plan.slot_stays] == [4] * 3


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (lambda: Layer(1, stay=False), "this rank's experts lie elsewhere in every run, as under FSDP"),
        (lambda: Layer(1, computed=True), "this rank's experts are computed in the graph"),
        (lambda: Returned(1), "the graph returns the weights themselves"),
        (lambda: Unread(1), "no recognised block reads it"),
        (lambda: Layer(1, group="others"), "it spreads over group 'others', other blocks over 'ranks'"),
    ],
)
def test_unsupported_weights_stay_in_the_graph_with_a_reason(odd: Callable[[], Layer], reason: str) -> None:
    result = _planned(Layer(0), odd())
    plan = result.plan
    assert any(reason in refusal.reason for refusal in plan.refusals), plan.refusals
    (bank,) = plan.banks
    assert (bank.index, bank.group) == (0, "ranks")
    assert plan.strategy == "asyncep"
    assert [stay.bank for stay in plan.slot_stays] == [0]


def test_without_any_gather_nothing_is_streamed() -> None:
    captured = capture(nn.Sequential(Layer(0, stay=False), Layer(1, stay=False)), tokens())
    result = up_to("lower_complete_experts", captured.module)
    assert count(result.module, COMPLETE_EXPERTS) == 2
    assert result.plan.banks == ()
    assert torch.equal(captured.run(result.module)[0], captured.output)
