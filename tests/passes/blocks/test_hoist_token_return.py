"""Routing weights and the return to token order move directly after the last GEMM, so that a kernel can fuse them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from moepass.passes.blocks import hoist_token_return as hoisting
from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.blocks.hoist_token_return import block_ends, token_return
from moepass.passes.graph.nodes import is_call, positions
from moepass.passes.ir.protocol import PassResult
from moepass.passes.ir.slot_operations import release
from tests.helpers.graphs.backend_helper import (
    EXPERTS,
    TOP_K,
    Captured,
    GroupedBlock,
    Stack,
    capture,
    streamed,
    tokens,
    up_to,
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute grouped GEMMs with our kernels, as on a GPU."""
    monkeypatch.setattr(hoisting, "stores_rows_in_any_order", is_grouped_gemm)


class Weighted(GroupedBlock):
    """A model that applies weights and restores the order after the last GEMM, as published models do."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat, weights = ids.reshape(-1), x[:, :TOP_K].sigmoid()
        owners, order = flat.sort(stable=True)
        ends = torch.histc(owners.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0).to(torch.int32)
        product: Callable[..., torch.Tensor] = torch.ops.transformers.grouped_mm_fallback
        up = product(x[order // TOP_K], self.matrix(self.up), ends) + self.up_bias[owners]
        out = product(self.activate(up, None), self.matrix(self.down), ends)
        out = (out + self.down_bias[owners]) * (weights * 2).reshape(-1)[order].unsqueeze(-1)
        return self.sum(self.back(out, order), x)

    def back(self, out: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return out[back]

    def sum(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return out.view(x.shape[0], TOP_K, -1).sum(1)


def _stack(block: type[GroupedBlock] = Weighted) -> Stack:
    model = Stack("grouped_mm", depth=2)
    model.blocks = nn.ModuleList(block(bias=True, seed=layer) for layer in range(2))
    return model


def _hoisted(captured: Captured) -> tuple[GraphModule, list[str]]:
    result: PassResult = up_to("hoist_token_return", captured.module)
    return result.module, [match for match in result.matches if match.startswith("hoist_token_return")]


def _gemms(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if is_grouped_gemm(node)]


def _equal(captured: Captured, module: GraphModule) -> bool:
    return all(torch.equal(new, old) for new, old in zip(captured.run(module), captured.run(), strict=True))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_token_return_directly_follows_the_last_gemm(kernels: None, dynamic: bool) -> None:
    captured = capture(_stack(), tokens(), dynamic=dynamic)
    module, moved = _hoisted(captured)
    assert len(moved) == 2
    position_of, ends = positions(module.graph), block_ends(module.graph)
    for gemm in _gemms(module)[1::2]:
        end = ends[gemm]
        assert token_return(end) is not None
        # Bias, weights, their lookups, and the computation of the inverse: a tile supports all of them.
        assert position_of[end] - position_of[gemm] <= 9
    assert _equal(captured, module)


@pytest.mark.slow
def test_a_bank_is_released_right_behind_the_return(kernels: None) -> None:
    captured = streamed(_stack(), tokens())
    module = up_to("schedule", captured.module).module
    ends = set(block_ends(module.graph).values())
    releases = [node for node in module.graph.nodes if is_call(node, release)]
    assert [node.prev for node in releases] == sorted(ends, key=positions(module.graph).__getitem__)
    assert len(ends) == 2


def test_on_a_cpu_nothing_moves() -> None:
    captured = capture(_stack(), tokens())
    module, moved = _hoisted(captured)
    assert moved == []
    assert block_ends(module.graph) == {}


class ReadTwice(Weighted):
    def back(self, out: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return super().back(out, order) + out.mean()


class FromZeros(Weighted):
    """If `order` were no permutation, an element would be 0 because it was never written."""

    def back(self, out: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        back = torch.zeros_like(order)
        back[order] = torch.arange(order.shape[0])
        return out[back]


class Backwards(Weighted):
    def back(self, out: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0] - 1, -1, -1)
        return out[back]


class AllRowsMeet(Weighted):
    def back(self, out: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return super().back(out - out.mean(0), order)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("block", [ReadTwice, FromZeros, Backwards, AllRowsMeet])
def test_other_blocks_are_unchanged(kernels: None, block: type[Weighted]) -> None:
    captured = capture(_stack(block), tokens())
    module, moved = _hoisted(captured)
    assert moved == []
    assert block_ends(module.graph) == {}
    assert _equal(captured, module)


class SharedInverse(Weighted):
    """The inverse has another reader, and is computed before the experts."""

    def sum(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().sum(out, x) + self.inverse.view(x.shape[0], TOP_K).sum(1, keepdim=True)

    def back(self, out: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        self.inverse = torch.empty_like(order)
        self.inverse[order] = torch.arange(order.shape[0])
        return out[self.inverse]


@pytest.mark.slow
def test_an_inverse_with_other_readers_is_duplicated(kernels: None) -> None:
    captured = capture(_stack(SharedInverse), tokens())
    module, moved = _hoisted(captured)
    assert len(moved) == 2
    assert _equal(captured, module)
