"""The tiny models of other tests can be built, are deterministic, and have no weights that hide a mistake."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.models import tiny

FAMILIES = sorted(tiny.TINY_FAMILIES)


def _logits(model: PreTrainedModel, **sizes: int) -> torch.Tensor:
    with torch.no_grad():
        output = model(**tiny.tiny_inputs(model, **sizes))
    return output.logits if "logits" in output else output[0]


def _record(name: str) -> tiny.ExpertFamily:
    return next(record for record in tiny.discover_expert_families() if record.name == name)


def test_the_table_has_the_promised_families() -> None:
    promised = (
        "qwen3_moe qwen2_moe mixtral olmoe deepseek_v3 gpt_oss glm4_moe phimoe granitemoe jamba qwen3_next llama4"
    )
    assert set(promised.split()) <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_gives_finite_logits_that_depend_on_the_input(family: str) -> None:
    model = tiny.tiny_model(family)
    logits = _logits(model)
    assert not model.training
    assert not model.config.use_cache
    assert logits.shape == (2, 12, 128)
    assert bool(logits.isfinite().all())
    # Each logit changes from position to position, so the answer is not constant.
    assert float(logits.std(dim=1).min()) > 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_finite_and_not_constant(family: str) -> None:
    model = tiny.tiny_model(family)
    tensors = dict(model.named_parameters())
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name)
    for name, tensor in tensors.items():
        assert bool(tensor.isfinite().all()), name
        assert float(tensor.std()) > 0.01, name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_seed_decides_the_weights_and_the_global_state_is_left_alone(family: str) -> None:
    torch.manual_seed(1)
    first = tiny.tiny_model(family, seed=3).state_dict()
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    second = tiny.tiny_model(family, seed=3).state_dict()
    different = tiny.tiny_model(family, seed=4).state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not any(torch.equal(value, different[name]) for name, value in first.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_runs(family: str) -> None:
    assert bool(_logits(tiny.tiny_model(family, dtype=torch.bfloat16)).isfinite().all())


def test_routing_bias_stays_in_float32_as_in_a_loaded_model() -> None:
    model = tiny.tiny_model("deepseek_v3", dtype=torch.bfloat16)
    types = {name.rsplit(".", 1)[-1]: buffer.dtype for name, buffer in model.named_buffers()}
    assert types["e_score_correction_bias"] == torch.float32
    assert model.get_parameter("model.layers.1.mlp.experts.gate_up_proj").dtype == torch.bfloat16


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_expert_implementations_agree(implementation: str) -> None:
    expected = _logits(tiny.tiny_model("gpt_oss"))
    actual = _logits(tiny.tiny_model("gpt_oss", experts_implementation=implementation))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_families_keep_their_structure() -> None:
    jamba = tiny.tiny_model("jamba")
    kinds = [[type(child).__name__ for child in layer.children()] for layer in jamba.model.layers]
    assert [any("Mamba" in kind for kind in layer) for layer in kinds] == [True, True, False, True]
    assert [any("Sparse" in kind for kind in layer) for layer in kinds] == [False, True, False, True]
    assert tiny.tiny_model("qwen3_next").config.layer_types.count("full_attention") == 1
    assert tiny.tiny_model("llama4").config.moe_layers == [1, 3]
    assert tiny.tiny_model("gpt_oss").model.layers[0].self_attn.sinks.numel() == 4


def test_overrides_reach_the_configuration() -> None:
    assert tiny.tiny_model("mixtral", num_local_experts=4).model.layers[0].mlp.experts.num_experts == 4
    longer = tiny.tiny_model("gpt_oss", num_hidden_layers=5).config
    assert longer.layer_types == ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]


def test_unknown_family_is_named_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"'mixtrl'.*jamba.*mixtral"):
        tiny.tiny_model("mixtrl")


def test_inputs() -> None:
    model = tiny.tiny_model("mixtral")
    ids = tiny.tiny_inputs(model, batch=3, seq=5)["input_ids"]
    assert ids.shape == (3, 5)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, tiny.tiny_inputs(model, batch=3, seq=5)["input_ids"])
    assert not torch.equal(ids, tiny.tiny_inputs(model, batch=3, seq=5, seed=1)["input_ids"])
    with pytest.raises(ValueError, match="seq=0"):
        tiny.tiny_inputs(model, seq=0)


def test_discovery_finds_the_known_families_with_their_layouts() -> None:
    families = {record.name: record for record in tiny.discover_expert_families()}
    # The experts of llama4 do not use the interface.
    assert set(FAMILIES) - {"llama4"} <= set(families)
    assert "llama4" not in families
    assert families["mixtral"].model_class == "MixtralForCausalLM"
    assert families["mixtral"].experts == (tiny.ExpertsClass("MixtralExperts"),)
    assert families["gpt_oss"].experts == (
        tiny.ExpertsClass("GptOssExperts", is_concatenated=False, is_transposed=True, has_bias=True),
    )
    assert families["nemotron_h"].experts[0].has_gate is False


def test_discovered_models_run_with_an_expert_class_each() -> None:
    # Only a few of each kind; the test of the pass runs all of them.
    for name in ("mixtral", "nemotron_h", "aria", "qwen3_vl_moe"):
        record = _record(name)
        model = tiny.discovered_tiny_model(record)
        used = {type(module).__name__ for module in model.modules()}
        assert used & {experts.name for experts in record.experts}, name
        assert bool(_logits(model).isfinite().all()), name


def test_a_family_that_cannot_be_built_is_refused_with_the_reason() -> None:
    broken = dataclasses.replace(_record("mixtral"), name="broken", model_class="NoSuchModel")
    with pytest.raises(tiny.TinyModelUnavailableError, match=re.escape("broken: AttributeError")):
        tiny.discovered_tiny_model(broken)
    with pytest.raises(tiny.TinyModelUnavailableError, match="number of attention heads"):
        tiny.discovered_tiny_model(_record("deepseek_ocr2"), num_attention_heads=5)
