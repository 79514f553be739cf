"""Byte counts of fp8 and MXFP4 checkpoints, from their configurations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts
from transformers.utils.quantization_config import FineGrainedFP8Config

from moepass.models.errors import InputError
from moepass.models.formulas.layers import expert_parameters, layer_parameters, model_parameters
from moepass.models.formulas.stored_weights import bank_sizes, dense_bytes, layer_matrices
from moepass.models.sizes.architecture import Architecture
from moepass.models.sizes.families import FAMILIES, from_config
from moepass.models.sizes.presets import preset
from moepass.models.sizes.weight_formats import ATTENTION, DENSE_MLP, SHARED_EXPERTS, WeightFormat, packed_format
from tests.helpers.graphs.tiny_configs import meta_model, tiny_config

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

# Bytes of published checkpoints: the tensors of openai/gpt-oss-120b and of Qwen/Qwen3-30B-A3B, and the weight files of
# deepseek-ai/DeepSeek-V3, whose 91,991 tensors each have an entry in a header.
PUBLISHED_TENSORS = {"gpt-oss-120b": 65_248_815_744, "qwen3-30b-a3b": 61_064_245_248}
PUBLISHED_DEEPSEEK_FILES = 688_586_727_753


def checkpoint_bytes(architecture: Architecture) -> int:
    banks = sum(
        count * bank_sizes(layer.experts, architecture.hidden, "bf16", architecture.stored).home_bytes
        for layer, count in architecture.layer_counts.items()
        if layer.experts is not None
    )
    return banks + dense_bytes(architecture, "bf16", architecture.stored)


@pytest.mark.parametrize(("name", "published"), PUBLISHED_TENSORS.items())
def test_sizes_are_those_of_published_checkpoints_to_the_byte(name: str, published: int) -> None:
    assert checkpoint_bytes(preset(name)) == published


def test_deepseek_with_its_prediction_layer_is_as_large_as_its_files() -> None:
    model = preset("deepseek-v3")
    hidden, vocab = model.hidden, model.vocab
    with_prediction = dataclasses.replace(model, layers=(*model.layers, model.layers[-1]))
    # Two norms and the head's, the projection of both inputs, and copies of the embeddings and of the head: in bf16.
    prediction_bytes = 2 * (3 * hidden + 2 * hidden * hidden + 2 * vocab * hidden)
    corrections = 59 * 256 * 4  # of the router, in fp32; transformers counts them as buffers
    headers = PUBLISHED_DEEPSEEK_FILES - checkpoint_bytes(with_prediction) - prediction_bytes - corrections
    assert 100 * 91_991 < headers < 200 * 91_991


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "glm4_moe", "olmoe"])
def test_fp8_sizes_are_those_of_the_tensors_that_transformers_makes(family: str) -> None:
    # Fused matrices have the scales of their parts only if widths are multiples of the block size.
    width = {"moe_intermediate_size": 128} if family != "olmoe" else {"intermediate_size": 128}
    config = tiny_config(family, hidden_size=320, **width)
    model = meta_model(config)
    with torch.device("meta"):
        replace_with_fp8_linear(
            model, modules_to_not_convert=["lm_head", "gate"], quantization_config=FineGrainedFP8Config()
        )
    tensors = sum(value.nbytes for value in model.parameters() if value.itemsize <= 2)
    scales = sum(value.nbytes for name, value in model.named_parameters() if "scale_inv" in name)
    wide = sum(value.nbytes for value in model.parameters() if value.dtype == torch.float32) - scales
    config.quantization_config = FP8
    # Tiny models are in fp32, published ones in bf16.
    assert checkpoint_bytes(from_config(config)) == tensors + scales + wide // 2


def test_mxfp4_sizes_are_those_of_the_tensors_that_transformers_makes() -> None:
    config = tiny_config("gpt_oss", hidden_size=64, intermediate_size=96)
    with torch.device("meta"):
        experts = Mxfp4GptOssExperts(config)
    packed = [value for name, value in experts.named_parameters() if not name.endswith("bias")]
    biases = [value for name, value in experts.named_parameters() if name.endswith("bias")]
    assert packed
    assert {value.dtype for value in packed} == {torch.uint8}
    # A byte has two elements, and 32 elements share a scale; transformers computes the scales while it loads.
    blocks = sum(value.nbytes for value in packed)
    nbytes = blocks + blocks // 16 + 2 * sum(value.numel() for value in biases)
    config.quantization_config = {"quant_method": "mxfp4"}
    architecture = from_config(config)
    layer = architecture.layers[0]
    assert layer.experts is not None
    sizes = bank_sizes(layer.experts, architecture.hidden, "bf16", architecture.stored)
    assert sizes.home_bytes == sizes.link_bytes == nbytes
    assert sizes.slot_bytes == bank_sizes(layer.experts, architecture.hidden, "bf16").slot_bytes > 3 * nbytes


def test_a_slot_holds_the_stored_bytes_where_kernels_compute_in_that_format() -> None:
    model = preset("deepseek-v3")
    experts = model.typical_moe_layer.experts
    assert experts is not None
    in_fp8 = bank_sizes(experts, model.hidden, "fp8", model.stored)
    in_bf16 = bank_sizes(experts, model.hidden, "bf16", model.stored)
    assert in_fp8.home_bytes == in_fp8.slot_bytes == in_bf16.home_bytes
    assert in_fp8.is_encoded, "values and scales are copied to their places in the slot"
    assert in_fp8.encoded_bytes == in_fp8.link_bytes
    assert model.stored is not None
    short_scales = bank_sizes(experts, model.hidden, "fp8", dataclasses.replace(model.stored, scale_bytes=1))
    assert short_scales.link_bytes < short_scales.slot_bytes == in_fp8.slot_bytes
    assert in_bf16.slot_bytes == 2 * 256 * 3 * 7168 * 2048


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "glm4_moe", "qwen3_moe", "llama4", "gpt_oss"])
def test_the_matrices_of_a_layer_are_all_of_its_matrices(family: str) -> None:
    architecture = from_config(tiny_config(family))
    for layer in architecture.layer_counts:
        matrices = layer_matrices(layer, architecture.hidden, (ATTENTION, SHARED_EXPERTS, DENSE_MLP))
        listed = sum(rows * columns for _, rows, columns in matrices)
        router = 0 if layer.experts is None else architecture.hidden * layer.experts.count
        router += layer.experts.count if layer.experts is not None and layer.experts.router_bias else 0
        routed = layer.experts.count * expert_parameters(layer.experts, architecture.hidden) if layer.experts else 0
        norms = layer.norms + layer.attention.other_parameters
        assert listed + router + routed + norms == layer_parameters(layer, architecture.hidden)


def test_the_matrices_of_other_attention_are_not_known() -> None:
    architecture = from_config(tiny_config("jamba"))
    scans = [layer for layer in architecture.layers if layer.attention.kind == "state_space"]
    with pytest.raises(InputError, match="softmax"):
        list(layer_matrices(scans[0], architecture.hidden, (ATTENTION,)))


@pytest.mark.parametrize("family", ["jamba", "qwen3_next"])
def test_packed_experts_of_models_with_other_attention_are_counted(family: str) -> None:
    architecture, packed = from_config(tiny_config(family)), packed_format("bf16")
    assert dense_bytes(architecture, "bf16", packed) == dense_bytes(architecture, "bf16")


def read(family: str, quantization: Any) -> tuple[WeightFormat | None, str]:
    config = tiny_config(family)
    config.quantization_config = quantization
    architecture = from_config(config)
    return architecture.stored, architecture.unknown_storage


def all_layers(family: str, module: str) -> list[str]:
    return [f"model.layers.{layer}.{module}" for layer in range(tiny_config(family).num_hidden_layers)]


@pytest.mark.parametrize(
    ("left_out", "missing"),
    [
        (["lm_head", "model.layers.*.mlp.gate"], set()),
        (["model.layers.*.self_attn"], {"attention"}),
        (["self_attn"], {"attention"}),
        ([*all_layers("qwen3_moe", "mlp.gate"), *all_layers("qwen3_moe", "input_layernorm")], set()),
        (
            [f"{layer}.{name}_proj" for layer in all_layers("qwen3_moe", "self_attn") for name in "qkvo"],
            {"attention"},
        ),
        (["model.layers.*.mlp"], {"experts"}),
    ],
)
def test_what_a_configuration_leaves_out_stays_wide(left_out: list[str], missing: set[str]) -> None:
    stored, unknown = read("qwen3_moe", {**FP8, "modules_to_not_convert": left_out})
    assert unknown == ""
    assert stored is not None
    assert {"attention", "experts"} - set(stored.parts) == missing


@pytest.mark.parametrize("left_out", [["model.layers.0.self_attn"], ["q_proj"], ["model.layers.1"]])
def test_formats_of_some_layers_or_matrices_alone_are_not_guessed(left_out: list[str]) -> None:
    stored, unknown = read("qwen3_moe", {**FP8, "ignored_layers": left_out})
    assert stored is None
    assert "only a part of its attention" in unknown


@pytest.mark.parametrize(
    ("family", "quantization", "word"),
    [
        ("qwen3_moe", {"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ("qwen3_moe", {**FP8, "expert_dtype": "fp4"}, "not know"),
        ("qwen3_next", FP8, "not know"),
        ("jamba", FP8, "not know"),
    ],
)
def test_formats_whose_sizes_are_not_known_say_so(family: str, quantization: dict[str, Any], word: str) -> None:
    stored, unknown = read(family, quantization)
    assert stored is None
    assert word in unknown


def test_what_is_dequantised_while_it_is_loaded_is_not_stored_otherwise() -> None:
    assert read("qwen3_moe", FineGrainedFP8Config(dequantize=True)) == (None, "")
    assert read("qwen3_moe", None) == (None, "")


def test_other_blocks_and_scales() -> None:
    stored, _ = read("qwen3_moe", {**FP8, "weight_block_size": None})
    assert stored is not None
    assert stored.matrix_bytes(300, 200) == 300 * 200 + 4
    stored, _ = read("qwen3_moe", {**FP8, "weight_block_size": [64, 128], "scale_fmt": "ue8m0"})
    assert stored is not None
    assert stored.matrix_bytes(300, 200) == 300 * 200 + 5 * 2


def test_every_family_can_be_read_with_a_format() -> None:
    for family in ("deepseek_v3", "mixtral", "gpt_oss", "phimoe", "granitemoe", "llama4"):
        config = tiny_config(family)
        config.quantization_config = FP8
        architecture = from_config(config)
        assert config.get_text_config().model_type in FAMILIES
        assert architecture.stored is not None, architecture.unknown_storage
        assert checkpoint_bytes(architecture) < 2 * model_parameters(architecture)
