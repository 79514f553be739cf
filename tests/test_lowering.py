"""Segments compiled by Inductor: each test here was once a wrong result or a crash."""

from __future__ import annotations

import pytest
import torch

import moepass
from moepass.models.tiny import tiny_inputs, tiny_model


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
def test_depthwise_convolutions_keep_their_layout(no_grad: None) -> None:
    """Inductor's layout optimisation made jamba's second convolution read the wrong elements."""
    model = tiny_model("jamba")
    inputs = tiny_inputs(model, batch=3, seq=17)
    expected = model(**inputs).logits
    moepass.offload_experts(model)
    assert relative_difference(torch.compile(model, backend="asyncep")(**inputs).logits, expected) <= 1e-5


def test_two_inputs_whose_sizes_turn_out_equal(no_grad: None) -> None:
    """Ids and mask each bring symbols of their own, which the model then finds equal."""
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    moepass.offload_experts(model)
    compiled = torch.compile(model, backend="asyncep")
    with moepass.record_compilations() as compilations:
        for batch, seq in ((3, 17), (5, 9), (2, 30)):
            ids = tiny_inputs(model, batch, seq)["input_ids"]
            mask = torch.ones_like(ids)
            mask[0, seq // 2 :] = 0
            expected = model(input_ids=ids, attention_mask=mask).logits
            for tensor in (ids, mask):
                torch._dynamo.mark_dynamic(tensor, 0)
                torch._dynamo.mark_dynamic(tensor, 1)
            assert relative_difference(compiled(input_ids=ids, attention_mask=mask).logits, expected) <= 1e-5
    assert len(compilations) == 1


def test_a_constant_in_a_segment(no_grad: None) -> None:
    """A tensor made inside the model becomes a constant of the graph, real although the rest is fake."""
    table = torch.arange(6.0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0]) + table[:3]

    compiled = torch.compile(forward, backend="asyncep", options={"lower": "eager"})
    x = torch.randn(4, 3)
    assert torch.equal(compiled(x), forward(x))
