"""Products with masks of one-hot vectors become lookups with the same sums, for all supported masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moepass.passes.graph.nodes import is_call
from moepass.passes.ir.protocol import PassResult
from moepass.passes.slots.look_up_one_hots import look_up_one_hots
from tests.helpers.graphs.compared_models import compare_with_dynamic_rows, compare_with_model

EXPERTS, HIDDEN = 5, 4
aten = torch.ops.aten
Tensor = torch.Tensor


class Layer(nn.Module):
    """A layer in which `mask` returns a mask [tokens, experts, capacity], and `write` fills and reads slots with it."""

    def __init__(self, mask: Callable[..., Tensor], write: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.mask, self.write = mask, write or gshard

    def forward(self, scores: Tensor, hidden: Tensor, capacity: Tensor) -> Tensor:
        return self.write(self.mask(scores.softmax(1), capacity.shape[0]), hidden)


def gshard(combine: Tensor, hidden: Tensor) -> Tensor:
    slots = torch.einsum("sec,sm->ecm", combine.bool().to(hidden.dtype), hidden)
    return torch.einsum("sec,ecm->sm", combine.to(hidden.dtype), slots.sin())


def by_matmul(combine: Tensor, hidden: Tensor) -> Tensor:
    """Dispatch and combine by matmul, as DeepSpeed does without einsum."""
    tokens, experts, capacity = combine.shape
    slots = torch.matmul(combine.bool().to(hidden.dtype).reshape(tokens, -1).t(), hidden)
    slots = slots.reshape(experts, capacity, -1).sin()
    return torch.matmul(combine.reshape(tokens, -1), slots.reshape(-1, slots.shape[-1]))


def on_the_right(combine: Tensor, hidden: Tensor) -> Tensor:
    flat = combine.flatten(1)
    slots = torch.mm(hidden.t(), (flat != 0).float()).sin()
    return torch.mm(slots, flat.t()).t()


def capacity_first(combine: Tensor, hidden: Tensor) -> Tensor:
    slots = torch.einsum("sec,sm->cem", (combine > 0).to(hidden.dtype), hidden)
    return torch.einsum("sec,cem->sm", combine, slots.sin())


def weighed_both_ways(combine: Tensor, hidden: Tensor) -> Tensor:
    return torch.einsum("sec,ecm->sm", combine, torch.einsum("sec,sm->ecm", combine, hidden))


WRITINGS = {
    writing.__name__: writing for writing in (gshard, by_matmul, on_the_right, capacity_first, weighed_both_ways)
}


def _located(scores: Tensor, chosen: Tensor, capacity: int, taken: Tensor | int = 0) -> tuple[Tensor, Tensor]:
    """Return the mask [tokens, experts] of pairs that have a slot, and the slot of each pair."""
    mask = F.one_hot(chosen, EXPERTS)
    places = torch.cumsum(mask, dim=0) - 1 + taken
    mask = mask * (places < capacity)
    return mask, (places * mask).sum(dim=1)


def places_mask(places: Tensor, capacity: int) -> Tensor:
    """Return one-hot vectors as F.one_hot does, which turns the capacity into a constant when captured."""
    return (places.unsqueeze(-1) == torch.arange(capacity)).float()


def top_1(scores: Tensor, capacity: int) -> Tensor:
    mask, places = _located(scores, scores.argmax(1), capacity)
    return torch.einsum("se,sc->sec", scores * mask.float(), places_mask(places, capacity))


def top_2(scores: Tensor, capacity: int) -> Tensor:
    """Return top-2 weights as fairscale and DeepSpeed compute them."""
    first = scores.argmax(1)
    second = scores.masked_fill(F.one_hot(first, EXPERTS).bool(), float("-inf")).argmax(1)
    taken = F.one_hot(first, EXPERTS).sum(0, keepdim=True)
    masks, places = zip(*(_located(scores, *of) for of in ((first, capacity), (second, capacity, taken))), strict=True)
    gates = [torch.einsum("se,se->s", scores, mask.float()) for mask in masks]
    total = torch.clamp(gates[0] + gates[1], min=torch.finfo(scores.dtype).eps)
    combine = [
        torch.einsum(
            "se,sc->sec", torch.einsum("s,se->se", gate / total, mask.float()), places_mask(position, capacity)
        )
        for gate, mask, position in zip(gates, masks, places, strict=True)
    ]
    return combine[0] + combine[1]


def same_places(scores: Tensor, capacity: int) -> Tensor:
    """Three terms of each token in few slots: some slots are equal, and one term cancels another."""
    combine = scores.new_zeros(len(scores), EXPERTS, capacity)
    for number, sign in enumerate((1.0, -1.0, 1.0)):
        chosen = scores.topk(3, dim=1)[1][:, number] // 2
        weight = (scores[:, :1] * sign).unsqueeze(-1) * F.one_hot(chosen, EXPERTS).unsqueeze(-1)
        combine = combine + weight * places_mask(torch.arange(len(scores)) % 2, capacity).unsqueeze(1)
    return combine


def beyond_the_last(scores: Tensor, capacity: int) -> Tensor:
    """Slots beyond the last, and an expert that does not exist, are zeros."""
    every = torch.arange(capacity)
    places = (torch.arange(len(scores)) - 2).unsqueeze(1)
    experts = (scores.argmax(1, keepdim=True) + 1) == torch.arange(EXPERTS)
    return (experts.to(scores.dtype) * scores).unsqueeze(2) * (places == every).to(scores.dtype).unsqueeze(1)


MASKS = {mask.__name__: mask for mask in (top_1, top_2, same_places, beyond_the_last)}


def _inputs(tokens: int, capacity: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, EXPERTS, generator=generator)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    return [scores, hidden, torch.zeros(capacity)]


def _large_gemms(result: PassResult) -> list[Any]:
    return [
        node for node in result.module.graph.nodes
        if is_call(node, aten.mm.default) or (is_call(node, aten.bmm.default) and node.meta["val"].shape[0] == 1)
    ]  # fmt: skip


CASES = [(mask, gshard.__name__) for mask in MASKS] + [(top_1.__name__, writing) for writing in WRITINGS]


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize(("mask", "writing"), CASES)
def test_a_mask_is_lookups(mask: str, writing: str) -> None:
    model = Layer(MASKS[mask], WRITINGS[writing])
    result = compare_with_dynamic_rows(
        model, (look_up_one_hots,), [_inputs(7, 3), _inputs(12, 2, 1), _inputs(40, 40, 2)], tolerance=1e-5
    )
    assert len(result.matches) == 2
    assert _large_gemms(result) == []
    masks = [
        node
        for node in result.module.graph.nodes
        if getattr(node.meta.get("val"), "ndim", 0) == 3 and "eq" in node.name
    ]
    assert masks == []


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("writing", WRITINGS)
def test_masks_in_other_writings(mask: str, writing: str) -> None:
    model = Layer(MASKS[mask], WRITINGS[writing])
    result = compare_with_dynamic_rows(model, (look_up_one_hots,), [_inputs(7, 3), _inputs(9, 11, 1)], tolerance=1e-5)
    assert len(result.matches) == 2


@pytest.mark.slow
def test_with_fixed_sizes() -> None:
    result = compare_with_model(Layer(top_2), (look_up_one_hots,), [_inputs(7, 3)], rtol=1e-5, dynamic=False)
    assert len(result.matches) == 2


@pytest.mark.slow
def test_sums_in_bfloat16_are_rounded_once() -> None:
    """The lookups are closer to the sum in float64 than products that are rounded one by one."""
    inputs = [_inputs(64, 40, 3, torch.bfloat16)]
    result = compare_with_dynamic_rows(Layer(top_2), (look_up_one_hots,), inputs, tolerance=8e-3)
    assert len(result.matches) == 2


@pytest.mark.slow
def test_a_row_that_is_not_finite_stays_where_it_is_looked_up() -> None:
    scores, hidden, capacity = _inputs(7, 7)
    hidden[3] = torch.nan
    layer = Layer(top_1)
    finite = hidden.nan_to_num()
    expected = layer(scores, finite, capacity)
    inputs = [scores, hidden, capacity]
    result = compare_with_dynamic_rows(layer, (look_up_one_hots,), [inputs], tolerance=1e-5, compare=False)
    (output,) = result.module(*_graph_arguments(result, inputs))
    is_finite = torch.arange(7) != 3
    torch.testing.assert_close(output[is_finite], expected[is_finite])
    assert output[3].isnan().all()


def _graph_arguments(result: PassResult, inputs: list[Tensor]) -> list[Any]:
    """Return the graph's arguments: `inputs` in the graph's order, and 7 for each size."""
    arguments: list[Any] = []
    for node in result.module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                arguments.append(next(tensor for tensor in inputs if _has_layout_of(tensor, value)))
            else:
                arguments.append(7)
    return arguments


def _has_layout_of(tensor: Tensor, value: Tensor) -> bool:
    return tensor.dim() == value.dim() and (value.dim() == 1 or tensor.shape[1] == value.shape[1])


def _count_from(start: int, capacity: int) -> Tensor:
    return torch.arange(start, start + capacity)


def _compared(scores: Tensor, counting: Tensor) -> Tensor:
    mask, places = _located(scores, scores.argmax(1), len(counting))
    return (scores * mask).unsqueeze(2) * (places.unsqueeze(1) == counting).float().unsqueeze(1)


# Tensors that look like masks of one-hot vectors, but are not: they stay unchanged.
KEPT: dict[str, Callable[[Tensor, int], Tensor]] = {
    "counted from 1": lambda scores, capacity: _compared(scores, _count_from(1, capacity)),
    "counted by two": lambda scores, capacity: _compared(scores, torch.arange(0, 2 * capacity, 2)),
    "counted down": lambda scores, capacity: _compared(scores, torch.arange(capacity).flip(0)),
    "a number everywhere": lambda scores, capacity: top_1(scores, capacity) + 0.125,
    "something dense": lambda scores, capacity: top_1(scores, capacity) + scores.unsqueeze(2),
    "places of another token": lambda scores, capacity: top_1(scores, capacity).flip(0),
    "no place": lambda scores, capacity: 1 - top_1(scores, capacity),
    "numbers that are not whole": lambda scores, capacity: (
        scores.unsqueeze(2) * (scores[:, :1] * 4 == torch.arange(capacity)).float().unsqueeze(1)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_other_masks_are_unchanged(name: str) -> None:
    result = compare_with_dynamic_rows(
        Layer(KEPT[name], weighed_both_ways), (look_up_one_hots,), [_inputs(7, 3), _inputs(6, 9, 1)], tolerance=1e-5
    )
    assert result.matches == ()
