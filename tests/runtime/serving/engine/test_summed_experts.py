"""`moepass_summed` computes the same on a CPU in fp32 as the experts of transformers, for any choice of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel
from transformers.integrations.moe import grouped_mm_experts_forward

from moepass.runtime.offload.offload import find_expert_modules
from moepass.runtime.serving.engine import summed_experts
from moepass.runtime.serving.engine.summed_experts import (
    SUMMED_EXPERTS_NAME,
    summed_experts_forward,
    use_summed_experts,
)
from tests.helpers.models.tiny import tiny_model

# gpt_oss has biases and transposed banks, so transformers computes its experts.
FAMILIES = ("qwen3_moe", "granitemoe", "gpt_oss")


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {family: tiny_model(family, experts_implementation="grouped_mm") for family in FAMILIES}


def _experts(model: PreTrainedModel) -> Any:
    return next(iter(find_expert_modules(model).values()))


@given(st.sampled_from(FAMILIES), st.integers(0, 40), st.integers(1, 4), st.integers(0, 1 << 30), st.booleans())
def test_results_are_those_of_transformers(
    models: dict[str, PreTrainedModel], family: str, tokens: int, choices: int, seed: int, all_same: bool
) -> None:
    experts = _experts(models[family])
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts.num_experts, generator=generator)
    if all_same:
        scores = scores[:1].expand(tokens, -1)
    weights, chosen = scores.topk(min(choices, experts.num_experts))
    states = torch.randn(tokens, models[family].config.hidden_size, generator=generator)
    with torch.no_grad():
        ours, theirs = (
            compute(experts, states, chosen, weights)
            for compute in (summed_experts_forward, grouped_mm_experts_forward)
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_it_cannot_do_goes_to_transformers(
    models: dict[str, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> torch.Tensor:
        raise LookupError

    monkeypatch.setattr(summed_experts, "grouped_mm_experts_forward", refuse)
    plain, biased = (_experts(models[family]) for family in ("qwen3_moe", "gpt_oss"))
    width = models["qwen3_moe"].config.hidden_size
    chosen, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with torch.no_grad():
        assert summed_experts_forward(plain, torch.ones(3, width), chosen, weights).shape == (3, width)
    with torch.no_grad(), pytest.raises(LookupError):
        summed_experts_forward(plain, torch.ones(3, width).bfloat16(), chosen, weights)
    with torch.no_grad(), pytest.raises(LookupError):
        summed_experts_forward(biased, torch.ones(3, models["gpt_oss"].config.hidden_size), chosen, weights)
    with pytest.raises(LookupError):  # gradients
        summed_experts_forward(plain, torch.ones(3, width), chosen, weights)


def test_a_model_that_was_told_another_way_keeps_it(models: dict[str, PreTrainedModel]) -> None:
    for before, after in (("eager", "eager"), ("grouped_mm", SUMMED_EXPERTS_NAME)):
        model = tiny_model("qwen3_moe", experts_implementation=before)
        use_summed_experts(model)
        assert model.config._experts_implementation == after
