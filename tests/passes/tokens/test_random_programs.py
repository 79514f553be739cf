"""Random sequences of operations, some of which mix tokens, return the same with and without chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.helpers.graphs.token_models import EXPERTS, TOP_K, TokenModel, compiled, token_model

Step = Callable[[TokenModel, torch.Tensor], torch.Tensor]


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def _attention(model: TokenModel, x: torch.Tensor) -> torch.Tensor:
    queries, keys = _heads(model.up(x)), _heads(model.down(x))
    return F.scaled_dot_product_attention(queries, keys, keys, is_causal=True).transpose(1, 2).flatten(2)


def _written_attention(model: TokenModel, x: torch.Tensor) -> torch.Tensor:
    heads = _heads(model.up(x)).flatten(0, 1)
    mixed = torch.bmm(torch.bmm(heads, heads.transpose(1, 2)).softmax(-1), heads)
    return mixed.unflatten(0, (x.shape[0], 2)).transpose(1, 2).reshape(x.shape)


def _first_written(model: TokenModel, x: torch.Tensor) -> torch.Tensor:
    changed = x.clone()
    changed[:, 0] = 0.25
    return changed


def _experts(model: TokenModel, x: torch.Tensor, top_k: int = TOP_K, over: int = -1) -> torch.Tensor:
    rows = x.reshape(-1, model.width)
    weights, chosen = model.router(rows).softmax(over).topk(top_k, dim=-1)
    ids = chosen.reshape(-1)
    order = torch.argsort(ids, stable=True)
    ends = torch.histc(ids[order].float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0).to(torch.int32)
    sorted_rows = torch.ops.transformers.grouped_mm_fallback(rows[order // top_k], model.experts, ends)
    back = sorted_rows[torch.argsort(order)].view(-1, top_k, model.width)
    result: torch.Tensor = (back * weights[..., None]).sum(1).view(x.shape)
    return result


STEPS: dict[str, Step] = {
    "dense": lambda model, x: model.mlp(x),
    "dense, flat": lambda model, x: model.up(x.flatten(0, 1)).view(x.shape),
    "dense, time first": lambda model, x: model.up(x.transpose(0, 1)).transpose(0, 1),
    "heads": lambda model, x: _heads(x).softmax(-1).transpose(1, 2).flatten(2),
    "norm": lambda model, x: F.layer_norm(x, (model.width,)),
    "attention": _attention,
    "attention, written out": _written_attention,
    "experts": _experts,
    "one expert, time first": lambda model, x: _experts(model, x.transpose(0, 1), 1).transpose(0, 1),
    "experts, weighed over tokens": lambda model, x: _experts(model, x, TOP_K, 0),
    "positions": lambda model, x: x * torch.arange(x.shape[1])[:, None],
    "numbers of sequences": lambda model, x: x + torch.arange(x.shape[0])[:, None, None],
    "other positions": lambda model, x: x * model.of_position[: x.shape[1]],
    "shifted": lambda model, x: F.pad(x[:, :-1], (0, 0, 1, 0)),
    "rolled": lambda model, x: x + x.roll(1, 1),
    "flipped sequences": lambda model, x: x.flip(0),
    "running sum": lambda model, x: x.cumsum(1) * 0.5,
    "softmax over tokens": lambda model, x: x.softmax(1),
    "norm over tokens": lambda model, x: F.normalize(x, dim=1, eps=1e-3),
    "mean over tokens": lambda model, x: x - x.mean(1, keepdim=True),
    "mean over sequences": lambda model, x: x - x.mean(0, keepdim=True),
    "last token": lambda model, x: x + x[:, -1:],
    "first token written": _first_written,
    "sorted tokens": lambda model, x: x.gather(1, x.argsort(dim=1, stable=True)),
    "looked up": lambda model, x: x[:, torch.arange(x.shape[1]).flip(0)],
    "all sizes in another order": lambda model, x: x.permute(2, 0, 1).reshape(x.shape),
    "sequences meet": lambda model, x: torch.einsum("btw,ctw->btc", x, x).sum(-1, keepdim=True) * 0.01 + x,
}


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=8),
    *(st.integers(1, most) for most in (4, 7)),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 9),
    st.booleans(),
)
@settings(max_examples=10)
def test_random_programs(names: list[str], batch: int, length: int, width: int, chunk: int, dynamic: bool) -> None:
    def forward(model: TokenModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = model.embed(ids)
        for name in names:
            x = STEPS[name](model, x)
        return x, x[:, -1].argmax(-1)

    torch._dynamo.reset()
    model, ids = token_model(forward, batch, length, width)
    model.double()
    expected = model(ids)
    outputs, _ = compiled(model, ids, chunk, dynamic=dynamic)
    torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-9)
