"""Experts with low-rank adapters for each expert in the model's code: adapters read the same rows as the experts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moepass
from tests.helpers.graphs.backend_helper import (
    BLOCKS,
    EXPERTS,
    HIDDEN,
    TOP_K,
    WIDTH,
    Stack,
    find,
    streamed,
    tokens,
    up_to,
)

RANK = 4


class AdaptedBlock(BLOCKS["grouped_mm"]):  # type: ignore[misc, name-defined]
    """A block that adds a product of two narrow matrices of each expert to `up`, before the experts or after."""

    adapter_first = True

    def __init__(self, *, adapter_first: bool, **kind: object) -> None:
        super().__init__(**kind)
        self.adapter_first = adapter_first
        generator = torch.Generator().manual_seed(5)
        self.down_adapter = nn.Parameter(torch.randn(EXPERTS, HIDDEN, RANK, generator=generator), requires_grad=False)
        self.up_adapter = nn.Parameter(torch.randn(EXPERTS, RANK, 2 * WIDTH, generator=generator), requires_grad=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.histc(flat[order].float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = counts.cumsum(0).to(torch.int32)
        rows = x[order // TOP_K]
        product = torch.ops.transformers.grouped_mm_fallback

        def adapted() -> torch.Tensor:
            result: torch.Tensor = product(product(rows, self.down_adapter, ends), self.up_adapter, ends)
            return result

        first = adapted() if self.adapter_first else None
        up = product(rows, self.matrix(self.up), ends)
        up = up + (adapted() if first is None else first)
        out = product(self.activate(up, None), self.matrix(self.down), ends)
        return out[torch.argsort(order)].view(x.shape[0], TOP_K, -1).sum(1)


@pytest.fixture(autouse=True)
def _adapted_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCKS, "adapted", AdaptedBlock)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("offloaded", [True, False])
@pytest.mark.parametrize("adapter_first", [False, True])
def test_adapters_in_the_graph_change_nothing_but_the_results(adapter_first: bool, offloaded: bool) -> None:
    model = Stack("adapted", depth=2, adapter_first=adapter_first)
    with torch.no_grad():
        expected = model(tokens())
        if offloaded:
            moepass.offload_experts(model)
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
        for _ in range(2):
            assert torch.equal(compiled(tokens()), expected)


def test_rows_that_an_adapter_reads_first_stay_in_front_of_it() -> None:
    captured = streamed(Stack("adapted", depth=1, adapter_first=True), tokens())
    module = up_to("sink_token_gather", captured.module).module
    lookup, *_ = (node.args[0] for node in find(module, torch.ops.transformers.grouped_mm_fallback.default))
    assert all(lookup < user for user in lookup.users)
