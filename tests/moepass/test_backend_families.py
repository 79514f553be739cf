"""The backend on real architectures: every family, both forms, resident and streamed, bit-identical to the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import moepass
from moepass.runtime.offload.offload import find_expert_modules
from tests.helpers.models.tiny import (
    ExpertFamily,
    discover_expert_families,
    discovered_tiny_model,
    main_result,
    tiny_inputs,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("no_grad")

# One of each kind of attention and experts; every family also runs in
# `test_every_discovered_family_is_rewritten_or_refused_and_right`.
FAMILIES = ("deepseek_v3", "glm4_moe", "gpt_oss", "jamba", "llama4", "mixtral", "qwen3_next")
DISCOVERED = {record.name: record for record in discover_expert_families()}
# One of each kind: as most, transposed with biases, not gated, two expert modules in a multimodal layout.
KINDS = {"mixtral", "gpt_oss", "nemotron_h", "qwen3_vl_moe"}
IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
# Dynamo alone changes their last bit, with backend="eager" too.
CAPTURE_CHANGES = {"inkling"}
# Experts that all compute every token become grouped GEMMs of those that the router chose.
CHOSEN = {"llama4"}


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())


def _compile(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any
) -> tuple[torch.Tensor, list[moepass.Compilation]]:
    with moepass.record_compilations() as compilations:
        output = torch.compile(model, backend="asyncep", options=options)(**inputs)
    return main_result(output), compilations


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "implementation", "dtype", "streaming"),
    [
        (family, IMPLEMENTATIONS[number % 2], (torch.float32, torch.bfloat16)[number // 2 % 2], number % 3 > 0)
        for number, family in enumerate(FAMILIES)
    ],
)
def test_eager_lowering_is_bit_identical(family: str, implementation: str, dtype: torch.dtype, streaming: bool) -> None:
    model = tiny_model(family, dtype=dtype, experts_implementation=implementation)
    inputs = tiny_inputs(model)
    layers = list(find_expert_modules(model))
    expected = main_result(model(**inputs))
    if streaming:
        moepass.offload_experts(model)
    logits, compilations = _compile(model, inputs, lower="eager", debug=streaming)
    if family in CHOSEN:
        torch.testing.assert_close(logits, expected, rtol=1e-5 if dtype is torch.float32 else 2e-2, atol=1e-5)
    else:
        assert torch.equal(logits, expected)
    (compilation,) = compilations
    plan = compilation.plan
    assert plan.refusals == ()
    assert [block.name for block in plan.blocks] == layers
    assert {block.form for block in plan.blocks} == {"grouped_mm" if family in CHOSEN else implementation}
    assert plan.strategy == ("asyncep" if streaming else "resident")
    assert [stay.bank for stay in plan.slot_stays] == (list(range(len(layers))) if streaming else [])
    _check_numbers(family, model, compilation, streaming)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True], ids=["resident", "streaming"])
@pytest.mark.parametrize("family", sorted(CHOSEN))
def test_dense_experts_that_stay_dense_are_bit_identical(family: str, streaming: bool) -> None:
    model = tiny_model(family)
    inputs = tiny_inputs(model)
    expected = main_result(model(**inputs))
    if streaming:
        moepass.offload_experts(model)
    logits, (compilation,) = _compile(model, inputs, lower="eager", disable=["compute_chosen_pairs"])
    assert torch.equal(logits, expected)
    assert {block.form for block in compilation.plan.blocks} == {"dense_bmm"}


def _check_numbers(family: str, model: PreTrainedModel, compilation: moepass.Compilation, streaming: bool) -> None:
    """Compare the records of blocks with the family's configuration."""
    config = model.config.get_text_config()
    for block in compilation.plan.blocks:
        assert block.hidden == config.hidden_size
        assert block.gated
        assert block.experts in vars(config).values()
        assert block.top_k == config.num_experts_per_tok
        assert block.dtype == str(config.dtype).removeprefix("torch.")
        element = getattr(torch, block.dtype).itemsize
        assert block.weight_bytes == 3 * block.experts * block.hidden * block.intermediate * element
    if streaming:
        ring = compilation.executor.ring
        assert ring is not None
        assert ring.device_bytes == 2 * max(bank.format.slot_bytes for bank in compilation.plan.banks)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "resident"])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v3", "llama4"])
def test_inductor_is_within_1e_5_in_fp32(family: str, streaming: bool) -> None:
    """Experts are as most, transposed with biases, limited to groups, or compute every token."""
    model = tiny_model(family)
    inputs = tiny_inputs(model)
    expected = main_result(model(**inputs))
    if streaming:
        moepass.offload_experts(model)
    logits, compilations = _compile(model, inputs, lower="inductor", debug=streaming)
    assert len(compilations) == 1
    assert _difference(logits, expected) <= 1e-5


def _rewritten_or_refused(record: ExpertFamily, implementation: str) -> None:
    model = discovered_tiny_model(record, experts_implementation=implementation)
    inputs = tiny_inputs(model)
    expected = main_result(model(**inputs))
    report = moepass.offload_experts(model)
    output, compilations = _compile(model, inputs, lower="eager", debug=True)
    if record.name in CAPTURE_CHANGES:
        torch._dynamo.reset()
        captured = main_result(torch.compile(model, backend="eager")(**inputs))
        assert not torch.equal(captured, expected), f"{record.name} need not be in CAPTURE_CHANGES any more"
        torch.testing.assert_close(captured, expected, rtol=1e-5, atol=1e-6)
        expected = captured
    assert torch.equal(output, expected)
    taken = {stay.block for item in compilations for stay in item.plan.slot_stays}
    refused = {refusal.where: refusal.reason for item in compilations for refusal in item.plan.refusals}
    read = {bank.name for item in compilations for bank in item.plan.banks}
    assert read
    assert read <= set(report.layers)
    # Every bank that a graph reads streams, or is refused with a reason: none is passed over in silence.
    assert read <= taken | set(refused)
    assert all(refused.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "implementation"),
    # Families alternate between the two implementations.
    [(family, IMPLEMENTATIONS[number % 2]) for number, family in enumerate(sorted(DISCOVERED))],
)
def test_every_discovered_family_is_rewritten_or_refused_and_right(family: str, implementation: str) -> None:
    _rewritten_or_refused(DISCOVERED[family], implementation)


def test_discovery_covers_what_the_installed_transformers_has() -> None:
    assert len(DISCOVERED) >= 30
    assert set(DISCOVERED) >= KINDS


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_changing_shapes_are_captured_twice_at_most(streaming: bool) -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    shapes = [(2, 12), (3, 9), (5, 17), (2, 30), (7, 4), (4, 12)]
    expected = {shape: main_result(model(**tiny_inputs(model, *shape))) for shape in shapes}
    if streaming:
        moepass.offload_experts(model)
    with moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": streaming})
        for shape in shapes:
            assert torch.equal(main_result(compiled(**tiny_inputs(model, *shape))), expected[shape]), shape
    assert 1 <= len(compilations) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_marked_dynamic_sizes_are_captured_once(lower: str) -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    shapes = [(2, 12), (3, 9), (5, 17), (2, 30)]
    expected = {shape: main_result(model(**tiny_inputs(model, *shape))) for shape in shapes}
    moepass.offload_experts(model)
    with moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", options={"lower": lower, "debug": True})
        for shape in shapes:
            inputs = tiny_inputs(model, *shape)
            torch._dynamo.mark_dynamic(inputs["input_ids"], 0)
            torch._dynamo.mark_dynamic(inputs["input_ids"], 1)
            torch.testing.assert_close(main_result(compiled(**inputs)), expected[shape], rtol=1e-4, atol=1e-4)
    assert len(compilations) == 1


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_model_without_experts_compiles_and_the_plan_says_so(lower: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).requires_grad_(False)
    x = torch.randn(5, 16)
    with moepass.record_compilations() as compilations:
        output = torch.compile(model, backend="asyncep", options={"lower": lower})(x)
    torch.testing.assert_close(output, model(x), rtol=1e-5, atol=1e-6)
    plan = compilations[0].plan
    assert (plan.strategy, plan.reason) == ("resident", "the graph has no MoE block, so there is nothing to move")
    assert (plan.blocks, plan.refusals, plan.distinct_segments) == ((), (), 1)


def test_a_padded_batch_is_exact() -> None:
    model = tiny_model("mixtral", num_hidden_layers=2)
    inputs = tiny_inputs(model, 3, 10)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :4] = 0
    inputs["attention_mask"] = mask
    expected = main_result(model(**inputs))
    moepass.offload_experts(model)
    logits, _ = _compile(model, inputs, lower="eager", debug=True)
    assert torch.equal(logits, expected)


@pytest.mark.slow
def test_tied_expert_layers_stream_one_bank_for_all() -> None:
    model = tiny_model("qwen3_moe")
    model.model.layers[2].mlp.experts = model.model.layers[0].mlp.experts
    inputs = tiny_inputs(model)
    expected = main_result(model(**inputs))
    report = moepass.offload_experts(model)
    assert len(report.layers) == 2
    logits, (compilation,) = _compile(model, inputs, lower="eager", debug=True)
    assert torch.equal(logits, expected)
    assert [stay.bank for stay in compilation.plan.slot_stays] == [0, 1, 0]
