"""Rows sorted by expert are recognised as rows of tokens only if all numbers used with them are right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.graphs.token_models import (
    EXPERTS,
    TOP_K,
    TokenModel,
    chunked,
    compiled,
    hybrid,
    regions,
    token_model,
)

GROUPED = "transformers.grouped_mm_fallback.default"


@dataclasses.dataclass
class Routing:
    """The steps of a block's routing; a mutation replaces one of them."""

    top_k: int = TOP_K
    ids: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids.reshape(-1)
    sort: Callable[[torch.Tensor], torch.Tensor] = lambda flat: torch.argsort(flat, stable=True)
    tokens: Callable[[torch.Tensor, int], torch.Tensor] = lambda order, top_k: order // top_k
    counted: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda flat, order: flat[order]
    counts: Callable[[torch.Tensor], torch.Tensor] = lambda ids: torch.histc(
        ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1
    )
    ends: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts.cumsum(0)
    inverse: Callable[[torch.Tensor], torch.Tensor] = torch.argsort
    between: Callable[[torch.Tensor], torch.Tensor] = torch.relu

    def __call__(self, model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
        x = model.embed(ids).flatten(0, 1)
        chosen = model.router(x).topk(self.top_k, dim=-1).indices
        flat = self.ids(chosen)
        order = self.sort(flat)
        ends = self.ends(self.counts(self.counted(flat, order))).to(torch.int32)
        gemm = torch.ops.transformers.grouped_mm_fallback
        rows = self.between(gemm(x[self.tokens(order, self.top_k)], model.experts, ends))
        back = rows[self.inverse(order)]
        result: torch.Tensor = back.view(-1, self.top_k, model.width).sum(1)
        return result


def _written(order: torch.Tensor, *, empty: bool = True, backwards: bool = False) -> torch.Tensor:
    """Return the inverse of an order as transformers writes it."""
    inverse = torch.empty_like(order) if empty else torch.zeros_like(order)
    numbers = torch.arange(order.shape[0])
    inverse[order] = numbers.flip(0) if backwards else numbers
    return inverse


TAKEN = {
    "sorted indices": Routing(),
    "written indices": Routing(inverse=_written),
    "values of a sort": Routing(sort=lambda flat: flat.sort().indices),
    "one expert for each token": Routing(top_k=1),
    "as many as there are experts": Routing(top_k=EXPERTS),
    "pairs without an expert": Routing(ids=lambda ids: torch.where(ids > 2, EXPERTS, ids).reshape(-1)),
}
# Each returns the same results only for all tokens together, or by chance.
REFUSED: dict[str, Routing] = {
    "experts from the last to the first": Routing(sort=lambda flat: torch.argsort(flat, descending=True, stable=True)),
    "pairs without an expert in front of all others": Routing(
        ids=lambda ids: torch.where(ids > 2, -1, ids).reshape(-1)
    ),
    "ids of other pairs": Routing(ids=lambda ids: ids.flip(0).reshape(-1)),
    "pairs in the order of experts": Routing(ids=lambda ids: ids.t().reshape(-1)),
    "another number of experts of a token": Routing(tokens=lambda order, top_k: order // (top_k + 1)),
    "tokens by remainder": Routing(tokens=lambda order, top_k: order % 18),
    "counts of other ids": Routing(counted=lambda flat, order: (flat[order] + 1) % EXPERTS),
    "counts of half of the range": Routing(
        counts=lambda ids: torch.histc(ids.float(), bins=EXPERTS, min=0, max=2 * EXPERTS - 1)
    ),
    "counts in a narrow type": Routing(
        counts=lambda ids: torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).to(torch.bfloat16)
    ),
    "counts of counts": Routing(ends=lambda counts: counts.cumsum(0).cumsum(0).clamp(max=36)),
    "ends that are moved": Routing(ends=lambda counts: counts.cumsum(0).roll(1)),
    "written into zeros": Routing(inverse=lambda order: _written(order, empty=False)),
    "written backwards": Routing(inverse=lambda order: _written(order, backwards=True)),
    "an order that is not inverted": Routing(inverse=lambda order: order),
    "inverse from the last": Routing(inverse=lambda order: torch.argsort(order, descending=True)),
    "rows meet other rows": Routing(between=lambda rows: rows.cumsum(0)),
    "rows by their place": Routing(between=lambda rows: rows * torch.arange(rows.shape[0])[:, None]),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.sampled(every=6)
def test_routing_runs_some_tokens_at_a_time(name: str) -> None:
    model, ids = token_model(TAKEN[name])
    (operators,) = regions(hybrid(model, ids).module).values()
    assert GROUPED in operators
    assert any(operator.startswith("sort") or operator.startswith("argsort") for operator in operators)
    expected = model(ids)
    outputs, compilation = compiled(model, ids, 5)
    torch.testing.assert_close(outputs, expected)
    assert chunked(compilation) == 1


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.sampled(every=14)
def test_other_routing_is_in_no_region_and_returns_the_same(name: str) -> None:
    model, ids = token_model(REFUSED[name])
    # Rows by their index are detected only when a region is cut, which is then refused.
    if name != "rows by their place":
        assert not any(GROUPED in operators for operators in regions(hybrid(model, ids).module).values())
    expected = model(ids)
    chunked_outputs, _ = compiled(model, ids, 5)
    torch.testing.assert_close(chunked_outputs, expected)


def _shared_sort(model: TokenModel, ids: torch.Tensor) -> Any:
    """Two blocks with one order of rows, and attention-like work between them."""
    x = model.embed(ids).flatten(0, 1)
    flat = model.router(x).topk(TOP_K, dim=-1).indices.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = torch.histc(flat[order].float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0).to(torch.int32)
    back = torch.argsort(order)
    for _ in range(2):
        rows = torch.ops.transformers.grouped_mm_fallback(x[order // TOP_K], model.experts, ends)
        x = rows[back].view(-1, TOP_K, model.width).sum(1)
        x = x + x.cumsum(0)
    return x


def _two_sorts(model: TokenModel, ids: torch.Tensor) -> Any:
    """Rows are in the order of one sort, and groups in that of another."""
    x = model.embed(ids).flatten(0, 1)
    chosen = model.router(x).topk(TOP_K, dim=-1).indices
    order, reversed_order = (torch.argsort(ids.reshape(-1), stable=True) for ids in (chosen, EXPERTS - 1 - chosen))
    flat = chosen.reshape(-1)
    ends = torch.histc(flat[order].float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0).to(torch.int32)
    rows = torch.ops.transformers.grouped_mm_fallback(x[reversed_order // TOP_K], model.experts, ends)
    return rows[torch.argsort(reversed_order)].view(-1, TOP_K, model.width).sum(1)


def _rows_at_ends(model: TokenModel, ids: torch.Tensor) -> Any:
    """Use counts of rows as indices of tokens."""
    x = model.embed(ids).flatten(0, 1)
    flat = model.router(x).topk(TOP_K, dim=-1).indices.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = torch.histc(flat[order].float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0).to(torch.int64)
    return model.mlp(x) + x.repeat(TOP_K + 1, 1)[ends].sum(0)


def _rows_without_ends(model: TokenModel, ids: torch.Tensor) -> Any:
    """Compute the same number of rows for each expert, as in a batch of sequences."""
    x = model.mlp(model.embed(ids))
    rows = torch._grouped_mm(x.to(torch.bfloat16), model.experts.to(torch.bfloat16))
    return x + rows.to(x.dtype)


@pytest.mark.parametrize("forward", [_rows_at_ends, _rows_without_ends])
def test_unsupported_routing_is_not_chunked(forward: Callable[..., Any]) -> None:
    model, ids = token_model(forward, batch=EXPERTS)
    expected = model(ids)
    outputs, compilation = compiled(model, ids, 5)
    torch.testing.assert_close(outputs, expected)
    assert chunked(compilation) > 0


@pytest.mark.slow
@pytest.mark.parametrize("forward", [_shared_sort, _two_sorts])
def test_a_sort_is_used_only_in_the_region_of_its_rows(forward: Callable[..., Any]) -> None:
    model, ids = token_model(forward)
    assert not any(GROUPED in operators for operators in regions(hybrid(model, ids).module).values())
    expected = model(ids)
    outputs, _ = compiled(model, ids, 5)
    torch.testing.assert_close(outputs, expected)
