"""Sizes read from configs: every parameter of every family is counted, and presets have their published sizes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from moepass.models.errors import InputError
from moepass.models.formulas.layers import expert_parameters, head_flops, model_flops, model_parameters
from moepass.models.formulas.memory import bank_bytes
from moepass.models.sizes.architecture import ATTENTION_KINDS, Architecture, Attention, Experts, Layer, short_dtype
from moepass.models.sizes.families import FAMILIES, from_config
from moepass.models.sizes.presets import preset, preset_config, preset_names, presets_source
from tests.helpers.graphs.error_fields import refused
from tests.helpers.graphs.tiny_configs import meta_model, tiny_config
from tests.helpers.models.tiny import TINY_FAMILIES, discover_expert_families, discovered_tiny_model

# Published total and active parameters, and which tables the publisher counts as active in addition to the layers.
PUBLISHED = {
    "qwen3-235b-a22b": (235e9, 22e9, {}),
    "qwen3-30b-a3b": (30.5e9, 3.3e9, {}),
    "mixtral-8x7b": (46.7e9, 12.9e9, {}),
    "deepseek-v3": (671e9, 37e9, {}),
    "gpt-oss-120b": (116.83e9, 5.13e9, {"embedding": False}),
    "olmoe-1b-7b": (6.92e9, 1.28e9, {}),
    "glm-4.5-air": (106e9, 12e9, {"embedding": False, "head": False}),
}


def count_parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def active_parameters(architecture: Architecture, embedding: bool = True, head: bool = True) -> int:
    """Return the parameters that one token uses, for presets, whose embedding and head differ."""
    hidden = architecture.hidden
    idle = sum(
        (layer.experts.count - layer.experts.top_k) * expert_parameters(layer.experts, hidden)
        for layer in architecture.layers
        if layer.experts is not None
    )
    return model_parameters(architecture) - idle - architecture.vocab * hidden * (2 - embedding - head)


def routed_parameters(model: PreTrainedModel) -> int:
    return sum(value.numel() for name, value in model.named_parameters() if ".experts." in name)


def read_routed(architecture_config: PreTrainedConfig) -> int:
    architecture = from_config(architecture_config, dtype="fp8")
    return sum(
        count * bank_bytes(layer.experts, architecture.hidden, "fp8")
        for layer, count in architecture.layer_counts.items()
        if layer.experts is not None
    )


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_parameter_of_a_family_is_accounted_for(family: str) -> None:
    config = tiny_config(family)
    model = meta_model(config)
    assert model_parameters(from_config(config)) == count_parameters(model)
    assert read_routed(config) == routed_parameters(model)


VARIANTS: list[tuple[str, dict[str, object]]] = [
    ("qwen3_moe", {"tie_word_embeddings": True, "attention_bias": True, "mlp_only_layers": [1]}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 8}),
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True, "n_shared_experts": 2}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}),
    ("gpt_oss", {"attention_bias": False}),
    ("jamba", {"mamba_proj_bias": True, "mamba_conv_bias": False}),
    ("olmoe", {"attention_bias": True, "num_key_value_heads": 4}),
    ("qwen3_next", {"attention_bias": True, "decoder_sparse_step": 2}),
    ("llama4", {"attention_bias": True, "interleave_moe_layer_step": 1}),
    ("phimoe", {"attention_bias": False, "lm_head_bias": False}),
    ("granitemoe", {"attention_bias": True, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_what_configs_switch_on_and_off_is_accounted_for(family: str, changes: dict[str, object]) -> None:
    config = tiny_config(family, **changes)
    assert model_parameters(from_config(config)) == count_parameters(meta_model(config))


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_the_parameters_that_they_are_known_for(name: str) -> None:
    total, active, counted = PUBLISHED[name]
    architecture = preset(name)
    assert model_parameters(architecture) == pytest.approx(total, rel=0.02)
    assert active_parameters(architecture, **counted) == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", preset_names())
def test_model_flops_are_twice_the_active_parameters_for_short_texts(name: str) -> None:
    """Check the rule of thumb 2·n·parameters, which ignores the embedding and the length of texts."""
    architecture = preset(name)
    flops = model_flops(architecture, 1, 16) + head_flops(architecture, 15)
    assert flops == pytest.approx(2 * 16 * active_parameters(architecture, embedding=False), rel=0.01)


@pytest.mark.parametrize("name", preset_names())
def test_presets_cut_short_are_models(name: str) -> None:
    config = preset_config(name, layers=2)
    architecture = from_config(config, name=name, dtype="bf16")
    assert model_parameters(architecture) == count_parameters(meta_model(config))
    assert architecture.moe_layers
    complete = preset(name)
    assert set(architecture.layers) == set(complete.layers)
    assert complete.typical_moe_layer.experts == architecture.typical_moe_layer.experts
    assert complete.dtype == "bf16"


def test_published_figures_cover_every_preset() -> None:
    assert set(PUBLISHED) == set(preset_names())
    assert "config" in presets_source()


def test_layers_of_mixed_models_differ_where_they_should() -> None:
    kinds = [layer.attention.kind for layer in from_config(tiny_config("qwen3_next")).layers]
    assert kinds == ["linear"] * 3 + ["full"]
    jamba = from_config(tiny_config("jamba"))
    assert [layer.attention.kind for layer in jamba.layers] == ["state_space"] * 2 + ["full", "state_space"]
    assert jamba.moe_layers == (1, 3)
    assert [layer.attention.window for layer in from_config(tiny_config("gpt_oss")).layers] == [4, None, 4, None]
    llama = from_config(tiny_config("llama4"))
    assert [layer.attention.kind for layer in llama.layers] == ["chunked"] * 3 + ["full"]
    assert from_config(tiny_config("deepseek_v3")).moe_layers == (1, 2)
    assert from_config(tiny_config("mixtral", sliding_window=7)).layers[0].attention.window == 7


def test_equal_layers_are_one_kind() -> None:
    counts = preset("deepseek-v3").layer_counts
    assert sorted(counts.values()) == [3, 58]
    assert preset("deepseek-v3").typical_moe_layer.experts is not None
    assert list(preset("gpt-oss-120b").layer_counts.values()) == [18, 18]


def test_the_text_part_of_a_config_of_several_parts_is_read() -> None:
    complete = transformers.Llama4Config(text_config=tiny_config("llama4").to_dict())
    assert from_config(complete).layers == from_config(tiny_config("llama4")).layers


def test_dtypes_have_one_short_name() -> None:
    assert short_dtype(torch.bfloat16) == short_dtype("bfloat16") == short_dtype("bf16") == "bf16"
    config = tiny_config("mixtral")
    config.dtype = torch.float16
    assert from_config(config).dtype == "fp16"
    assert from_config(config, dtype="fp8", name="mine") == dataclasses.replace(
        from_config(config), dtype="fp8", name="mine"
    )
    with refused(InputError, name="dtype", value="int64"):
        short_dtype(torch.int64)


def test_errors_name_what_is_wrong() -> None:
    with refused(InputError, name="model_type", value="llama", expected=tuple(FAMILIES)):
        from_config(transformers.LlamaConfig())
    config = transformers.PreTrainedConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4)
    config.model_type = "olmoe"
    with refused(InputError, name="model_type", value="olmoe"):
        from_config(config)
    with refused(InputError, name="preset", value="qwen3-999b", expected=tuple(preset_names())):
        preset("qwen3-999b")
    with refused(InputError, name="layers", value=95, expected=range(1, 95)):
        preset_config("qwen3-235b-a22b", layers=95)
    with refused(InputError, name="top_k", value=9, expected=range(1, 9)):
        Experts(8, 9, 16)
    with refused(InputError, name="kind", value="diagonal", expected=tuple(ATTENTION_KINDS)):
        Attention("diagonal", 1, 1, 1, 1)
    with refused(InputError, name="kind", value="sliding"):
        Attention("sliding", 1, 1, 1, 1)
    with refused(InputError, name="dense_width", value=None):
        Layer(Attention("full", 1, 1, 1, 1), None, None)


# Families without a hand-written tiny configuration, by folder name; they share a reader with a family that has one.
SHARING = ["deepseek_v2", "flex_olmo", "minimax_m2", "mistral4", "qwen3_vl_moe"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_families_that_share_a_reader_are_accounted_for_too(name: str) -> None:
    (record,) = [family for family in discover_expert_families() if family.name == name]
    model = discovered_tiny_model(record)
    assert model_parameters(from_config(model.config)) == count_parameters(model)


def test_every_reader_is_tested() -> None:
    tiny = {str(tiny_config(family).model_type) for family in TINY_FAMILIES}
    assert tiny | {family.replace("qwen3_vl_moe", "qwen3_vl_moe_text") for family in SHARING} == set(FAMILIES)
