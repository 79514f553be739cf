"""Attention over a trie in unmodified models: each sequence gets the same as alone in plain transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from moepass.runtime.serving.attention.running_step import RunningStep, running_step
from moepass.runtime.serving.attention.survey import AttentionSurvey, survey_attention
from moepass.runtime.serving.attention.trie_attention import TRIE_ATTENTION_NAME
from moepass.runtime.serving.attention.trie_parts import VisiblePast
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch
from moepass.runtime.serving.cache.block_memory import BlockMemory
from moepass.runtime.serving.engine.plain_outputs import probe_trie
from tests.helpers.graphs.fake_gpu import computed_values, pretended_gpu, put_on_gpu
from tests.helpers.models.tiny import (
    TINY_FAMILIES,
    discover_expert_families,
    discovered_tiny_model,
    tiny_model,
)
from tests.helpers.serving.naive_trie import naive_step

pytestmark = pytest.mark.usefixtures("no_grad")

Sequences = list[tuple[int, ...]]
DISCOVERED = {record.name: record for record in discover_expert_families()}
REFUSED = {
    **dict.fromkeys(("jamba", "qwen3_next", "lfm2_moe", "zaya", "nemotron_h"), "convolution over tokens"),
    "minimax": "layers [1] have no attention that can be replaced: linear_attention",
    "deepseek_v32": "called with indices",
    "deepseek_v4": "4 queries and 5 keys",
    "openai_privacy_filter": "not causal",
}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
# Dense models with special attention: capped scores and windows; query norms and a local rotation.
DENSE: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, sliding_window=6, attn_logit_softcapping=3.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, sliding_window=6, sliding_window_pattern=2),
    "llama": lambda: transformers.LlamaConfig(**SMALL),
}


def _dense(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(DENSE[name]()).eval()
    return model


def _model(name: str) -> PreTrainedModel:
    if name in TINY_FAMILIES:
        return tiny_model(name)
    return _dense(name) if name in DENSE else discovered_tiny_model(DISCOVERED[name])


def _sequences(seed: int = 0, length: int = 24) -> Sequences:
    """Return prompts that share prefixes, each with labels after it, and one prompt that shares nothing."""
    source = random.Random(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(source.randrange(3, 64) for _ in range(source.randint(least, most)))

    shared = tokens(length, length)
    sequences = [tokens(9, 9)]
    for _ in range(3):
        prompt = shared[: source.randint(length // 2, length)] + tokens(1, 12)
        sequences += [prompt, *(prompt + tokens(1, 3) for _ in range(3))]
    return list(dict.fromkeys(sequences))


def _alone(model: PreTrainedModel, sequences: Sequences) -> torch.Tensor:
    return torch.stack([model(input_ids=torch.tensor([sequence]), use_cache=False)[0][0, -1] for sequence in sequences])


def _run(model: Any, survey: AttentionSurvey, step: StepBatch, memory: BlockMemory | None = None) -> torch.Tensor:
    tokens, depth = torch.from_numpy(step.tokens)[None], torch.from_numpy(step.depth)[None]
    with running_step(RunningStep(step, survey.layers, memory)):
        output: torch.Tensor = model(input_ids=tokens, position_ids=depth, use_cache=False, attention_mask=None)[0][0]
    return output


def _together(model: PreTrainedModel, sequences: Sequences, survey: AttentionSurvey | None = None) -> torch.Tensor:
    survey = survey or survey_attention(model)
    model.set_attn_implementation(TRIE_ATTENTION_NAME)
    step, places = naive_step(sequences)
    return _run(model, survey, step)[places]


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


# They include sinks, latent keys, windows, chunks, caps and position-dependent scales.
NEVER_REFUSED = {
    *({*TINY_FAMILIES} - {"jamba", "qwen3_next"}),
    *("gemma2", "gemma3", "gemma4", "llama", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "mimo_v2_flash"),
}


@pytest.mark.sampled(every=68)
@pytest.mark.parametrize("name", sorted({*TINY_FAMILIES, *DENSE, *DISCOVERED}))
def test_a_family_gives_each_sequence_what_it_gives_it_alone_or_is_refused(name: str) -> None:
    model = _model(name)
    survey = survey_attention(model)
    if survey.refusal is not None:
        assert name not in NEVER_REFUSED
        return
    sequences = _sequences()
    expected = _alone(model, sequences)
    assert _difference(_together(model, sequences, survey), expected) < 1e-5


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_no_causal_attention_is_refused_with_a_reason(name: str) -> None:
    model = _model(name)
    before = model.config._attn_implementation
    refusal = survey_attention(model).refusal
    assert refusal is not None
    assert REFUSED[name] in refusal
    assert model.config._attn_implementation == before


def test_sparse_attention_and_masks_of_a_models_own_are_refused() -> None:
    config = discovered_tiny_model(DISCOVERED["minimax_m3_vl"]).config
    config.layer_types = ["minimax_m3_sparse"] * config.num_hidden_layers
    refusal = survey_attention(transformers.AutoModelForCausalLM.from_config(config).eval()).refusal
    assert "called with block_indices" in (refusal or "")
    model = _dense("llama")

    def with_another_mask(module: Any, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return given, {**named, "attention_mask": named["attention_mask"].clone()}

    model.model.layers[1].self_attn.register_forward_pre_hook(with_another_mask, with_kwargs=True)
    assert "a mask that transformers' mask functions did not create" in (survey_attention(model).refusal or "")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4", "deepseek_v3"])
def test_the_probe_says_what_the_survey_says_of_real_families(name: str) -> None:
    model = _model(name)
    before = model.config._attn_implementation
    for dtype in (torch.float32, torch.bfloat16):
        assert probe_trie(model.to(dtype), survey_attention(model)) is None
    assert model.config._attn_implementation == before


def test_the_probe_finds_what_no_rule_does() -> None:
    """A layer that reads the previous token of the stream, without attention, convolution or recurrence."""
    model = _dense("llama")
    assert probe_trie(model, survey_attention(model)) is None

    def add_neighbour(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.1 * torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]

    hook = model.model.layers[1].mlp.register_forward_hook(add_neighbour)
    assert survey_attention(model).refusal is None
    assert "differ by" in (probe_trie(model, survey_attention(model)) or "")
    hook.remove()
    assert probe_trie(model, survey_attention(model)) is None


def test_windows_and_chunks_of_real_sizes_are_learned_from_a_few_tokens() -> None:
    model = tiny_model("mixtral", sliding_window=4096)
    assert {layer.past for layer in survey_attention(model).layers.values()} == {VisiblePast(window=4096)}
    model = tiny_model("llama4", attention_chunk_size=8192, max_position_embeddings=1 << 20)
    survey = survey_attention(model)
    assert [layer.past.chunk for layer in survey.layers.values()] == [8192, 8192, 8192, 0]
    assert survey.position_limit is None


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("name", sorted(TINY_FAMILIES))
def test_a_configuration_alone_says_the_same(name: str) -> None:
    model = tiny_model(name)
    with torch.device("meta"):
        weightless = type(model)(model.config).eval()
    assert survey_attention(weightless) == survey_attention(model)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "llama4" else [pytest.mark.slow])
        # On a GPU, the router of kolibri1 multiplies with an `out_dtype`, whose values a CPU cannot compute.
        for name in sorted({*TINY_FAMILIES, *DENSE, *DISCOVERED} - {"kolibri1"})
    ],
)
def test_a_gpu_says_the_same(name: str) -> None:
    """The survey runs on fake CUDA tensors, which take no operand from the CPU."""
    model = _model(name)
    expected = survey_attention(model)
    # transformers takes fake tensors for those of a tracer, whose values are unknown.
    is_no_tracer = mock.patch.object(transformers.masking_utils, "is_tracing", return_value=False)
    with is_no_tracer, pretended_gpu(), computed_values() as values:
        put_on_gpu(model, values.on_gpu)
        assert survey_attention(model) == expected


def test_a_survey_reads_no_expert() -> None:
    model = tiny_model("qwen3_moe")
    expected = survey_attention(model)
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeExperts":
            module.gate_up_proj = None
    assert survey_attention(model) == expected


def test_rotations_that_depend_on_the_longest_sequence_of_a_step_have_a_limit() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    assert survey_attention(tiny_model("qwen3_moe", rope_parameters=rope)).position_limit == 64
    assert survey_attention(tiny_model("qwen3_moe")).position_limit is None


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4", "deepseek_v3", "gemma2"])
def test_a_request_gets_the_same_alone_in_company_and_with_a_cache(name: str) -> None:
    model = _model(name)
    survey = survey_attention(model)
    sequences = _sequences(length=40)
    expected = _alone(model, sequences)
    model.set_attn_implementation(TRIE_ATTENTION_NAME)
    # Each sequence alone, all in one step, in a step with other sequences, and after cached blocks of every length.
    steps, step_positions = zip(*(naive_step([sequence]) for sequence in sequences), strict=True)
    alone = torch.stack(
        [_run(model, survey, step)[positions[0]] for step, positions in zip(steps, step_positions, strict=True)]
    )
    step, positions = naive_step(sequences)
    together = _run(model, survey, step)[positions]
    step, positions = naive_step([*_sequences(seed=5, length=60), *sequences])
    company = _run(model, survey, step)[positions[-len(sequences) :]]
    blocks = {
        sequence[:end]: -1 for sequence in sequences for end in range(BLOCK_TOKENS, len(sequence) + 1, BLOCK_TOKENS)
    }
    blocks = {prefix: number for number, prefix in enumerate(blocks)}
    memory = BlockMemory(survey.shapes, len(blocks))
    step, positions = naive_step(sequences, stored=blocks)
    storing = _run(model, survey, step, memory)[positions]
    step, positions = naive_step(sequences, cached=blocks)
    assert step.contexts
    from_cache = _run(model, survey, step, memory)[positions]
    # Half of the blocks are cached: chains of several lengths, and new blocks after cached ones.
    first = {prefix: block for prefix, block in blocks.items() if len(prefix) == BLOCK_TOKENS}
    remaining_blocks = {prefix: block for prefix, block in blocks.items() if prefix not in first}
    for tensor in (*memory.keys, *memory.values):
        tensor[list(remaining_blocks.values())] = torch.nan
    used = max(sequences, key=len)
    step, positions = naive_step(
        [used], cached=first, stored={key: remaining_blocks[key] for key in remaining_blocks if used[: len(key)] == key}
    )
    extended = _run(model, survey, step, memory)[positions[0]]
    step, positions = naive_step([used], cached=blocks)
    assert len(step.contexts[0]) > 1
    extended_read = _run(model, survey, step, memory)[positions[0]]
    for states in (alone, together, company, storing, from_cache):
        assert _difference(states, expected) < 1e-5
    for last in (extended, extended_read):
        assert _difference(last, expected[sequences.index(used)]) < 1e-5
