"""The head alone computes the same as the complete model, for heads that scale, cap and project logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForTokenClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoeForSequenceClassification,
    Qwen3MoeModel,
)

from moepass.models.errors import InputError
from moepass.runtime.serving.engine.model_head import ModelHead

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}


def qwen(kind: type[PreTrainedModel], **changes: Any) -> PreTrainedModel:
    return kind(Qwen3MoeConfig(**{**SIZES, **EXPERTS, **changes}))


MODELS = {
    "no backbone of the name that it announces": lambda: Llama4ForCausalLM(
        Llama4TextConfig(**{**SIZES, "intermediate_size_mlp": 16}, num_local_experts=2, pad_token_id=0)
    ),
    "plain": lambda: qwen(Qwen3MoeForCausalLM),
    "capped": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=3.0, query_pre_attn_scalar=8)),
    "scaled": lambda: GraniteMoeForCausalLM(
        GraniteMoeConfig(**SIZES, logits_scaling=4.0, num_local_experts=4, num_experts_per_tok=2)
    ),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_of_chosen_states_are_those_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    head = ModelHead(model)
    ids = torch.randint(0, 32, (2, 5))
    states = head.backbone(input_ids=ids, use_cache=False)[0]
    assert (head.kind, head.width) == ("tokens", 32)
    torch.testing.assert_close(head(states[0, [1, 4]]), model(input_ids=ids, use_cache=False).logits[0, [1, 4]])


@pytest.mark.parametrize("pad", [None, 0, 1])
@torch.no_grad()
def test_scores_of_classes_are_those_of_the_last_token(pad: int | None) -> None:
    torch.manual_seed(0)
    model = qwen(Qwen3MoeForSequenceClassification, num_labels=3, pad_token_id=pad).eval()
    head = ModelHead(model)
    ids = torch.randint(2, 32, (1, 5))
    states = head.backbone(input_ids=ids, use_cache=False)[0]
    assert (head.kind, head.width) == ("classes", 3)
    torch.testing.assert_close(head(states[0, 3:])[1:], model(input_ids=ids, use_cache=False).logits)


@torch.no_grad()
def test_a_model_without_a_head_gives_its_states() -> None:
    model = qwen(Qwen3MoeModel).eval()
    head = ModelHead(model)
    states = torch.randn(3, 16)
    assert (head.kind, head.width) == ("states", 16)
    assert head(states) is states


def test_other_heads_are_refused() -> None:
    model = BertForTokenClassification(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32)
    )
    with pytest.raises(InputError) as refused:
        ModelHead(model)
    assert refused.value.value == "BertForTokenClassification"
